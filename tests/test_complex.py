"""Complex weights are updated with the bits of their real views, in every form of a call."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse

import fastopt
from fastopt import EMA, SWA, Lookahead, optimizer
from fastopt._engine.validate import leaves
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from fastopt.distributed.threads import run_threads
from fastopt.sparse import RowSparse
from helpers.cases import CASES, FEW, FIRST, by_default, named
from helpers.frames import frames
from helpers.plans import LAYOUTS
from helpers.trees import assert_same
from helpers.written_headers import read_in_python

SHAPES = (), (3,), (4, 5), (0, 2), (2, 0), (2, 1, 3), (1,)
DTYPES = [np.complex64, np.complex128]
TAKING = [case for case in CASES if not case.make().by_row]
REFUSING = sorted({name for name in FIRST if FIRST[name].make().by_row})


def real(array):
    """Copy of the real view."""
    parts = np.asarray(array)
    return np.stack([parts.real, parts.imag], -1)


def drawn(rng, shape, dtype=np.complex64):
    return np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype)


def weights_of(rng, dtype=np.complex64):
    """Weights of all shapes, one in Fortran order and one with strides."""
    made = [drawn(rng, shape, dtype) for shape in SHAPES]
    strided = np.zeros((6, 4), dtype)[::2, 1:3]
    strided[...] = drawn(rng, (3, 2), dtype)
    return [*made, np.asfortranarray(drawn(rng, (3, 4), dtype)), strided]


def laid_out(grad, step):
    """The gradient in C order, in Fortran order, backward, or unaligned."""
    form = ("plain", "Fortran order", "reversed", "unaligned")[step % 4]
    return LAYOUTS[form](grad) if grad.ndim else grad


def single(updater, grads, weights):
    for k, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        updater(k, grad, weight)


def together(updater, grads, weights):
    updater([*range(len(weights))], grads, weights)


def as_dict(updater, grads, weights):
    updater.step(dict(enumerate(grads)), dict(enumerate(weights)))


def nested(updater, grads, weights):
    updater.step(*({"a": own[:2], "b": {"c": own[2:]}} for own in (grads, weights)))


def bare(updater, grads, weights):
    updater.step(grads[2], weights[2])


def updated(updater, grads, weights):
    before = copy.deepcopy(weights)
    after = updater.updated(grads, weights)
    assert_same([np.array(weight) for weight in weights], before)
    for weight, new in zip(weights, after, strict=True):
        assert new.dtype == weight.dtype
        weight[...] = new


FORMS = [single, together, as_dict, nested, bare, updated]


def assert_pairs(steps, made, form=together, dtype=np.complex64, scale=1, change=None):
    """Take steps with complex weights and with their real views, which must have the same bits.

    A gradient of another precision is converted as a real one is.
    """
    rng = np.random.default_rng(0)
    weights = weights_of(rng, dtype)
    views, updaters = list(map(real, weights)), [made(), made()]
    for step in range(steps):
        if step == 3 and change is not None:
            saved = updaters[0].states_dict()
            updaters = [change(k, updaters[k], saved, made()) or updaters[k] for k in (0, 1)]
        kind = DTYPES[dtype is DTYPES[0]] if step == 1 and scale == 1 else dtype
        grads = [np.asarray(scale * drawn(rng, weight.shape, dtype), kind) for weight in weights]
        form(updaters[0], [laid_out(grad, step) for grad in grads], weights)
        form(updaters[1], list(map(real, grads)), views)
        assert updaters[0].info._replace(slow=0) == updaters[1].info._replace(slow=0)
    assert_same(list(map(real, weights)), views)
    assert_same(*(updater.states_dict() for updater in updaters))
    return updaters, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", by_default(TAKING))
def test_a_complex_weight_gets_the_bits_of_its_real_view(case, dtype):
    (updater, _), weights = assert_pairs(4, lambda: case.updater(wd=case.wd), dtype=dtype)
    state = updater.states[2]
    shapes = {array.shape for array in leaves(state)}
    assert shapes <= {(*weights[2].shape, 2), ()}
    if not case.make().batches:
        assert updater.info.slow.calls == 0


SETTINGS = {
    "ema": {"average": EMA(decay=0.9)},
    "swa": {"average": SWA(start=2, every=2)},
    "lookahead": {"average": Lookahead(k=2)},
    "accumulate": {"accumulate": 2},
    "global norm": {"clip_global_norm": 0.1},
    "scaler": {"loss_scaler": LossScaler(init_scale=4.0)},
    "groups": {"groups": {r"1$": {"wd_mult": 0.5}, r"3$": {"frozen": True}}},
    "all": {"average": EMA(), "accumulate": 2, "clip_global_norm": 0.1},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", named(["adam", "lamb", "sgd", "prodigy"], *FEW))
def test_settings_have_the_bits_of_real_views(name, form, settings):
    def made():
        return optimizer.Updater(FIRST[name].make(wd=0.1), **copy.deepcopy(settings))

    if (name == "prodigy" and form is single) or (form is bare and "groups" in settings):
        pytest.skip("a step of Prodigy is one call, and no group has an array without a name")
    (updater, other), weights = assert_pairs(5, made, form)
    assert updater.info.slow == other.info.slow
    if "average" in settings and form is together:
        with updater.averaged():
            average = weights[2].copy()
        np.testing.assert_array_equal(real(average), updater.averages[2].astype(np.float32))
        with updater.averaged({2: weights[2]} | dict(enumerate(weights))):
            np.testing.assert_array_equal(weights[2], average)


def test_units_of_matrices_are_clipped_by_their_moduli():
    rng = np.random.default_rng(0)
    weight, grad = drawn(rng, (4, 3)), 10 * drawn(rng, (4, 3))
    updater, before = optimizer.Updater(optimizer.SGD(lr=1.0), clip_adaptive=0.1), weight.copy()
    updater("w", grad, weight)
    updater("w", np.zeros_like(grad), weight)
    norms = np.linalg.norm(weight - before, axis=1) / np.linalg.norm(before, axis=1)
    np.testing.assert_allclose(norms, 0.1, rtol=1e-5)
    assert updater.info.slow.calls == 0


@pytest.mark.parametrize("single_call", [True, False], ids=["single", "list"])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"average": EMA()}, SETTINGS["all"]])
def test_a_warm_call_takes_the_python_frames_of_a_real_one(settings, single_call):
    found = []
    for dtype in (np.complex64, np.float32):
        updater = optimizer.Updater(optimizer.Adam(), **settings)
        weights = [np.ones((4, 3), dtype) for _ in range(3)]
        for _ in range(6):
            grads = [np.ones((4, 3), dtype) for _ in range(3)]
            call = ([0], grads[:1], weights[:1]) if single_call else ([0, 1, 2], grads, weights)
            entered = frames(lambda call=call, updater=updater: updater(*call))
        found.append(entered)
        assert updater.info.slow.calls == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(9,), (9, 3)])
@pytest.mark.parametrize("kwargs", [{}, {"lazy_update": False}, {"sparse_decay": "catch_up"}])
@pytest.mark.parametrize("name", named(["adamw", "sgd", "lamb", "sgld"], "adamw"))
def test_rows_have_the_bits_of_real_views(name, kwargs, shape):
    if kwargs.get("sparse_decay") and name != "adamw":
        pytest.skip("it does not defer decay")
    rng = np.random.default_rng(0)
    weight = drawn(rng, shape)
    view, made = real(weight), [FIRST[name].updater(**kwargs, wd=0.1) for _ in range(2)]
    for step in range(6):
        rows = rng.integers(0, 9, 5)
        values = drawn(rng, (5, *shape[1:]), DTYPES[step == 3])
        grad, parts = (values, rows), (real(values), rows)
        if step % 2:
            grad, parts = RowSparse(*grad, weight.shape), RowSparse(*parts, view.shape)
        made[0]("w", grad, weight)
        made[1]("w", parts, view)
        assert made[0].info.slow.calls == 0
    for each, own in zip(made, (weight, view), strict=True):
        each.flush("w", own)
    assert_same(real(weight), view)
    assert_same(made[0].states_dict(), made[1].states_dict())


def test_a_scipy_array_is_its_rows():
    rng = np.random.default_rng(0)
    dense = scipy.sparse.random_array((7, 3), density=0.3, rng=rng) * (1 + 2j)
    rows = RowSparse.from_dense(dense.toarray())
    weights = [np.ones((7, 3), complex) for _ in range(3)]
    for weight, grad in zip(weights, (dense.tocsr(), dense.tocoo(), rows), strict=True):
        updater = optimizer.Updater(optimizer.Adam())
        for _ in range(3):
            updater("w", grad, weight)
        np.testing.assert_array_equal(weight, weights[0])


def test_a_number_is_a_gradient_of_a_weight_with_one_element():
    for weight in (np.ones((), complex), np.ones(1, complex)):
        for number in (1 + 2j, np.complex128(1 + 2j)):
            weight[...] = 1
            optimizer.Updater(optimizer.SGD(lr=1.0))("w", number, weight)
            assert weight == -2j
    assert optimizer.Updater(optimizer.SGD(lr=1.0)).updated(1j, 2j) == 1j


def test_either_array_may_be_the_real_view():
    rng = np.random.default_rng(0)
    weight, updater = drawn(rng, (4,)), optimizer.Updater(optimizer.SGD(lr=1.0))
    expected = weight.copy()
    for step in range(6):
        grad = drawn(rng, (4,))
        expected -= grad
        own, parts = weight.view("f4").reshape(4, 2), grad.view("f4").reshape(4, 2)
        updater("w", *((grad, weight), (parts, weight), (grad, own))[step % 3])
        np.testing.assert_array_equal(weight, expected)


def loads(side):
    """A change of one side to a new updater with the state of the complex one."""

    def change(k, updater, saved, new):
        if k == side:
            new.load_states_dict(saved)
        return new if k == side else updater

    return change


def adam(change=None, **settings):
    return {"made": lambda: optimizer.Updater(optimizer.Adam(), **settings), "change": change}


def adam_in(dtype):
    return {"made": lambda: optimizer.Updater(optimizer.Adam(state_dtype=dtype, state_min_size=1))}


AVERAGED = {"average": EMA(), "accumulate": 2}
PAIRS = {
    "complex loads": adam(loads(0), **AVERAGED),
    "real loads": adam(loads(1), **AVERAGED),
    "pickled": adam(lambda k, updater, *_: pickle.loads(pickle.dumps(updater)), **AVERAGED),
    "other state": adam(lambda k, updater, *_: updater.set_state_dtype("bfloat16")),
    "reset": adam(lambda k, updater, *_: updater.reset()),
    "bfloat16 state": adam_in("bfloat16"),
    "8-bit state": adam_in("int8"),
    "squares that overflow": {
        "made": lambda: optimizer.Updater(optimizer.SGD(lr=1.0), clip_global_norm=1.0),
        "dtype": np.complex128,
        "scale": 1e200,
    },
    "headers that Python reads": {
        "made": lambda: read_in_python(optimizer.Updater(optimizer.Adam(), average=EMA()))
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_updaters_change_like_those_of_real_views(name):
    assert_pairs(5, **PAIRS[name])


def test_a_load_inside_of_averaged_restores_complex_weights():
    weight = np.zeros(2, complex)
    old, new = (optimizer.Updater(optimizer.SGD(lr=1.0), average=EMA(decay=0.5)) for _ in range(2))
    old("w", np.array([-1, -1j]), weight)
    with old.averaged():
        np.testing.assert_array_equal(weight, [0.5, 0.5j])
        new.load_states_dict(old.states_dict())
        again = weight.copy()
    new.restore_weights({"w": again})
    np.testing.assert_array_equal(again, [1, 1j])


def test_rows_are_added_and_windows_finished():
    updater = optimizer.Updater(optimizer.SGD(lr=1.0, momentum=0.5), accumulate=2)
    weight = np.zeros(2, complex)
    updater("w", np.array([2, 2j]), weight)
    updater.finish()
    np.testing.assert_array_equal(weight, [-2, -2j])
    weight = np.append(weight[1:], 0)
    updater.resize("w", weight, [1, -1])
    updater("w", np.array([0, 1j]), weight)
    updater.finish()
    np.testing.assert_array_equal(weight, [-3j, -1j])


@fastopt.rule(state=("other",), hyper=("lr",), extra="other")
def corrected(weight, grad, state, h):
    return weight - h.lr * (grad - state[0]), state


class Corrected(optimizer.Optimizer):
    """A rule with a second gradient."""

    rule = corrected


def test_an_extra_array_is_complex_too():
    updater, weight = optimizer.Updater(Corrected(lr=1.0)), np.zeros(2, complex)
    for _ in range(2):
        updater("w", np.array([1j, 2]), weight, extra=np.array([1, 1j]))
    np.testing.assert_array_equal(weight, [2 - 2j, -4 + 2j])
    with pytest.raises(TypeError, match=r"index 'w': .* complex128 of shape .*, got float64"):
        updater("w", np.array([1j, 2]), weight, extra=np.ones(2))
    np.testing.assert_array_equal(weight, [2 - 2j, -4 + 2j])


def test_pure_functions_return_complex_weights():
    params, grads = {"a": np.ones(2, complex)}, {"a": np.array([1j, 1])}
    init, update = fastopt.functional(fastopt.SGD(lr=1.0, momentum=0.5))
    state = init(params)
    first, state = update(grads, state, params)
    second, _ = update(grads, state, first)
    np.testing.assert_array_equal(params["a"], [1, 1])
    np.testing.assert_array_equal(first["a"], [1 - 1j, 0])
    np.testing.assert_array_equal(second["a"], [1 - 2.5j, -1.5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_complex_arrays_are_minimized(dtype):
    target = drawn(np.random.default_rng(0), (2, 3), dtype)

    def fun(x):
        error = x["x"] - target
        return np.sum(np.abs(error) ** 2), {"x": 2 * error}

    x0 = {"x": np.zeros((2, 3), dtype)}
    result = fastopt.minimize(fun, x0, lr=0.1, steps=500, average=EMA(decay=0.5))
    assert result.x["x"].dtype == dtype
    np.testing.assert_allclose(result.x["x"], target, atol=1e-3)
    one = fastopt.minimize(lambda x: (abs(x - 2j) ** 2, 2 * (x - 2j)), 1j, lr=0.1, steps=500)
    np.testing.assert_allclose(one.x, 2j, atol=1e-3)
    with pytest.raises(TypeError, match=r"bounds of 'x' are for real numbers, got complex"):
        fastopt.minimize(fun, x0, bounds={"x": [(0, 1)] * 6})


WRONG = {
    "real gradient": (np.ones(3), np.ones(3, complex), TypeError, "complex128 .* got float64 of"),
    "real weight":
        (np.ones(3, complex), np.ones(3), TypeError, r"float64 .* got complex128.*\.real"),
    "shape": (np.ones(4, complex), np.ones(3, complex), ValueError, r"\(3,\), got complex128 of"),
    "real rows": ((np.ones(1), [0]), np.ones(3, complex), TypeError, "complex128 .* float64"),
    "rows": ((np.ones(1, complex), [0]), np.ones(3), TypeError, r"got complex128.* x\.real"),
    "row out of range": ((np.ones(1, complex), [3]), np.ones(3, complex), ValueError, "below 3"),
    "none": (None, np.ones(3, complex), TypeError, "gradient must be .* got None"),
    "itself": (ONE := np.ones(3, complex), ONE, ValueError, "weight and gradient share memory"),
    "read-only": (np.ones(1, complex), np.broadcast_to(1j, 1), ValueError, "weight is read-only"),
    "byte order": (np.ones(3, "c16"), np.ones(3, ">c16"), TypeError, "got >f8 in another byte"),
}  # fmt: skip


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_arrays_change_nothing(case, seen):
    grad, weight, error, words = case
    updater = optimizer.Updater(optimizer.Adam())
    if seen:
        kind = complex if np.iscomplexobj(weight) else float
        updater("w", np.ones(weight.shape, kind), np.ones(weight.shape, kind))
    before = weight.copy(), updater.states_dict()
    with pytest.raises(error, match=f"index 'w': .*{words}"):
        updater("w", grad, weight)
    assert_same([np.array(weight), updater.states_dict()], list(before))


class InPython(optimizer.Optimizer):
    """An update() in Python."""

    def update(self, index, weight, grad, state):
        weight -= grad


AMBIGUOUS = [
    *(((3, 4), FIRST[name].updater, f"and {type(FIRST[name].make()).__name__} ")
      for name in REFUSING),
    ((3,), lambda: optimizer.Updater(optimizer.Muon()), "and Muon has no"),
    ((3,), lambda: optimizer.Updater(InPython()), "and InPython has no"),
    ((3,), lambda: optimizer.Updater(optimizer.Adam(), groups={"w": {"optimizer": "soap"}}),
     "and SOAP .* use a group with another optimizer"),
    ((3,), lambda: optimizer.Updater(optimizer.Adam(), clip_adaptive=0.1),
     r"clip_adaptive .* complex64 .* reshape it to \(1, 3\)"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "made", "words"), AMBIGUOUS)
@pytest.mark.parametrize("real_first", [False, True])
def test_what_is_ambiguous_is_refused(shape, made, words, real_first):
    weight, updater = np.ones(shape, np.complex64), made()
    if real_first:
        updater("w", *np.ones((2, *(shape if len(shape) == 2 else (3, 2))), np.float32))
    before = updater.states_dict()
    with pytest.raises(TypeError, match=f"'w': .*{words}"):
        updater("w", weight.copy(), weight)
    assert (weight == 1).all()
    assert_same(updater.states_dict(), before)


def test_updates_without_an_updater_refuse():
    adam, weight = optimizer.Adam(), np.ones(2, complex)
    state = adam.create_state("w", np.ones((2, 2)))
    with pytest.raises(TypeError, match=r"'w': weight must .* complex128; update x.view\('f8'\)"):
        adam.update("w", weight, weight.copy(), state)
    assert (weight == 1).all()


def test_ranks_and_compiled_functions_refuse():
    functions = fastopt.jit_functions(fastopt.Adam())
    with pytest.raises(Exception, match=r"complex128.*; pass x.view\(np.float64\)"):
        functions.init(np.ones(3, complex))

    def check(comm):
        updater = ShardedUpdater(fastopt.Adam(), comm)
        weights = [np.ones(2), np.ones((), complex)]
        updater(0, np.ones(2), weights[0])
        with pytest.raises(TypeError, match=r"weight must be .* complex128; update x.view\('f8'\)"):
            updater(0, np.ones((), complex), weights[1])
        assert weights[1] == 1

    run_threads(1, check)
