"""Ascent: what changes it, and what refuses it; test_promises.py compares it with descent."""

import numpy as np
import pytest

import fastopt
from helpers.users import InNumPy, Unscaled


def test_the_direction_may_change_on_the_way():
    updater, weight = fastopt.Updater(fastopt.SGD(lr=0.5)), np.ones(2)
    updater(0, np.ones(2), weight)
    updater.optimizer.maximize = True
    updater(0, np.ones(2), weight)
    np.testing.assert_array_equal(weight, 1)


def test_what_cannot_ascend_says_so():
    words = r"InNumPy has an update\(\) in Python: negate the gradient"
    with pytest.raises(ValueError, match=words):
        InNumPy(maximize=True)
    weight = np.ones(2)
    with pytest.raises(ValueError, match="reads no rescale_grad, so it cannot maximize"):
        fastopt.Updater(Unscaled(maximize=True))(0, np.ones(2), weight)
    for name, value in {"wd": 0.1, "clip_gradient": 1.0, "rescale_grad": 0.5}.items():
        for average in (None, fastopt.EMA(0.9), fastopt.SWA(), fastopt.Lookahead()):
            updater = fastopt.Updater(Unscaled(**{name: value}), average=average)
            with pytest.raises(ValueError, match=f"reads no {name}, so that it has no effect"):
                updater(0, np.ones(2), weight)
    np.testing.assert_array_equal(weight, 1)
