"""What every optimizer promises, driven by the table in cases.py."""

import numpy as np
import pytest
from numba.core import event

from fastopt import optimizer
from helpers.cases import CASES, OF_MATRICES, by_default, sampled
from helpers.matrix_rules import FORMS


def run(case, gradients, weight, **kwargs):
    updater, weight = case.updater(**kwargs), weight.copy()
    for gradient in gradients:
        updater(0, gradient, weight)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_new_rates_decays_and_shapes_compile_nothing(case, rng):
    updater = case.updater(wd=case.wd)
    for dtype in (np.float32, np.float64) * 2:  # a second call of an index compiles its entry
        updater(dtype.__name__, np.ones(case.shape, dtype), np.ones(case.shape, dtype))
    with event.install_recorder("numba:compile") as recorder:
        updater.optimizer.set_learning_rate(0.3)
        updater.optimizer.rescale_grad = 0.1
        updater.optimizer.clip_gradient = 0.5
        for dtype in (np.float32, np.float64):
            updater(dtype.__name__, np.ones(case.shape, dtype), np.ones(case.shape, dtype))
            updater(dtype.__name__ + "2", np.ones((2, 3), dtype), np.ones((2, 3), dtype))
    assert not recorder.buffer


CONVEX = [*by_default(case for case in CASES if case.converges is not None), *FORMS]
RATES = {"soap": 0.1, "shampoo": 0.1, "adammini": 0.1}
"""Initial rates of optimizers of matrices, if not 0.5."""


def convergent(case):
    if isinstance(case, str):
        return FORMS[case](learning_rate=lambda t: RATES.get(case, 0.5) * (1 - t / 201))
    return case.make(**case.converges)


@pytest.mark.parametrize("case", CONVEX, ids=str)
def test_converges_on_a_convex_problem(case):
    updater = optimizer.get_updater(convergent(case))
    target = np.linspace(-2, 2, 35).reshape(7, 5)
    weight = np.ones((7, 5))
    start = np.square(weight - target).sum()
    for _ in range(200):
        updater(0, weight - target, weight)
    assert np.square(weight - target).sum() < 0.01 * start


@pytest.mark.parametrize("case", by_default(c for c in CASES if c.frozen_by_zero_lr), ids=str)
def test_a_rate_of_zero_freezes_the_weight(case, rng):
    start, *gradients = rng.normal(size=(4, *case.shape))
    weight = run(case, gradients, start, learning_rate=0.0, wd=case.wd)
    np.testing.assert_array_equal(weight, start)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_default(CASES), ids=str)
def test_nan_stays_where_it_is(case, rng):
    gradients = rng.normal(size=(4, *case.shape))
    gradients[0, 2, 3] = np.nan
    weight = run(case, gradients, np.ones(case.shape), clip_gradient=0.5)
    hit = np.zeros(case.shape, bool)
    hit[{"element": (2, 3), "row": 2, "tensor": ...}[case.nan_spreads_to]] = True
    np.testing.assert_array_equal(np.isnan(weight), hit)


def test_every_registered_optimizer_is_in_the_table():
    registered = optimizer.opt_registry.items()
    library = {name for name, kind in registered if kind.__module__.startswith("fastopt.")}
    assert library == {case.name for case in CASES} | {*OF_MATRICES}
