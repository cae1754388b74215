"""Row-sparse updates of weights of half precision: masters, remainders, copies, random rounding."""

import copy

import ml_dtypes
import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive
from helpers.row_sparse import eighths, listing, same_bits


def updater(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


HALVES = [np.dtype("float16"), *exhaustive(np.dtype(ml_dtypes.bfloat16))]


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_rows_without_gradient_keep_masters_copies_and_low_bits(half, rng):
    grad = listing(rng, (9, 5), half, 4)
    spared = np.setdiff1d(np.arange(9), grad.indices)
    for master in ["float32", "split"][: 1 + (half != np.float16)]:
        made = updater("adam", multi_precision=True, master=master)
        weight = rng.normal(size=(9, 5)).astype(half)
        made.set_master(0, weight.astype(np.float32) + np.float32(2**-20))
        made(0, RowSparse(grad.values[:0], [], (9, 5)), weight)
        before = copy.deepcopy((weight, *leaves(made.states[0])))
        made(0, grad, weight)
        after = (weight, *leaves(made.states[0]))
        same_bits(tuple(a[spared] for a in after), tuple(a[spared] for a in before))
        assert not np.array_equal(weight[grad.indices], before[0][grad.indices])
    made, weight = updater("adam"), rng.normal(size=(9, 5)).astype(np.float32)
    beside = np.full((9, 5), 7, half)
    made.set_copy(0, beside)
    made(0, grad.astype(np.float32), weight)
    np.testing.assert_array_equal(beside[grad.indices], weight.astype(half)[grad.indices])
    assert (beside[spared] == 7).all()


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("kwargs", [{}, {"state_dtype": "bfloat16"}], ids=["weight", "state"])
def test_rounding_does_not_depend_on_the_form_of_the_gradient(kwargs, rng):
    """The draws belong to elements of the table, not to the order of the rows."""
    weight = rng.normal(size=(50, 7)).astype(ml_dtypes.bfloat16)
    other = weight.copy()
    lists, dense = (updater("adam", rounding="stochastic", **kwargs) for _ in range(2))
    for _ in range(3):
        grad = eighths(rng, weight.shape, np.float32)
        order = rng.permutation(50)
        lists(0, (grad[order], order), weight)
        dense(0, grad, other)
    same_bits((weight, *leaves(lists.states[0])), (other, *leaves(dense.states[0])))
