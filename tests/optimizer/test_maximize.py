"""Ascent: what a minimizer does with gradients of the opposite sign, but for decay."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler
from helpers.cases import CASES, LIGHT, by_default, sampled

LIVELY = {"rescale_grad": 0.5, "clip_gradient": 0.75}


def both(case, **kwargs):
    """An updater that ascends, and one that descends."""
    return [case.updater(**{**LIVELY, **kwargs, "maximize": up}) for up in (True, False)]


def steps(updaters, weight, gradients, index=0):
    """Weights after updates: of the first with the gradients, of the second with the opposite."""
    weights = [copy.deepcopy(weight) for _ in updaters]
    for gradient in gradients:
        for updater, sign, own in zip(updaters, (1, -1), weights, strict=True):
            updater(index, opposite(gradient) if sign < 0 else gradient, own)
    return weights


def opposite(gradient):
    if isinstance(gradient, list):
        return [opposite(each) for each in gradient]
    if isinstance(gradient, tuple):
        return -gradient[0], gradient[1]
    return -gradient


@pytest.mark.slow
@pytest.mark.parametrize("case", by_default(CASES), ids=str)
def test_ascent_is_descent_along_the_opposite_gradient(case, rng):
    gradients = rng.normal(size=(4, *case.shape))
    updaters = both(case, wd=case.wd)
    up, down = steps(updaters, rng.normal(size=case.shape), gradients)
    np.testing.assert_array_equal(up, down)


@pytest.mark.parametrize("case", sampled(CASES, LIGHT[2:]), ids=str)
def test_row_sparse_gradients_of_half_precision_weights_too(case, rng):
    indices = np.array([4, 1])
    rows = [(rng.normal(size=(2, 5)).astype(np.float16), indices) for _ in range(3)]
    updaters = both(case, wd=case.wd, multi_precision=True)
    up, down = steps(updaters, rng.normal(size=(7, 5)).astype(np.float16), rows)
    np.testing.assert_array_equal(up, down)


@given(signs=st.lists(st.booleans(), min_size=1, max_size=4), limit=st.floats(0.01, 10))
def test_a_list_with_a_loss_scale_and_a_limit_of_the_norm(signs, limit):
    rng = np.random.default_rng(len(signs))
    weights = [rng.normal(size=3) for _ in signs]
    gradients = [[128 * rng.normal(size=3) for _ in signs] for _ in range(2)]
    updaters = [
        fastopt.Updater(fastopt.SGD(lr=0.1, momentum=0.9, wd=0.1, maximize=up), scaler, limit)
        for up, scaler in ((True, LossScaler(128)), (False, LossScaler(128)))
    ]
    up, down = steps(updaters, weights, gradients, list(range(len(signs))))
    np.testing.assert_array_equal(up, down)
    assert updaters[0].info == updaters[1].info


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "signum"])
def test_ascent_climbs_and_decay_still_shrinks(name):
    arguments = {"momentum": 0.0} if name == "signum" else {}
    weight, other = np.ones(3), np.ones(3)
    made = optimizer.create(name, lr=0.1, maximize=True, **arguments)
    fastopt.Updater(made)(0, np.array([1.0, -1.0, 2.0]), weight)
    assert (np.sign(weight - 1) == [1, -1, 1]).all()
    made = optimizer.create(name, lr=0.1, weight_decay=0.5, maximize=True, **arguments)
    fastopt.Updater(made)(0, np.full(3, 0.0 if name == "signum" else 1e-9), other)
    assert (other < 1).all()


def test_the_direction_may_change_on_the_way():
    updater, weight = fastopt.Updater(fastopt.SGD(lr=0.5)), np.ones(2)
    updater(0, np.ones(2), weight)
    updater.optimizer.maximize = True
    updater(0, np.ones(2), weight)
    np.testing.assert_array_equal(weight, 1)


def test_what_cannot_ascend_says_so():
    class ByHand(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            weight -= grad

    class Signs(optimizer.Optimizer):
        rule = fastopt.rule(hyper=("lr",))(
            lambda weight, grad, state, h: (weight - h.lr * grad, ())
        )

    with pytest.raises(
        ValueError, match=r"ByHand has an update\(\) in Python: negate the gradient"
    ):
        ByHand(maximize=True)
    weight = np.ones(2)
    with pytest.raises(ValueError, match="reads no rescale_grad, so it cannot maximize"):
        fastopt.Updater(Signs(maximize=True))(0, np.ones(2), weight)
    for name, value in {"wd": 0.1, "clip_gradient": 1.0, "rescale_grad": 0.5}.items():
        for average in (None, fastopt.EMA(0.9), fastopt.SWA(), fastopt.Lookahead()):
            with pytest.raises(ValueError, match=f"reads no {name}, so that it has no effect"):
                fastopt.Updater(Signs(**{name: value}), average=average)(0, np.ones(2), weight)
    np.testing.assert_array_equal(weight, 1)
    with pytest.raises(TypeError, match="maximize must be True or False, got 1"):
        fastopt.SGD(maximize=1)
