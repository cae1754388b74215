import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fastopt import initializer
from fastopt.initializer import InitDesc
from helpers.initializers import LIBRARY, made, named
from helpers.tensor_lists import dtype_of

FORMULAS = {
    "lecun_uniform": (1, "in", "uniform"),
    "lecun_normal": (1, "in", "truncated"),
    "he_uniform": (2, "in", "uniform"),
    "he_normal": (2, "in", "truncated"),
    "glorot_uniform": (1, "avg", "uniform"),
    "glorot_normal": (1, "avg", "truncated"),
    "xavier": (1, "avg", "uniform"),
    "msraprelu": (2 / (1 + 0.25**2), "avg", "gaussian"),
}


STANDARD = {
    "uniform": stats.uniform(-1, 2),
    "gaussian": stats.norm(),
    "truncated": stats.truncnorm(-2, 2),
}


def check(arr, wanted):
    """Numbers like these come from the distribution at least once in 10,000 times."""
    assert abs(arr).max() <= wanted.support()[1]
    assert stats.kstest(arr.ravel(), wanted.cdf).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("init", "wanted"),
    [
        (initializer.Uniform(0.5), stats.uniform(-0.5, 1)),
        (initializer.Normal(2), stats.norm(scale=2)),
        (initializer.TruncatedNormal(2), stats.truncnorm(-2, 2, scale=2)),
        (initializer.TruncatedNormal(0.5, 1.25), stats.truncnorm(-1.25, 1.25, scale=0.5)),
    ],
)
def test_distributions(init, wanted, dtype):
    init = initializer.create(init.dumps(), rng=0)
    check(named(init, "fc_weight", (100, 100), dtype).astype(np.float64), wanted)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(90, 130), (40, 30, 3, 3)])
def test_scale_follows_from_inputs_and_outputs(name, shape):
    gain, fan, kind = FORMULAS[name]
    kernel = math.prod(shape[2:])
    fans = {"in": shape[1] * kernel, "avg": (shape[0] + shape[1]) * kernel / 2}
    arr = named(initializer.create(name, rng=0), "fc_weight", shape) / math.sqrt(gain / fans[fan])
    assert arr.std() == pytest.approx(1, rel=5 / math.sqrt(2 * arr.size))
    check(arr * STANDARD[kind].std() * (1 - 1e-15), STANDARD[kind])


@pytest.mark.parametrize("name", ["lecun_normal", "he_normal", "glorot_normal"])
def test_normal_variants_without_truncation_have_tails(name):
    init = initializer.create(name, truncated=False, rng=0)
    arr = named(init, "fc_weight", (100, 100)) / math.sqrt(FORMULAS[name][0] / 100)
    check(arr, stats.norm())
    assert abs(arr).max() > 3


@given(
    rows=st.integers(1, 9),
    rest=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    scale=st.floats(0, 3),
    rand_type=st.sampled_from(["uniform", "normal"]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_orthogonal_rows_or_columns(rows, rest, scale, rand_type, dtype):
    init = initializer.Orthogonal(scale, rand_type, rng=0)
    matrix = named(init, "fc_weight", (rows, *rest), dtype).reshape(rows, -1).astype(np.float64)
    gram = matrix @ matrix.T if rows <= matrix.shape[1] else matrix.T @ matrix
    tolerance = (1e-5 if dtype == np.float32 else 1e-13) * max(scale**2, 1)
    assert abs(gram - scale**2 * np.eye(len(gram))).max() < tolerance


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
    for shape in [(2, 0, 3, 3), (0, 2, 3, 3), (2, 2, 3, 0)] * (name != "fusedrnn"):
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
