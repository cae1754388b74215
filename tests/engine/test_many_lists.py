"""Several lists side by side, which share the records of their parameters."""

import gc
import weakref

import numpy as np
import pytest

from fastopt import optimizer
from helpers.tensor_lists import everything


def test_an_updater_is_freed_with_its_weights_and_states():
    updater, weight = optimizer.Updater(optimizer.Adam()), np.ones(3)
    for _ in range(3):
        updater(0, np.ones(3), weight)
    watches = [weakref.ref(each) for each in (updater, weight, updater.optimizer)]
    gc.disable()
    try:
        del updater, weight
        assert [watch() for watch in watches] == [None] * 3
    finally:
        gc.enable()


class Fails(optimizer.Adam):
    """Its hyper() raises when it is told to."""

    fails = False

    def hyper(self, t, lr, wd):
        if self.fails:
            raise RuntimeError("no hyper-parameters")
        return super().hyper(t, lr, wd)


@pytest.mark.parametrize("size", [3, 80_000])
def test_hyper_parameters_that_raise_change_nothing(size):
    made = Fails()
    updater, weights = optimizer.Updater(made), [np.ones(size), np.ones(size)]
    for _ in range(2):
        before = everything(updater, weights)
        made.fails = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no hyper-parameters"):
                updater([0, 1], [np.ones(size)] * 2, weights)
            with pytest.raises(RuntimeError, match="no hyper-parameters"):
                updater(0, np.ones(size), weights[0])
        del made.fails
        assert "fails" not in vars(made)
        assert everything(updater, weights) == before
        for _ in range(3):
            updater([0, 1], [np.ones(size)] * 2, weights)
            updater(0, np.ones(size), weights[0])


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
