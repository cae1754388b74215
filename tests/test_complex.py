"""Complex weights are updated with the bits of their real views, in every form of a call."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastopt
from fastopt import EMA, optimizer
from fastopt.distributed import ShardedUpdater
from fastopt.distributed.threads import run_threads
from fastopt.sparse import RowSparse
from helpers.cases import CASES, FIRST
from helpers.plans import ASIDE, LAYOUTS, LIGHTLY, WAYS_TO_CALL, Forms, World, follow, plans
from helpers.settings import every_setting
from helpers.trees import assert_same

DTYPES = [np.complex64, np.complex128]
REFUSING = sorted({name for name in FIRST if FIRST[name].make().by_row})


def drawn(rng, shape, dtype=np.complex64):
    return np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype)


def joined(parts):
    """Complex array of the real view."""
    return parts.view(np.result_type(parts, 1j))[..., 0]


def parts_of(array):
    """The real view."""
    return array[..., np.newaxis].view(array.real.dtype)


def wide(parts):
    return joined(parts.astype(np.float64))


FORMS = Forms(
    LAYOUTS,
    {"float64": wide} | {
        name: lambda parts, layout=layout: layout(joined(parts)) for name, layout in LAYOUTS.items()
    },
    {
        "rows": lambda values, rows, shape: RowSparse(joined(values), rows, shape[:-1]),
        "pair": lambda values, rows, shape: (joined(values), rows),
        "pair in float64": lambda values, rows, shape: (wide(values), rows),
    },
    {name: aside for name, aside in ASIDE.items() if "half" not in name and name != "no copies"},
    LIGHTLY,
    (*WAYS_TO_CALL, "updated"),
)  # fmt: skip


class Complexes(World):
    """A world of complex weights, whose plain twin has their real views."""

    def __init__(self, setting, layouts, forms):
        super().__init__(setting, (), forms)
        for (name, parts), layout in zip(self.weights.items(), layouts, strict=True):
            self.weights[name] = forms.layouts[layout](joined(parts))

    def is_plain(self, name):
        return False

    def gradient(self, name, *arguments):
        own, self.weights = self.weights, {name: parts_of(self.weights[name])}
        made = super().gradient(name, *arguments)
        self.weights = own
        return made

    def numbers(self):
        weights, *others = super().numbers()
        return {name: parts_of(weight) for name, weight in weights.items()}, *others


@pytest.mark.filterwarnings(
    "ignore:.* has no effect", "ignore:.*arguments swapped", "ignore:this call starts states of"
)
@every_setting(
    lambda setting: (
        setting.is_elementwise
        and setting.dtype in ("float32", "float64")
        and not setting.make().by_row
    ),
    sample=[str(case) for case in CASES if not case.recorded],
)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_complex_weight_gets_the_bits_of_its_real_view(setting, data):
    shapes = {name: (*(1,) * (2 - len(shape)), *shape, 2) for name, shape in setting.shapes.items()}
    setting = replace(setting, shapes=shapes)
    plan = data.draw(plans(setting, of=FORMS))
    found = follow(setting, plan, forms=FORMS, kind=Complexes)
    assert found.results() == follow(setting, plan, plain=True, forms=FORMS).results()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 0), (2, 1, 3)], ids=str)
def test_weights_of_any_shape_are_updated_and_change_like_their_real_views(shape, dtype, rng):
    updaters = [optimizer.Updater(optimizer.Adam()) for _ in range(2)]
    weight = drawn(rng, shape, dtype)
    parts = parts_of(weight).copy()
    for step in range(6):
        for updater in updaters if step == 2 else ():
            updater.set_state_dtype("bfloat16")
        for updater in updaters if step == 4 else ():
            updater.reset()
        grad = drawn(rng, shape, dtype)
        updaters[0]("w", grad, weight)
        updaters[1]("w", parts_of(grad), parts)
        assert step > 1 or updaters[0].info.slow.calls == 0
    assert_same(parts_of(weight), parts)
    assert_same(*(updater.states_dict() for updater in updaters))


def test_units_of_matrices_are_clipped_by_their_moduli():
    rng = np.random.default_rng(0)
    weight, grad = drawn(rng, (4, 3)), 10 * drawn(rng, (4, 3))
    updater, before = optimizer.Updater(optimizer.SGD(lr=1.0), clip_adaptive=0.1), weight.copy()
    updater("w", grad, weight)
    updater("w", np.zeros_like(grad), weight)
    norms = np.linalg.norm(weight - before, axis=1) / np.linalg.norm(before, axis=1)
    np.testing.assert_allclose(norms, 0.1, rtol=1e-5)
    assert updater.info.slow.calls == 0


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


VIEW = r"weight must .* complex128; update x.view\('f8'\)"


def test_ranks_compiled_functions_and_updates_without_an_updater_refuse():
    functions, adam, one = (
        fastopt.jit_functions(fastopt.Adam()),
        fastopt.Adam(),
        np.ones(2, complex),
    )
    with pytest.raises(Exception, match=r"complex128.*; pass x.view\(np.float64\)"):
        functions.init(one)
    with pytest.raises(TypeError, match=f"'w': {VIEW}"):
        adam.update("w", one, one.copy(), adam.create_state("w", np.ones((2, 2))))

    def check(comm):
        updater = ShardedUpdater(fastopt.Adam(), comm)
        updater(0, np.ones(2), np.ones(2))
        with pytest.raises(TypeError, match=VIEW):
            updater(0, one.copy(), one)

    run_threads(1, check)
    assert (one == 1).all()
