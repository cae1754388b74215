import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

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
    ids=["uniform", "normal", "truncated", "narrow"],
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
