"""The numbers that MXNet computed, and the recommended ones where its own are a mistake."""

from itertools import pairwise

import pytest

from helpers.cases import kept
from helpers.golden import MANIFEST, is_normal, noise_of_sgld, outcome_of_optimizer

CASES = MANIFEST["optimizer_cases"]


def right(case):
    """How a recorded case must end."""
    if case["recommend"] == "diverge":
        return "recommended"
    return "raises" if "error" in case else "same"


@pytest.mark.parametrize("name", kept(sorted({c["optimizer"] for c in CASES}), "adam", "sgd"))
def test_trajectories_and_states(name):
    """Every case: all dtypes, dense and row-sparse gradients and weights, nothing skipped."""
    cases = [case for case in CASES if case["optimizer"] == name]
    wrong = [case["id"] for case in cases if outcome_of_optimizer(case) != right(case)]
    assert wrong == []


@pytest.mark.parametrize("case", MANIFEST["sgld_cases"], ids=lambda case: case["id"])
def test_noise_of_sgld(case):
    noises = [*noise_of_sgld(case)]
    assert all(map(is_normal, noises))
    for one, other in pairwise(noises):
        assert abs((one * other).mean()) < 5 / one.size**0.5
