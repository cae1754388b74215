"""Prodigy, DAdaptAdam, Schedule-Free Prodigy: an estimate from all parameters of a step."""

import copy
import json

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.cases import exhaustive
from helpers.paths import GOLDEN
from helpers.tensor_lists import as_list, everything, one_by_one

RECORDED = json.loads((GOLDEN / "prodigy.json").read_text())
RECORDS = RECORDED["cases"]
NAMES = "prodigy", "dadaptadam", "schedulefreeprodigy"
FIRST = [next(case for case in RECORDS if case["name"] == name) for name in NAMES]
EVERY = [NAMES[0], *exhaustive(*NAMES[1:])]
F32, F64 = np.float32, np.float64


def start(dtype=F32):
    weights = [np.array(weight, dtype) for weight in RECORDED["start"]]
    steps = [[np.array(grad, dtype) for grad in step] for step in RECORDED["gradients"]]
    return weights, steps


def trained(made, weights, steps, way=as_list):
    """Updater, and the estimate of each step."""
    updater, found = fastopt.Updater(made), []
    for grads in steps:
        way(updater, range(len(weights)), grads, weights)
        found.append(updater.info.d)
    return updater, found


def growing(name="prodigy", **kwargs):
    return optimizer.create(name, d0=1e-3, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FIRST, *exhaustive(*(c for c in RECORDS if c not in FIRST))])
@pytest.mark.parametrize("precision", [(F64, 1e-6, 1e-6), *exhaustive((F32, 3e-5, 1e-2))])
def test_each_step_is_that_of_the_library(case, precision):
    """A weight of 1 in float32 moves by multiples of 1e-7, which is much of a step of 1e-6."""
    dtype, tolerance, of_d = precision
    if dtype is F32 and "d0" not in case["arguments"]:
        return
    weights, steps = start(dtype)
    updater = fastopt.Updater(optimizer.create(case["name"], **case["arguments"]))
    for step, grads in enumerate(steps):
        updater([0, 1, 2], grads, weights)
        np.testing.assert_allclose(updater.info.d, case["d"][step], rtol=of_d)
        for weight, expected in zip(weights, case["weights"][step], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_single_calls_are_the_step_of_a_list_in_any_order(name):
    weights, steps = start(F64)
    others = copy.deepcopy(weights)
    lists, estimates = trained(growing(name), weights, steps)
    singles, found = trained(growing(name), others, steps, one_by_one)
    assert found == estimates
    assert everything(lists, weights) == everything(singles, others)


def test_a_step_that_fails_changes_nothing():
    weights, steps = start()
    updater, estimates = trained(growing(), weights, steps[:8])
    before, made = everything(updater, weights), updater.optimizer
    for indices, grads, multipliers, words in (
        ([0, 1, 2], steps[8], {1: 0.5}, r"index 1: Prodigy estimates one.*0 or 1, got 0\.5"),
        ([1, 0, 1], [steps[8][k] for k in (1, 0, 1)], {}, "1: Prodigy updates an index once in"),
        ([0, 1, 2], [steps[8][1]] * 3, {}, "index 0"),
    ):
        made.set_lr_mult(multipliers)
        with pytest.raises(ValueError, match=words):
            updater(indices, grads, [weights[k] for k in indices])
        made.set_lr_mult({})
        assert everything(updater, weights) == before
    updater([0, 1, 2], steps[8], weights)
    assert made.d > estimates[-1]


@pytest.mark.parametrize("name", EVERY)
def test_a_rate_of_zero_leaves_a_parameter_out(name):
    (weights, steps), made = start(F64), growing(name, wd=0.1)
    others = copy.deepcopy(weights)
    made.set_lr_mult({2: 0.0})
    updater, estimates = trained(made, weights, steps)
    _, found = trained(growing(name, wd=0.1), others[:2], [step[:2] for step in steps])
    assert estimates == found
    np.testing.assert_equal(weights, others)
    assert made._index_update_count[2] == len(steps)
    named = dict(zip(made.rule.slots, updater.states[2], strict=True))
    np.testing.assert_array_equal(named.pop("start", weights[2]), weights[2])
    assert not any(array.any() for array in named.values())


@pytest.mark.parametrize("name", EVERY)
def test_a_gradient_that_is_not_finite_ends_the_growth(name):
    weights, steps = start(F64)
    updater, estimates = trained(growing(name), weights, steps[:8])
    steps[8][1][0] = np.nan
    for grads in steps[8:]:
        updater([0, 1, 2], grads, weights)
    assert estimates[-1] <= updater.info.d < np.inf
    assert np.isfinite(weights[0]).all()
    assert np.isnan(weights[1]).sum() == 1


def test_a_damaged_estimate_is_refused():
    weights, steps = start()
    updater, _ = trained(growing(), weights, steps[:2])
    saved = updater.states_dict()
    for estimate in ({"d": 1.0}, {"d": 0.0, "d_max": 0.0, "d_numerator": 0.0}, [1.0]):
        saved["attributes"]["estimate"] = estimate
        with pytest.raises(fastopt.checkpoint.CheckpointError, match="estimate"):
            updater.load_states_dict(saved)
