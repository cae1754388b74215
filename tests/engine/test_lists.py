"""Lists of tensors: all or nothing, in their order, and what users' code gives is followed."""

import gc
import weakref

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.numpy_abi import readable
from helpers.tensor_lists import as_list, everything, one_by_one


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_what_is_no_list_is_refused_clearly(seen):
    weights, grads = [np.ones(3), np.ones(3)], [np.ones(3), np.ones(3)]
    updater = optimizer.get_updater(optimizer.Adam())
    if seen:
        updater([0, 1], grads, weights)
    before, lists = everything(updater, weights), [[0, 1], grads, weights]
    whole = (x for x in grads), np.ones((2, 3)), dict(enumerate(grads)), grads[:1]
    keys = (i for i in (0, 1)), np.arange(2), {0, 1}, None, [0, np.arange(2)], [0, None], [0, [1]]
    for place, wrong, words in (
        *((0, wrong, "index must be") for wrong in keys),
        *((1, wrong, "list of as many gradients") for wrong in (*whole, None)),
        *((2, wrong, "list of as many weights") for wrong in whole),
        (2, None, "a call takes"),
    ):
        with pytest.raises(TypeError, match=words):
            updater(*lists[:place], wrong, *lists[place + 1 :])
    assert everything(updater, weights) == before


def test_an_index_that_comes_twice_counts_in_no_joint_step():
    """Whatever the forms of its gradients; nothing changes."""
    updater = optimizer.get_updater(optimizer.Prodigy(multi_precision=True))
    weight, grad = np.ones((2, 16, 3), np.float16)
    before = everything(updater, [weight])
    with pytest.raises(ValueError, match="updates an index once in each list"):
        updater(["a", "a"], [grad, grad.astype(np.float32)], [weight, weight])
    assert everything(updater, [weight]) == before


def test_an_updater_is_freed_with_its_weights_and_states():
    updater, weight = optimizer.Updater(optimizer.Adam()), np.ones(3)
    for _ in range(3):
        updater(0, np.ones(3), weight)
    watches = [weakref.ref(each) for each in (updater, weight, updater.optimizer)]
    gc.disable()
    try:
        del updater, weight
        if not readable():  # without a GIL, functions are freed by the collector alone
            gc.collect()
        assert [watch() for watch in watches] == [None] * 3
    finally:
        gc.enable()


def failing(method):
    """A class of which a method raises when it is told to."""

    def fail(self, *args):
        if self.fails:
            raise RuntimeError("no numbers")
        return getattr(optimizer.Adam, method)(self, *args)

    return type("Fails", (optimizer.Adam,), {method: fail, "fails": False})


@pytest.mark.parametrize("size", [3, 80_000])
@pytest.mark.parametrize("method", ["hyper", "_get_lr"])
def test_hyper_parameters_and_rates_that_raise_change_nothing(method, size):
    made = failing(method)()
    updater, weights = optimizer.Updater(made), [np.ones(size), np.ones(size)]
    for _ in range(2):
        before, made.fails = everything(updater, weights), True
        for way in (as_list, one_by_one) * 2:
            with pytest.raises(RuntimeError, match="no numbers"):
                way(updater, [0, 1], [np.ones(size)] * 2, weights)
        del made.fails
        assert everything(updater, weights) == before
        for way in (as_list, one_by_one):
            way(updater, [0, 1], [np.ones(size)] * 2, weights)


def test_counts_can_be_assigned():
    made, weight = optimizer.Adam(), np.ones(3)
    updater = optimizer.Updater(made)
    updater(0, np.ones(3), weight)
    for change, count in (
        (lambda: setattr(made, "_index_update_count", {0: 7}), 8),
        (lambda: setattr(made, "_index_update_count", {}), 1),
        (lambda: made._index_update_count.clear(), 1),
    ):
        change()
        updater(0, np.ones(3), weight)
        assert (made._index_update_count, made.num_update) == ({0: count}, 8)


@pytest.mark.parametrize("way", [as_list, one_by_one])
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, int, np.array])
def test_a_schedule_is_called_once_per_call(way, kind):
    """Also for a second parameter of one step, and whatever kind of number it returns."""
    asked, weights = [], np.zeros((2, 3))
    schedule = lambda update: asked.append(update) or kind(len(asked))  # noqa: E731
    updater = optimizer.Updater(optimizer.SGD(lr_scheduler=schedule))
    for _ in range(3):
        way(updater, [0, 1], np.ones((2, 3)), weights)
    calls = 2 if way is one_by_one else 1
    assert asked == [step for step in (1, 2, 3) for _ in range(calls)]
    assert weights[:, 0].tolist() == ([-9, -12] if calls == 2 else [-6, -6])


def test_a_refused_list_of_lbsgd_updates_nothing():
    """The sum of the second has another shape; the first is due for an update."""
    updater, weights = optimizer.Updater(optimizer.LBSGD(batch_scale=2)), list(np.ones((2, 3)))
    updater([0, 1], list(np.ones((2, 3))), weights)
    before = everything(updater, weights)
    with pytest.raises(ValueError, match="index 1: the sum of gradients must have shape"):
        updater([0, 1], [np.ones(3), np.ones(5)], [weights[0], np.ones(5)])
    assert everything(updater, weights) == before
