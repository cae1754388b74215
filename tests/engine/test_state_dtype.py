"""state_dtype='bfloat16': state in two bytes, rounded stochastically; arithmetic in full."""

import numpy as np
import pytest

from fastopt import optimizer
from helpers.cases import CASES, LIGHT, OF_STEPS, sampled
from helpers.half_precision import flat, lively

pytestmark = pytest.mark.usefixtures("bfloat16")

ROWS = 3000
UNMOVED = {"signum", "lion", "test", "asgd"}
"""Optimizers whose state decides signs alone, or nothing about the weight."""


def repeated(case, **kwargs):
    """Weight with many equal rows after equal gradients: as many draws of one experiment."""
    rng, updater = np.random.default_rng(0), case.updater(**lively(case), **kwargs)
    weight = np.tile(rng.normal(size=5), (ROWS, 1)).astype(np.float32)
    for _ in range(6):
        updater(0, np.tile(rng.normal(size=5), (ROWS, 1)).astype(np.float32), weight)
    return weight.astype(float), updater


def agree_in_the_mean(compressed, exact):
    """Whether the rows of one scatter around those of the other."""
    deviation = compressed.std(axis=0) / np.sqrt(ROWS)
    return bool((abs(compressed.mean(axis=0) - exact[0]) <= 5 * deviation + 1e-6).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sampled((c for c in CASES if c.name not in OF_STEPS), LIGHT), ids=str
)
def test_the_trajectory_is_that_of_float32_state_in_the_mean(case, bfloat16):
    exact, plain = repeated(case)
    compressed, updater = repeated(case, state_dtype="bfloat16")
    ours, theirs = (flat(u.states[0]) for u in (updater, plain))
    # Numbers that are kept once for each tensor are not compressed.
    expected = [(bfloat16 if a.shape else a.dtype, a.shape) for a in theirs]
    assert [(a.dtype, a.shape) for a in ours] == expected
    if not theirs:
        np.testing.assert_array_equal(compressed, exact)
        return
    if case.name != "adopt":  # which clips what it makes of its state: noise has a mean then
        assert agree_in_the_mean(compressed, exact)
    assert compressed.std(axis=0).any() == (case.name not in UNMOVED)


def test_a_state_that_nearest_rounding_would_freeze_decays(bfloat16):
    """Adam's second moment loses a thousandth a step, a quarter of bfloat16's last place."""
    updater = optimizer.get_updater(optimizer.Adam(beta2=0.999, state_dtype="bfloat16"))
    weight = np.ones(4000, np.float32)
    updater(0, np.ones(4000, np.float32), weight)
    for _ in range(1000):
        updater(0, np.zeros(4000, np.float32), weight)
    _, var = updater.states[0]
    assert var.dtype == bfloat16
    assert var.astype(float).mean() == pytest.approx(0.001 * 0.999**1000, rel=0.01)
    assert float(bfloat16.type(0.001 * 0.999)) == float(bfloat16.type(0.001))


def test_what_is_not_finite_is_kept(bfloat16):
    updater = optimizer.Updater(optimizer.SGD(momentum=0.9, lr=1.0, state_dtype="bfloat16"))
    weight = np.zeros(4, np.float32)
    updater(0, np.array([np.nan, np.inf, -np.inf, 1], np.float32), weight)
    np.testing.assert_array_equal(updater.states[0].astype(float), [np.nan, -np.inf, np.inf, -1])
    np.testing.assert_array_equal(weight, [np.nan, -np.inf, np.inf, -1])


WITHOUT = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from fastopt import optimizer
updater = optimizer.get_updater(optimizer.Adam(multi_precision=True))
updater(0, np.ones(3, np.float16), np.ones(3, np.float16))
try:
    optimizer.Adam(state_dtype="bfloat16")
except ImportError as error:
    print(error)
"""


def test_without_ml_dtypes_the_extra_is_named_and_float16_works(run_python):
    assert run_python(WITHOUT).strip() == ("bfloat16 arrays need ml_dtypes: pip install ml_dtypes")
