"""Orthogonalization by matrix products: against singular values, in both forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt._engine.newton_schulz import COEFFICIENTS, NewtonSchulz

shapes = st.tuples(st.integers(1, 40), st.integers(1, 40))
kinds = st.sampled_from(["float32", "float64"])


def drawn(shape, condition, seed, dtype="float64"):
    """Matrix with singular values from 1 to 1 / condition, times a random power of ten."""
    rng = np.random.default_rng(seed)
    left, _, right = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(1, 1 / condition, min(shape)) * 10.0 ** rng.integers(-5, 6)
    return (left * values @ right).astype(dtype)


def orthogonal(matrix, coefficients="polar", steps=5, scale=1.0, gram=None, eps=1e-7):
    out = np.full_like(matrix, np.nan)
    NewtonSchulz()(matrix, out, coefficients, steps, eps, scale, gram)
    return out


def distance(matrix):
    """Of a matrix from orthonormal rows or columns, relative to their number."""
    matrix = matrix.astype(np.float64)
    small = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    return np.linalg.norm(small - np.eye(len(small))) / np.sqrt(len(small))


def by_singular_values(matrix, coefficients, steps, eps=1e-7):
    """The same polynomials, of the singular values themselves."""
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    polynomials, safety, tight = COEFFICIENTS[coefficients]
    norm = np.linalg.norm(values)
    bound = safety * (np.sum((values / norm) ** 8) ** 0.125 if tight else 1)
    values = values / (max(norm, eps) * bound)
    for step in range(steps):
        a, b, c = polynomials[min(step, len(polynomials) - 1)]
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize(
    ("coefficients", "worst", "low", "high", "most"),
    [("polar", 200, 0.989, 1.011, 0.05), ("polar_express", 100, 0.8, 1.2, 1)],
)
@settings(max_examples=60, deadline=None)
@given(shapes, st.floats(0, 1), st.integers(0, 2**32), kinds)
def test_five_steps_leave_singular_values_near_one(
    coefficients, worst, low, high, most, shape, power, seed, dtype
):
    got = orthogonal(drawn(shape, worst**power, seed, dtype), coefficients)
    values = np.linalg.svd(got, compute_uv=False)
    assert low < values.min() <= values.max() < high
    assert distance(got) <= most


@pytest.mark.parametrize(
    ("shape", "most"), [((100, 150), 0.05), ((64, 64), 0.07), ((256, 256), 0.07)]
)
def test_random_matrices_become_orthogonal_too(shape, most):
    """Square ones have singular values down to 0, below the range of the polynomials."""
    matrices = np.random.default_rng(0).normal(size=(9, *shape)).astype(np.float32)
    polar, published = (
        np.median([distance(orthogonal(each, name)) for each in matrices])
        for name in ("polar", "polar_express")
    )
    assert polar < most < 0.18 < published


def test_the_polynomials_of_polar_are_optimal_one_after_the_other():
    """The error of each alternates between four points of its range, and is largest there."""
    low, high = 0.0025, 1.0
    for a, b, c in COEFFICIENTS["polar"].polynomials[:5]:
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        points = np.array([low, *inner, high])
        assert (np.diff(points) > 0).all()
        errors = (a * points + b * points**3 + c * points**5 - 1) * [-1, 1, -1, 1]
        np.testing.assert_allclose(errors, errors[0], rtol=1e-7)
        low, high = 1 - errors[0], 1 + errors[0]
    assert low == pytest.approx(0.98990, abs=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    shapes,
    st.floats(1, 1000),
    st.integers(0, 2**32),
    st.sampled_from(sorted(COEFFICIENTS)),
    st.integers(1, 8),
    st.sampled_from([False, True, None]),
    st.sampled_from([1e-7, 1.0]),
)
def test_it_maps_singular_values_and_nothing_else(
    shape, condition, seed, coefficients, steps, gram, eps
):
    """Norms below eps count as eps."""
    matrix = drawn(shape, condition, seed)
    expected = by_singular_values(matrix, coefficients, steps, eps)
    got = orthogonal(matrix, coefficients, steps, gram=gram, eps=eps)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 2**32), st.integers(-20, 20))
def test_powers_of_two_and_transposition_change_nothing(shape, seed, power):
    matrix = drawn(shape, 10, seed, "float32")
    got = orthogonal(matrix)
    np.testing.assert_array_equal(orthogonal(matrix * np.float32(2.0**power), eps=1e-30), got)
    if shape[0] != shape[1]:
        np.testing.assert_array_equal(orthogonal(np.ascontiguousarray(matrix.T)), got.T)


def test_the_result_is_scaled_and_may_replace_the_matrix():
    matrix = drawn((5, 9), 10, 0, "float32")
    work, expected = NewtonSchulz(), orthogonal(matrix) * np.float32(3)
    for view in (matrix.copy(), np.asfortranarray(matrix), np.repeat(matrix, 2, axis=0)[::2]):
        work(view, view, "polar", 5, 1e-7, 3.0)
        np.testing.assert_array_equal(view, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), shapes, st.integers(0, 2**32), kinds, st.sampled_from([False, None]))
def test_a_matrix_has_the_same_bits_among_others_of_its_shape(count, shape, seed, dtype, gram):
    rng = np.random.default_rng(seed)
    stack = rng.normal(size=(count, *shape)).astype(dtype)
    rows, work = stack.reshape(count * shape[0], shape[1]), NewtonSchulz()
    for form in (rows, np.asfortranarray(rows)):
        view = form.copy(order="K").reshape(count, *shape)
        alone = [orthogonal(each, gram=gram) for each in view]
        work.reserve(view)
        work(view, view, "polar", 5, 1e-7, gram=gram)
        for got, expected in zip(view, alone, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(3, 4), (2, 20)])
def test_zeros_stay_zeros_and_nan_spreads_without_a_warning(shape):
    assert not orthogonal(np.zeros(shape, np.float32)).any()
    for bad in (np.nan, np.inf):
        matrix = drawn(shape, 10, 0)
        matrix[1, 1] = bad
        assert np.isnan(orthogonal(matrix)).all()
