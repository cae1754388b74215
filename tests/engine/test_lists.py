"""Lists of tensors: all or nothing, in their order, and what users' code gives is followed."""

import gc
import weakref

import numpy as np
import pytest

from fastopt import RowSparse, optimizer
from fastopt._kernels.numpy_abi import readable
from helpers.tensor_lists import as_list, everything, one_by_one


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_what_is_no_list_is_refused_clearly(seen):
    weights, grads = [np.ones(3), np.ones(3)], [np.ones(3), np.ones(3)]
    updater = optimizer.get_updater(optimizer.Adam())
    if seen:
        updater([0, 1], grads, weights)
    before = everything(updater, weights)
    for wrong in ((g for g in grads), np.ones((2, 3)), dict(enumerate(grads)), grads[:1], None):
        with pytest.raises(TypeError, match="list of as many gradients"):
            updater([0, 1], wrong, weights)
        words = "a call takes" if wrong is None else "list of as many weights"
        with pytest.raises(TypeError, match=words):
            updater([0, 1], grads, wrong)
    for wrong in ((i for i in (0, 1)), np.arange(2), {0, 1}, None):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    for wrong in ([0, np.arange(2)], [0, None], [0, [1]]):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    assert everything(updater, weights) == before


def test_an_index_that_comes_twice_counts_in_no_joint_step():
    """Whatever the forms of its gradients; nothing changes."""
    updater = optimizer.get_updater(optimizer.Prodigy(multi_precision=True))
    weight, grad = np.ones((2, 16, 3), np.float16)
    before = everything(updater, [weight])
    with pytest.raises(ValueError, match="updates an index once in each list"):
        updater(["a", "a"], [grad, grad.astype(np.float32)], [weight, weight])
    assert everything(updater, [weight]) == before


def test_a_list_with_an_index_twice_that_fails_restores_copies_too():
    def schedule(update):
        if update == 3:
            raise RuntimeError("no rate")
        return 0.1

    updater = optimizer.get_updater(optimizer.SGD(momentum=0.9, lr_scheduler=schedule))
    weight, copy = np.ones((4, 3), np.float32, order="F"), np.zeros((4, 3), np.float16, order="F")
    rows = RowSparse(np.ones((1, 3), np.float32), [1], (4, 3))
    updater.set_copy(0, copy)
    updater(0, np.ones((4, 3), np.float32), weight)
    before = everything(updater, [weight, copy])
    with pytest.raises(RuntimeError, match="no rate"):
        updater([0, 0], [np.ones((4, 3), np.float32), rows], [weight, weight])
    assert everything(updater, [weight, copy]) == before


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


class Tenth(optimizer.SGD):
    """What it gives depends on the rate, or on an attribute, as `given` says."""

    given = "rate"

    @optimizer.constant
    def hyper(self, t, lr, wd):
        return {"momentum": 0.0, "lr": (lr if self.given == "rate" else self.own) / 10}


@pytest.mark.parametrize("given", ["rate", "own"])
def test_what_hyper_gives_is_followed_under_a_schedule(given):
    rates = [0.5, 0.25, 0.25, 2.0, 1.0, 0.5]
    made = Tenth(lr_scheduler=lambda update: rates[update - 1])
    made.given, made.own = given, 3.0
    updater, weight, expected = optimizer.Updater(made), np.zeros(3), 0.0
    for step, rate in enumerate(rates):
        if step == 3:
            made.own = 5.0
        updater(0, np.ones(3), weight)
        expected -= (rate if given == "rate" else made.own) / 10
        np.testing.assert_allclose(weight, expected, rtol=1e-15)
