"""``fastopt bench`` and what it measures with."""

import numpy as np
import pytest

from fastopt import optimizer, warmup
from fastopt.bench.formulas import FORMULAS
from fastopt.bench.steps import momentum_of

RANDOM = {"sgld"}


def both(name, steps, shape=(6, 7)):
    """Weights before, after steps of fastopt, and after steps in plain NumPy."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(shape, np.float32)
    ours, theirs = before.copy(), before.copy()
    updater = optimizer.get_updater(optimizer.create(name, **momentum_of(name)))
    update = FORMULAS[name](optimizer.create(name, **momentum_of(name)))
    for _ in range(steps):
        grad = rng.standard_normal(shape, np.float32)
        updater(0, grad, ours)
        update(0, grad, theirs)
    return before, ours, theirs


def test_every_optimizer_is_written_in_plain_numpy():
    assert sorted(FORMULAS) == warmup.names()


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - RANDOM))
def test_plain_numpy_does_the_same_as_the_kernel(name):
    before, ours, theirs = both(name, steps=12)
    assert ours.dtype == theirs.dtype == np.float32
    moved = abs(ours - before).max()
    assert moved > 1e-4
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * max(moved, 1))


def test_noise_in_plain_numpy_has_the_same_spread():
    before, ours, theirs = both("sgld", steps=1, shape=(300, 100))
    assert (ours - before).std() == pytest.approx((theirs - before).std(), rel=0.02)
