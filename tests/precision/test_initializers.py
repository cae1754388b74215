"""Initializers of two precisions: what they make, and under which names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.parameter import ParameterDict
from fastopt.precision import (
    ExternalInitializer,
    Initializer,
    PseudoFP16Initializer,
    ReversePseudoFP16Initializer,
    update_initializer,
)
from fastopt.scope import name_scope
from helpers.refusals import check_refused, each
from helpers.two_precisions import HALVES, PAIRED, halves, paired, single_and_half

# One precision


@pytest.mark.parametrize("dtype", [None, "float64", np.float16, "bfloat16"])
def test_the_operator_fills_a_parameter_of_the_dtype_that_is_asked_for(dtype):
    """Whatever its name."""
    info = Initializer("constant", value=0.5, dtype=dtype).create_param("fc_bias", None, (2, 3))
    assert (info.name, info.blob_copy, list(info.arrays)) == ("fc_bias", {}, ["fc_bias"])
    assert info.blob.dtype == HALVES.get(dtype, dtype or "float32")
    np.testing.assert_array_equal(info.blob.astype("f8"), np.full((2, 3), 0.5))


def test_one_generator_draws_all_parameters():
    init, same = Initializer("normal", sigma=1.0, rng=7), initializer.Normal(1.0, rng=7)
    for shape in [(2, 3), (4,)]:
        expected = np.empty(shape, np.float32)
        same(initializer.InitDesc("fc_weight"), expected)
        np.testing.assert_array_equal(init.create_param("w", None, shape).blob, expected)


@pytest.mark.parametrize("klass", [Initializer, *PAIRED])
def test_the_operator_is_named_once(klass):
    late, given = klass(), klass("constant", value=3)
    with pytest.raises(ValueError, match="w: operator_name is not known"):
        late.create_param("w", None, 2)
    with pytest.raises(ValueError, match="nothing"):
        late.update("nothing", {})
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
    "ReversePseudoFP16Initializer('one', dtype='f8')": "ValueError: one of float16, bfloat16",
    "Initializer('one').create_param('w', None, None)": "ValueError: w: shape must be known",
    **each("Initializer('one').create_param('w', None, (2, {}))", "ValueError: w: shape must be"
              " known", 0, -1, None),
    **each("{}.create_param(3, {{}}, 2)", "TypeError: param_name must be a str, got int",
              "Initializer('one')", "ExternalInitializer(ones)"),
    "update_initializer(ExternalInitializer, None, ('normal', {}))":
        "TypeError: ExternalInitializer: array must be a NumPy .* got str",
    **each("update_initializer(None, None, {})", "TypeError: operator name and a dict",
              None, "'normal'", ("normal",), ("normal", 3), (3, {})),
    "ExternalInitializer(ones).create_param('w', {'w': ones}, 2)":
        "ValueError: w: init_net has w already",
}  # fmt: skip


@pytest.mark.parametrize(("code", "error"), REFUSED.items())
def test_what_does_not_fit_is_refused(code, error):
    check_refused(code, error, {**globals(), "ones": np.ones(2)})


# Two precisions


@pytest.mark.parametrize(
    ("klass", "dtype", "of_weight", "of_copy", "name"),
    [
        (PseudoFP16Initializer, None, "float16", "float32", "w_fp32"),
        (PseudoFP16Initializer, "bfloat16", "bfloat16", "float32", "w_fp32"),
        (ReversePseudoFP16Initializer, None, "float32", "float16", "w_fp16"),
        (ReversePseudoFP16Initializer, "bfloat16", "float32", "bfloat16", "w_bf16"),
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
    pair = klass("normal", sigma=1.0, rng=3, dtype=dtype).create_param("w", None, (50, 4))
    alone = Initializer("normal", sigma=1.0, rng=3).create_param("w", None, (50, 4))
    single, half = single_and_half(pair)
    np.testing.assert_array_equal(single, alone.blob)
    np.testing.assert_array_equal(half, alone.blob.astype(HALVES[dtype]))
    assert (single != half.astype(np.float32)).any()
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
        info = PseudoFP16Initializer("one").create_param("w", net, 2)
        found = ExternalInitializer().create_param("w", net, 2)
    assert (info.name, sorted(net)) == ("net/fc/w", ["net/fc/w", "net/fc/w_fp32"])
    assert found.blob is info.blob


@pytest.mark.parametrize("taken", ["w", "w_fp32"])
def test_workspaces_keep_what_they_have(taken):
    net = {taken: np.ones(3)}
    with pytest.raises(ValueError, match=f"w: init_net has {taken} already"):
        PseudoFP16Initializer("one").create_param("w", net, 2)
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
    "a masked array": (np.ma.ones(2), TypeError, "MaskedArray"),
    "integers": (np.ones(2, int), TypeError, "float32.*int64"),
    "swapped bytes": (np.ones(2, ">f4"), TypeError, "float32.*>f4"),
    "another shape": (np.ones(3), ValueError, r"\(2,\).*\(3,\)"),
    "another number of dimensions": (np.ones((1, 2)), ValueError, r"\(2,\).*\(1, 2\)"),
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
