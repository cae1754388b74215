"""Row-sparse updates of every kind of array, in every form of a gradient; and what is refused."""

import warnings
import weakref

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.sparse import RowSparse
from helpers.row_sparse import listing, same_bits
from helpers.tensor_lists import as_list, one_by_one


def updater(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


def test_strides_that_are_assigned_to_a_weight_with_spaced_rows_are_those_of_the_next_update():
    made = optimizer.Updater(optimizer.SGD(learning_rate=1.0, lazy_update=True))
    base = np.zeros((8, 6), np.float32)
    weight = base[:4, :2]
    grad = np.ones((2, 2), np.float32), np.array([1, 3])
    for _ in range(3):
        made("w", grad, weight)
    base[...] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        weight.strides = 48, 4  # every second row
    made("w", grad, weight)
    np.testing.assert_array_equal(np.flatnonzero(base.any(axis=1)), [2, 6])


def test_a_subclass_in_numpy_gets_a_dense_gradient(rng):
    class Plain(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            self._update_count(index)
            weight -= self._get_lr(index) * grad

    grad = listing(rng, (6, 2), np.float64, 9)
    made, weight = optimizer.get_updater(Plain(learning_rate=0.5)), np.ones((6, 2))
    made(0, (grad.values, grad.indices), weight)
    np.testing.assert_array_equal(weight, 1 - 0.5 * grad.to_dense())


def test_values_whose_dtype_was_changed_are_taken_for_what_they_are():
    made = updater("sgd", multi_precision=True)
    weight = np.ones((5, 2), np.float16)
    grad = RowSparse(np.ones((2, 2), np.float32), np.array([1, 3]), (5, 2))
    made(0, grad, weight)
    grad.values = np.full((2, 2), 2, np.float16)
    made(0, grad, weight)
    np.testing.assert_allclose(weight[:, 0], [1, 0.7, 1, 0.7, 1], rtol=1e-3)


def test_values_in_a_state_are_read_before_it_is_written():
    """The state may serve as a gradient, as a copy of it would."""
    made, other = updater("sgd", momentum=0.9), updater("sgd", momentum=0.9)
    weight, same = np.ones((5, 2)), np.ones((5, 2))
    for one, table in ((made, weight), (other, same)):
        one(0, (np.ones((2, 2)), np.array([1, 3])), table)
    made(0, (made.states[0][1:3], np.array([3, 1])), weight)
    other(0, (other.states[0][1:3].copy(), np.array([3, 1])), same)
    same_bits(weight, same)


@pytest.mark.parametrize("way", [as_list, one_by_one])
@pytest.mark.parametrize(("name", "scale"), [("adam", 1.0), ("lbsgd", 1.0), ("adamw", np.inf)])
def test_no_row_sparse_gradient_is_kept_alive(name, scale, way, rng):
    """Nor one that AdamW skips."""
    run, weight = updater(name), np.ones((5, 2))
    way(run, [0], [listing(rng, (5, 2), np.float64, 3)], [weight])
    run.optimizer.rescale_grad = scale
    grad, before = listing(rng, (5, 2), np.float64, 3), weight.copy()
    watch = weakref.ref(grad.values)
    way(run, [0], [grad], [weight])
    del grad
    assert watch() is None
    assert np.isfinite(scale) or (weight == before).all()
