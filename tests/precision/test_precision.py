"""Parameters of two precisions: their values and names, and training, which is that in float32."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer, optimizer, precision
from fastopt.parameter import ParameterDict
from fastopt.precision import ExternalInitializer, Initializer, update_initializer
from fastopt.scope import name_scope
from helpers.cases import kept
from helpers.refusals import check_refused, each
from helpers.two_precisions import HALVES, PAIRED, halves, paired, single_and_half

Pseudo, Reverse = PAIRED

# One precision


@pytest.mark.parametrize("dtype", [None, "float64", np.float16, "bfloat16"])
def test_the_operator_fills_a_parameter_of_the_dtype_that_is_asked_for(dtype):
    """Whatever its name."""
    info = Initializer("constant", value=0.5, dtype=dtype).create_param("fc_bias", None, (2, 3))
    assert (info.name, info.blob_copy, list(info.arrays)) == ("fc_bias", {}, ["fc_bias"])
    assert info.blob.dtype == HALVES.get(dtype, dtype or "float32")
    np.testing.assert_array_equal(info.blob.astype("f8"), np.full((2, 3), 0.5))


@pytest.mark.parametrize("klass", [Initializer, *PAIRED])
def test_the_operator_is_named_once(klass):
    late, given = klass(), klass("constant", value=3)
    with pytest.raises(ValueError, match="w: operator_name is not known"):
        late.create_param("w", None, 2)
    late.update("constant", {"value": 3})
    for init in (late, given):
        assert (init.operator_name, init.operator_kwargs) == ("constant", {"value": 3})
        with pytest.raises(ValueError, match="'constant' for good, 'one' cannot"):
            init.update("one", {})
        assert init.create_param("w", None, 1).blob == 3


REFUSED = {
    "Initializer('nothing')": "ValueError: nothing",
    "Initializer(3)": "TypeError: 3",
    "Initializer('normal', size=3)": "TypeError: size",
    "Initializer(value=3)": "TypeError: value need an operator_name",
    "Initializer('one', dtype='int8')": "ValueError: dtype must be one of.*'int8'",
    "Initializer('one', dtype='floot')": "TypeError: dtype.*'floot'",
    "PseudoFP16Initializer('one', dtype='float32')": "ValueError: one of float16, bfloat16",
    "Initializer('one').create_param('w', None, None)": "ValueError: w: shape must be known",
    **each("Initializer('one').create_param('w', None, (2, {}))", "ValueError: w: shape must be"
              " known", 0, -1, None),
    **each("{}.create_param(3, {{}}, 2)", "TypeError: param_name must be a str, got int",
              "Initializer('one')", "ExternalInitializer(ones)"),
    "update_initializer(ExternalInitializer, None, ('normal', {}))":
        "TypeError: ExternalInitializer: array must be a NumPy .* got str",
    **each("update_initializer(None, None, {})", "TypeError: operator name and a dict",
              None, "'normal'", ("normal",), ("normal", 3), (3, {})),
}  # fmt: skip


@pytest.mark.parametrize(("code", "error"), REFUSED.items())
def test_what_does_not_fit_is_refused(code, error):
    check_refused(code, error, {**vars(precision), "ones": np.ones(2)})


# Two precisions


@pytest.mark.parametrize(
    ("klass", "dtype", "of_weight", "of_copy", "name"),
    [
        (Pseudo, None, "float16", "float32", "w_fp32"),
        (Pseudo, "bfloat16", "bfloat16", "float32", "w_fp32"),
        (Reverse, None, "float32", "float16", "w_fp16"),
        (Reverse, "bfloat16", "float32", "bfloat16", "w_bf16"),
    ],
)
def test_a_weight_has_a_copy_in_the_other_precision(klass, dtype, of_weight, of_copy, name):
    info = klass("one", **({"dtype": dtype} if dtype else {})).create_param("w", None, (2, 3))
    assert info.blob.dtype == of_weight
    assert info.blob_copy[of_copy].dtype == of_copy
    assert list(info.arrays) == ["w", name]


@paired
@halves
def test_float32_values_are_not_rounded_and_halves_are_rounded_once(klass, dtype):
    """One generator draws all parameters."""
    init, same = klass("normal", sigma=1.0, rng=3, dtype=dtype), initializer.Normal(1.0, rng=3)
    for shape in [(50, 4), (9,)]:
        expected = np.empty(shape, np.float32)
        same(initializer.InitDesc("fc_weight"), expected)
        single, half = single_and_half(init.create_param("w", None, shape))
        np.testing.assert_array_equal(single, expected)
        np.testing.assert_array_equal(half, expected.astype(HALVES[dtype]))
        assert not np.shares_memory(single, half)


@given(st.sampled_from(PAIRED), st.sampled_from(sorted(HALVES)), st.floats(width=32))
def test_values_that_half_precision_cannot_hold_are_refused(klass, dtype, value):
    init, net = klass("constant", value=value, dtype=dtype), {}
    with np.errstate(over="ignore"):
        half = np.float32(value).astype(HALVES[dtype])
    if np.isfinite(half):
        single, rounded = single_and_half(init.create_param("w", net, 2))
        assert (single == np.float32(value)).all()
        assert (rounded == half).all()
    else:
        with pytest.raises(ValueError, match=f"w: .*{dtype}"):
            init.create_param("w", net, 2)
        assert net == {}


# Names and workspaces


def test_names_are_those_of_the_present_scope():
    net = {}
    with name_scope("net", params=ParameterDict()), name_scope("fc"):
        info = Pseudo("one").create_param("w", net, 2)
        found = ExternalInitializer().create_param("w", net, 2)
    assert (info.name, sorted(net)) == ("net/fc/w", ["net/fc/w", "net/fc/w_fp32"])
    assert found.blob is info.blob


@pytest.mark.parametrize("taken", ["w", "w_fp32"])
def test_workspaces_keep_what_they_have(taken):
    net = {taken: np.ones(3)}
    with pytest.raises(ValueError, match=f"w: init_net has {taken} already"):
        Pseudo("one").create_param("w", net, 2)
    assert list(net) == [taken]


# Arrays of the caller


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), None])
def test_an_array_of_the_caller_becomes_the_weight_itself(dtype, shape):
    array, net = np.ones((2, 3), HALVES.get(dtype, dtype)), {}
    info = ExternalInitializer(array).create_param("w", net, shape)
    assert info.blob is net["w"] is array
    assert ExternalInitializer().create_param("w", net, shape).blob is array
    assert info.blob_copy == {}


BAD_ARRAYS = {
    "a list": ([1.0, 1.0], TypeError, "NumPy array, got list"),
    "integers": (np.ones(2, int), TypeError, "float32.*int64"),
    "swapped bytes": (np.ones(2, ">f4"), TypeError, "float32.*>f4"),
    "another shape": (np.ones(3), ValueError, r"\(2,\).*\(3,\)"),
    "read-only": (np.broadcast_to(1.0, 2), ValueError, "read-only"),
    "infinite": (np.array([1, np.inf]), ValueError, "infinities or NaN"),
    "NaN": (np.array([1, np.nan], np.float16), ValueError, "infinities or NaN"),
    "none": (None, ValueError, "neither ExternalInitializer nor init_net"),
}


@pytest.mark.parametrize("from_net", [False, True], ids=["given", "in the workspace"])
@pytest.mark.parametrize("case", BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_bad_arrays_name_the_fault_and_are_not_taken(case, from_net):
    array, error, words = case
    net = {"w": array} if from_net and array is not None else {}
    before = [*net]
    with pytest.raises(error, match=f"^(w|ExternalInitializer): .*{words}"):
        ExternalInitializer(None if from_net else array).create_param("w", net, 2)
    assert [*net] == before


# Choice of a class and of arguments


@pytest.mark.parametrize("asked", [None, (), ("constant", {"value": 3})])
@pytest.mark.parametrize("klass", [None, Initializer, *PAIRED])
def test_what_is_not_asked_for_is_the_default(klass, asked):
    made = update_initializer(klass, asked, ("normal", {"sigma": 0.1}))
    assert type(made) is (klass or Initializer)
    expected = asked or ("normal", {"sigma": 0.1})
    assert (made.operator_name, made.operator_kwargs) == expected


# Under an updater


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "adam": {"learning_rate": 0.01, "wd": 0.1},
    "lamb": {"learning_rate": 0.01, "wd": 0.1},
}
optimizers = pytest.mark.parametrize("name", kept(OPTIMIZERS, "adam"))


def updater_of(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, **OPTIMIZERS[name], **kwargs))


def gradients(dtype, count=4):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(5, 3)).astype("f4").astype(HALVES[dtype]) for _ in range(count)]


def made(klass, dtype, workspace=None):
    return klass("normal", sigma=1.0, rng=0, dtype=dtype).create_param("w", workspace, (5, 3))


def single_precision(name, dtype):
    """Weights after each step when everything is float32."""
    weight = made(Initializer, "float32").blob
    updater = updater_of(name)
    for grad in gradients(dtype):
        updater("w", grad.astype(np.float32), weight)
        yield weight


@optimizers
def test_the_master_is_the_array_that_the_optimizer_works_on(name):
    info, updater = made(Pseudo, "float16"), updater_of(name, multi_precision=True)
    info.bind(updater, 3)
    start = info.blob_copy["float32"].copy()
    np.testing.assert_array_equal(start, made(Initializer, "float32").blob)
    updater(3, gradients("float16")[0], info.blob)
    assert any(info.arrays["w_fp32"] is part for part in updater.states[3])
    assert (info.blob_copy["float32"] != start).all()


@paired
@halves
@optimizers
def test_a_workspace_follows_training_and_saves_the_truth(name, dtype, klass):
    """A run that goes on from a saved workspace is the run that was not interrupted."""
    workspace, updater = {}, updater_of(name, multi_precision=True)
    info = made(klass, dtype, workspace).bind(updater)
    grads = gradients(dtype)
    for grad in grads[:2]:
        updater("w", grad, info.blob)
        assert all(workspace[key] is array for key, array in info.arrays.items())
    restored, later = {}, updater_of(name, multi_precision=True)
    info = made(klass, dtype, restored)
    info.blob[...] = workspace["w"]
    later.set_states(updater.get_states(dump_optimizer=True))
    info.bind(later)
    if klass is Pseudo:
        np.testing.assert_array_equal(restored["w_fp32"], workspace["w_fp32"])
    for grad in grads[2:]:
        later("w", grad, info.blob)
    *_, expected = single_precision(name, dtype)
    single, half = single_and_half(info)
    np.testing.assert_array_equal(single, expected)
    np.testing.assert_array_equal(half, expected.astype(HALVES[dtype]))


@pytest.mark.parametrize("multi_precision", [True, False])
def test_a_master_that_no_updater_uses_warns_once(multi_precision):
    info = made(Pseudo, "float16")
    updater = updater_of("sgd", multi_precision=multi_precision, rounding="stochastic")
    grad = gradients("float16")[0]
    with pytest.warns(UserWarning, match=r"^index 3: .*master is not used; call bind") as record:
        updater(3, grad, info.blob)
    assert [warning.filename for warning in record] == [__file__]
    updater(3, grad, info.blob)
    updater_of("sgd", multi_precision=True)(3, grad, info.blob)


def test_a_split_master_is_no_array_but_starts_unrounded_too():
    workspace, updater = {}, updater_of("adam", multi_precision=True, master="split")
    info = made(Pseudo, "bfloat16", workspace).bind(updater)
    expected = single_precision("adam", "bfloat16")
    for grad, single in zip(gradients("bfloat16"), expected, strict=True):
        updater("w", grad, info.blob)
        np.testing.assert_allclose(info.blob.astype("f4"), single, rtol=2**-8)
    assert [*info.arrays] == [*workspace] == ["w"]


def test_one_precision_needs_no_masters_and_two_are_refused_without():
    info, updater = made(Initializer, "float32"), updater_of("sgd")
    assert info.bind(updater).blob_copy == {}
    info = made(Pseudo, "float16")
    before = info.blob_copy["float32"]
    with pytest.raises(ValueError, match="multi_precision=True"):
        info.bind(updater)
    assert info.blob_copy["float32"] is before
    assert repr(info) == "<ParameterInfo w: float16, w_fp32: float32, shape (5, 3)>"
