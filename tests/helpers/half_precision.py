"""What the tests of half precision have in common."""

import pytest

from fastopt._engine.validate import leaves as flat  # noqa: F401 - for the tests
from helpers.cases import CASES, LIGHT, sampled

every_case = pytest.mark.parametrize("case", sampled(CASES, LIGHT), ids=str)

silent = pytest.mark.filterwarnings("ignore:b?float16 weights without masters")


def lively(case):
    """Arguments with which a few steps of a case move a weight far."""
    return {"wd": case.wd, "clip_gradient": 0.8, **(case.converges or {})}


def master_of(updater, index=0):
    """Master of a weight, and the state of the rule."""
    state = updater.states[index]
    return state[::-1] if updater.optimizer.master_last else state


def bits(array):
    """Bits of the numbers of an array."""
    return array.view(f"u{array.itemsize}")
