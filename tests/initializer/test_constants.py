import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.initializer import InitDesc
from helpers.initializers import LIBRARY, made, named
from helpers.tensor_lists import dtype_of


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize(
    ("arr", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "arr must be a NumPy array, got list"),
        (np.ma.ones(3), TypeError, "arr must be a NumPy array, got MaskedArray"),
        (np.ones(3, complex), TypeError, "arr must hold real numbers, got dtype complex128"),
        (np.ones(3, bool), TypeError, "arr must hold real numbers, got dtype bool"),
        (np.broadcast_to(1.0, 3), ValueError, "arr is read-only, an initializer writes to it"),
    ],
    ids=["list", "masked", "complex", "bool", "read-only"],
)
def test_wrong_arrays_are_named(name, arr, error, message):
    with pytest.raises(error, match=f"^fc_weight: {message}"):
        made(name)(InitDesc("fc_weight"), arr)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u2", ">f4", "bfloat16"])
def test_fixed_values_fill_any_real_dtype(dtype):
    inits = initializer.Zero(), initializer.One(), initializer.Constant(3), initializer.Bilinear()
    for init, value in zip(inits, (0, 1, 3, 1), strict=True):
        assert set(named(init, "weight", (2, 2, 1, 1), dtype_of(dtype)).ravel()) == {value}


@pytest.mark.parametrize("name", LIBRARY)
def test_arrays_without_elements_are_left_alone(name):
    for shape in [(2, 0, 3, 3), (0, 2, 3, 3)] * (name != "fusedrnn"):
        named(made(name), "weight", shape)


def test_constant_repeats_arrays_and_keeps_a_copy():
    value = np.array([[1.0], [2.0]])
    init = initializer.Constant(value)
    value[:] = 9
    assert named(init, "weight", (2, 3)).tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        ([1, 2, 3], "f4", ValueError, r"^weight: value has shape \(3,\), which does not fit \(2,"),
        (np.ones((1, 2, 2)), "f4", ValueError, r"value has shape \(1, 2, 2\)"),
        (0.5, "i4", TypeError, r"^weight: value \(float64\) does not fit into int32"),
        (200, "i1", TypeError, r"^weight: value \(int64\) does not fit into int8"),
        (-1, "u1", TypeError, "does not fit into uint8"),
    ],
)
def test_constants_that_do_not_fit_are_refused_and_change_nothing(value, dtype, error, message):
    arr = np.full((2, 2), 9, dtype)
    with pytest.raises(error, match=message):
        initializer.Constant(value)(InitDesc("weight"), arr)
    assert (arr == 9).all()


@given(factor=st.integers(1, 6), channels=st.integers(1, 3))
def test_bilinear_upsampling_keeps_a_constant_image(factor, channels):
    """The weights that meet in one pixel of the output sum up to 1."""
    size = 2 * factor - factor % 2
    kernel = named(initializer.Bilinear(), "weight", (channels, 1, size, size))
    padded = np.pad(kernel[-1, 0], (0, 2 * factor - size)).reshape(2, factor, 2, factor)
    np.testing.assert_allclose(padded.sum(axis=(0, 2)), 1)
