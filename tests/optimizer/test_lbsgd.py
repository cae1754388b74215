"""LBSGD adds up gradients that list rows, dense ones, and both in turn."""

import copy
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive
from helpers.row_sparse import listing, problems, same_bits

SUMMED = 3
"""Gradients in a sum."""


def lbsgd(**kwargs):
    made = optimizer.LBSGD(learning_rate=0.1, batch_scale=SUMMED, warmup_epochs=0, wd=0.1, **kwargs)
    return optimizer.get_updater(made)


def dense_where(flags, grads):
    return [grad.to_dense() if flag else grad for flag, grad in zip(flags, grads, strict=True)]


def summed(grads):
    """Sum that lists rows only if all of `grads` do."""
    sparse = [isinstance(grad, RowSparse) for grad in grads]
    return reduce(add, grads if all(sparse) else dense_where(sparse, grads))


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
@pytest.mark.parametrize("momentum", [0.9, *exhaustive(0.0)])
@given(problem=problems(steps=2 * SUMMED), dense=st.lists(st.booleans(), min_size=6, max_size=6))
def test_an_update_is_that_of_sgd_with_the_sum(lazy, momentum, problem, dense):
    """At three times the rate with a third of the sum; rows of a sum of listed rows are listed."""
    kwargs = {"momentum": momentum, "lazy_update": lazy}
    grads = dense_where(dense, problem.grads)
    sgd = optimizer.SGD(learning_rate=0.1 * SUMMED, rescale_grad=1 / SUMMED, wd=0.1, **kwargs)
    sums = [summed(grads[:SUMMED]), summed(grads[SUMMED:])]
    expected = problem.run(optimizer.get_updater(sgd), sums)
    same_bits(problem.run(lbsgd(**kwargs), grads), expected)


@given(dense=st.lists(st.booleans(), min_size=3, max_size=3))
def test_gradients_may_be_overwritten_after_the_call(dense):
    rng = np.random.default_rng(0)
    updaters, weights = (lbsgd(), lbsgd()), (np.ones((9, 4)), np.ones((9, 4)))
    for grad in dense_where(dense, [listing(rng, (9, 4), np.float64, 5) for _ in dense]):
        updaters[0](0, copy.deepcopy(grad), weights[0])
        updaters[1](0, grad, weights[1])
        if isinstance(grad, RowSparse):
            grad.values[...], grad.indices[...] = np.nan, 0
        else:
            grad[...] = np.nan
    same_bits(*weights)


def test_calls_continue_a_plan_and_batch_scale_may_change():
    """Without sums, calls need no preparation; the number of calls so far decides the phase."""
    updater, weight = lbsgd(), np.zeros(3)
    made = updater.optimizer
    made.batch_scale = 1
    for _ in range(3):
        updater(0, np.ones(3), weight)
    assert (made.cumgrads, made.batches.active) == ({}, False)
    made.batch_scale = 2
    for calls, changes in ((4, True), (5, False)):  # the fifth updates nothing
        before = weight.copy()
        updater(0, np.ones(3), weight)
        assert made.cumgrads[0]["num_cums"] == calls
        assert (weight != before).all() == changes
    made.batch_scale = 1
    updater(0, np.ones(3), weight)
    assert made.cumgrads == {}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("scaler", [None, 2.0], ids=["plain", "scaled"])
def test_sums_of_weights_without_dimensions_are_saved_and_restored(dtype, scaler):
    updater, weight = lbsgd(multi_precision=True), np.ones((), dtype)
    updater.loss_scaler = scaler and LossScaler(scaler)
    for calls in range(2 * SUMMED - 1):
        updater(0, np.ones((), dtype), weight)
        updater.set_states(updater.get_states(dump_optimizer=True))
        total = updater.optimizer.cumgrads[0]["cum_grad"]
        assert (type(total), total.shape) == (np.ndarray, ())
        assert total == (calls % SUMMED + 1) / (scaler or 1)
