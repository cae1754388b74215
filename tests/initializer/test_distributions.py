import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from helpers.initializers import named

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


def ks(values, cdf):
    """Kolmogorov-Smirnov distance, scaled so that 2.2 is rarer than once in 10,000."""
    values = np.sort(np.asarray(values, np.float64), axis=None)
    wanted = np.vectorize(cdf)(values)
    return abs(wanted - (np.arange(values.size) + 0.5) / values.size).max() * values.size**0.5


def normal_cdf(x, sigma=1.0):
    return 0.5 * (1 + math.erf(x / sigma / math.sqrt(2)))


def truncated_cdf(x, sigma, bound):
    low, high = normal_cdf(-bound), normal_cdf(bound)
    return (normal_cdf(x, sigma) - low) / (high - low)


def uniform_cdf(x, scale):
    return (x + scale) / (2 * scale)


TRUNCATED_STD = 0.87962566103423978  # of a standard normal distribution within 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("init", "cdf", "limit"),
    [
        (initializer.Uniform(0.5), partial(uniform_cdf, scale=0.5), 0.5),
        (initializer.Normal(2), partial(normal_cdf, sigma=2), math.inf),
        (initializer.TruncatedNormal(2), partial(truncated_cdf, sigma=2, bound=2), 4),
        (initializer.TruncatedNormal(0.5, 1.25), partial(truncated_cdf, sigma=0.5, bound=1.25),
         0.625),
    ],
    ids=["uniform", "normal", "truncated", "narrow"],
)  # fmt: skip
def test_distributions(init, cdf, limit, dtype):
    arr = named(initializer.create(init.dumps(), rng=0), "fc_weight", (100, 100), dtype)
    assert abs(arr).max() <= limit
    assert ks(arr, cdf) < 2.2


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(90, 130), (40, 30, 3, 3)])
def test_scale_follows_from_inputs_and_outputs(name, shape):
    gain, fan, kind = FORMULAS[name]
    kernel = math.prod(shape[2:])
    fans = {"in": shape[1] * kernel, "avg": (shape[0] + shape[1]) * kernel / 2}
    sigma = math.sqrt(gain / fans[fan])
    arr = named(initializer.create(name, rng=0), "fc_weight", shape)
    cdf, limit = {
        "uniform": (partial(uniform_cdf, scale=math.sqrt(3) * sigma), math.sqrt(3) * sigma),
        "gaussian": (partial(normal_cdf, sigma=sigma), math.inf),
        "truncated": (
            partial(truncated_cdf, sigma=sigma / TRUNCATED_STD, bound=2),
            2 * sigma / TRUNCATED_STD,
        ),
    }[kind]
    assert abs(arr).max() <= limit
    assert arr.std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * arr.size))
    assert ks(arr, cdf) < 2.2


@pytest.mark.parametrize("name", ["lecun_normal", "he_normal", "glorot_normal"])
def test_normal_variants_without_truncation_have_tails(name):
    sigma = math.sqrt(FORMULAS[name][0] / 100)
    arr = named(initializer.create(name, truncated=False, rng=0), "fc_weight", (100, 100))
    assert ks(arr, partial(normal_cdf, sigma=sigma)) < 2.2
    assert abs(arr).max() > 3 * sigma


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
