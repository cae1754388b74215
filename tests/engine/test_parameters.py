"""What is remembered of a call is never stale, and keeps nothing alive that it should not."""

import gc
import pickle
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt.amp import LossScaler
from fastopt.sparse import RowSparse
from helpers.tensor_lists import as_list, everything, one_by_one

WAYS = {"list": as_list, "single": one_by_one}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def parts(way, *lists):
    """Whole lists, or those of the last parameter for a single call."""
    return lists if way is as_list else [values[-1:] for values in lists]


def sgd(**kwargs):
    return optimizer.get_updater(optimizer.SGD(**{"learning_rate": 1.0, **kwargs}))


def halves():
    return [np.ones(3, np.float16) for _ in "ab"]


@both_ways
def test_a_gradient_at_the_address_of_a_freed_one_is_checked_again(way):
    """Unpickled arrays bring dtypes of their own, which are freed with them."""
    updater, weights = sgd(), [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    for _ in range(20):
        way(updater, [0, 1], [pickle.loads(pickle.dumps(np.ones(4, "f4"))) for _ in "ab"], weights)
        for wrong in (np.ones(4, "i8"), np.ones(8, "f4"), np.ones((2, 2), "f4"), np.ones(4, "i4")):
            grads = [np.ones(4, "f4"), pickle.loads(pickle.dumps(wrong))]
            with pytest.raises((TypeError, ValueError), match="gradient"):
                way(updater, *parts(way, [0, 1], grads, weights))
    np.testing.assert_array_equal(weights, -20 * np.ones((2, 4)))


def test_gradients_that_another_thread_drops_stay_alive_during_the_call():
    """Weights of a sequence that makes its arrays as they are asked for, too."""

    class Lazy(list):
        def __iter__(self):
            return iter([array.copy() for array in list.__iter__(self)])

    updater, weights = sgd(), [np.zeros(50_000) for _ in range(2)]
    for _ in range(3):
        updater([0, 1], Lazy([np.ones(50_000), np.ones(50_000)]), weights)
    np.testing.assert_array_equal(weights, -3 * np.ones((2, 50_000)))


def resized(arrays, size):
    for array in arrays:
        array.resize(size, refcheck=False)


@both_ways
def test_memory_that_grows_or_shrinks_is_updated_as_it_is(way):
    updater, weights = sgd(momentum=0.5), [np.zeros(100), np.zeros(100)]
    updater.states = {0: np.zeros(100), 1: np.zeros(100)}  # those of a call share a block
    for size in (100, 50_000, 10):
        resized([*weights, *updater.states.values()], size)
        way(updater, [0, 1], [np.ones(size), np.ones(size)], weights)
    np.testing.assert_array_equal(weights, np.full((2, 10), -1 - 1.5 - 1.75))
    resized(weights, 20)
    before = everything(updater, weights)
    with pytest.raises(ValueError, match=r"state 'mom' must have shape \(20,\), got \(10,\)"):
        way(updater, [0, 1], [np.ones(20), np.ones(20)], weights)
    assert everything(updater, weights) == before


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@both_ways
def test_changes_in_place_are_detected(way):
    updater, weights = sgd(), [np.zeros(4), np.zeros(4)]
    grads = [np.ones(4), np.ones(4)]
    way(updater, [0, 1], grads, weights)

    def refused(words):
        before = everything(updater, weights)
        with pytest.raises((TypeError, ValueError), match=f"index 1: .*{words}"):
            way(updater, *parts(way, [0, 1], grads, weights))
        assert everything(updater, weights) == before

    weights[1].flags.writeable = False
    refused("read-only")
    weights[1].flags.writeable = True
    weights[1].shape = 2, 2
    refused("shape")
    grads[1].shape = 2, 2
    way(updater, [0, 1], grads, weights)
    np.testing.assert_array_equal(weights[1], -2 * np.ones((2, 2)))
    grads[1].dtype = np.int64
    refused("dtype float64 or .*, got int64")
    grads[1].dtype = np.float64
    way(updater, [0, 1], grads, weights)
    np.testing.assert_array_equal(weights[1], -3 * np.ones((2, 2)))


def sharing(size):
    """Lists of calls, by what their weights and gradients share, and their weights."""
    memory, first, second = np.ones(2 * size), np.ones(size), np.ones(size)
    weights = [memory[::2], first, second]
    yield [([0, 1, 2], [np.ones(size), memory[:size], np.ones(size)], weights)], weights
    grads, tied = [np.ones(size), -np.ones(size), np.ones(size)], [first, second, first]
    yield [([0, 1, 2], grads, tied), ([0, 1, 0], grads, tied)], tied
    table, one, two = np.ones((size, 4)), np.ones((size, 2)), np.full((size, 2), 2.0)
    rows = RowSparse(table[:4:2, ::2], np.array([3, 0]), (size, 2))  # in a weight updated before
    yield [([0, 1], [np.ones((size, 4)), rows], [table, one])], [table, one]
    rows, fixed = RowSparse(np.ones((1, 2)), [3], (size, 2)), np.ones((size, 2))
    weights = [one, two]  # a dense gradient after rows, while the addresses of all others stay
    yield [([0, 1], [rows, fixed], weights), ([0, 1], [two, fixed], weights)], weights
    rows = (two[:4], np.array([3, 1, 3, 0]))
    yield [([0, 1, 0], [rows, one, rows], [one, two, one])], [one, two]


@pytest.mark.parametrize("size", [6, PARALLEL_FROM])
@pytest.mark.parametrize("make", [optimizer.Adam, partial(optimizer.LBSGD, batch_scale=2)])
@pytest.mark.parametrize("story", range(5))
def test_lists_of_arrays_that_share_memory_are_updated_one_by_one(story, make, size):
    ends = []
    for way in WAYS.values():
        (calls, weights) = list(sharing(size))[story]
        updater = optimizer.Updater(make(lazy_update=True))
        for call in calls * 3:
            way(updater, *call)
        ends.append(everything(updater, weights))
    assert ends[0] == ends[1]


@both_ways
def test_parts_of_a_nested_state_may_be_replaced(way):
    updater = optimizer.Updater(optimizer.Adam(multi_precision=True))
    weights, grads = halves(), halves()
    way(updater, [0, 1], grads, weights)
    master, (mean, var) = updater.states[0]
    updater.states[0] = master, [mean, var]
    for value in (3.0, 7.0):
        way(updater, [0, 1], grads, weights)
        updater.states[0][1][0] = np.full(3, value, np.float32)
    way(updater, [0, 1], grads, weights)
    np.testing.assert_allclose(updater.states[0][1][0], 0.9 * 7 + 0.1, rtol=1e-6)


@both_ways
def test_momentum_and_masters_are_switched_with_a_state_that_fits(way):
    weights, grads = halves(), halves()
    updater = sgd(momentum=0.5, multi_precision=True)
    way(updater, [0, 1], grads, weights)
    for name, value in (("momentum", 0.0), ("multi_precision", False)):
        kept = getattr(updater.optimizer, name)
        setattr(updater.optimizer, name, value)
        before = everything(updater, weights)
        with pytest.raises(ValueError, match="index 0: rule sgd"):
            way(updater, [0, 1], grads, weights)
        assert everything(updater, weights) == before
        setattr(updater.optimizer, name, kept)
    way(updater, [0, 1], grads, weights)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("scaler", [None, LossScaler()], ids=["updated", "skipped"])
@pytest.mark.parametrize("kind", [optimizer.Adam, optimizer.LBSGD, optimizer.AdamW])
def test_no_gradient_is_kept_alive(kind, scaler, way):
    """Nor one that AdamW skips at a scale that is not finite."""
    scale = np.inf if kind is optimizer.AdamW else 1.0
    updater = optimizer.Updater(kind(multi_precision=True, rescale_grad=scale), scaler)
    weights = [np.ones((4, 3), dtype) for dtype in ("f4", "f4", "f4", "f2")]
    weights += [np.ones((4, 6), "f4")[:, ::2], np.ones((4, 6), order="F")]
    for _ in range(3):
        grads = [np.ones_like(weight) for weight in weights]
        grads[1] = np.ones((4, 6), "f4")[:, ::2]
        grads[2] = RowSparse(np.ones((4, 3), "f4"), [0, 1, 1, 3], (4, 3))
        arrays = [getattr(grad, "values", grad) for grad in grads]
        for array in arrays if scaler else ():
            array[...] = np.nan
        watches = [weakref.ref(array) for array in arrays]
        way(updater, range(len(weights)), grads, weights)
        grads = arrays = array = None
        gc.collect()
        assert [watch() for watch in watches] == [None] * len(weights)
        assert updater.info.skipped == (scaler is not None)


def test_rounding_applies_to_updated_parameters():
    """It decides about kernels, not only about numbers."""
    ends = []
    for first in ("nearest", "stochastic"):
        updater, weight = sgd(learning_rate=1e-3, rounding=first), np.ones(1000, np.float16)
        with nullcontext() if first == "stochastic" else pytest.warns(match="lose small updates"):
            updater(0, np.zeros(1000, np.float16), weight)
        updater.optimizer.rounding = "stochastic"
        updater(0, np.full(1000, 0.1, np.float16), weight)
        ends.append(weight)
    np.testing.assert_array_equal(*ends)
    assert len(np.unique(weight)) == 2
