"""``asv_benchmarks/which_optimizer.py``: its models, its numbers, and the page that it writes."""

import importlib
import json
import math
from itertools import islice

import numpy as np
import pytest

from helpers.paths import ROOT

KEPT, PAGE = (ROOT / "docs" / f"which-optimizer.{kind}" for kind in ("json", "md"))
MODELS = ["digits", "characters", "factors", "words"]


@pytest.fixture
def which(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "asv_benchmarks")
    return importlib.import_module("which_optimizer")


@pytest.fixture
def kept():
    return json.loads(KEPT.read_text(encoding="utf-8"))


def made_up():
    """Results of two models, two seeds and three optimizers, of which one gets nowhere."""
    steps = {"AdamW": ([20, 40], [10, 10]), "Lion": ([10, 160], [10, None])}
    steps["SOAP"] = steps["Muon"] = ([None, None], [None, None])
    return {
        "models": {
            "digits": {"steps": 200, "target": 1.0, "gradient_ms": 1.0},
            "words": {"steps": 200, "target": 2.0, "gradient_ms": 3.0},
        },
        "optimizers": {
            name: {
                "digits": {"steps": first, "update_ms": 1.0},
                "words": {"steps": second, "update_ms": 1.0},
            }
            for name, (first, second) in steps.items()
        },
    }


# The page


def test_the_tables_of_the_page_are_those_of_the_kept_results(which, kept):
    page = PAGE.read_text(encoding="utf-8")
    assert all(border in page for border in which.BORDERS)
    assert which.with_tables(page, kept) == page


def test_what_follows_from_the_kept_numbers_is_kept_with_them(which, kept):
    again = json.loads(json.dumps({k: kept[k] for k in kept if k not in ("steps", "seconds")}))
    which.conclude(again)
    assert again == kept
    assert which.as_text(kept) == KEPT.read_text(encoding="utf-8")


# The numbers


def test_steps_are_counted_to_the_first_loss_at_the_target(which):
    assert which.until([3.0, 2.0, 1.0, 2.0], 2.0) == 2 * which.EVERY
    assert which.until([3.0, 2.5], 2.0) is None
    assert which.best([4.0, 3.0, 2.0, 1.0]) == 2.0  # the last quarter does not count


def test_profiles_compare_an_optimizer_with_the_best_one_of_each_run(which):
    results = made_up()
    which.conclude(results)
    steps = results["steps"]
    # Ratios: AdamW 2, 1, 1, 1; Lion 1, 4, 1, and none.
    assert steps["scores"]["AdamW"] == pytest.approx((2 / 3 + 3) / 4, abs=1e-3)
    assert steps["scores"]["Lion"] == pytest.approx(0.5, abs=1e-3)
    assert steps["scores"]["Muon"] == 0
    assert (steps["profiles"]["AdamW"][0], steps["profiles"]["AdamW"][-1]) == (0.75, 1.0)
    assert (steps["profiles"]["Lion"][0], steps["profiles"]["Lion"][-1]) == (0.5, 0.75)
    assert results["seconds"]["scores"]["Lion"] == steps["scores"]["Lion"]  # as fast a step
    assert which.statement(results) == (
        "Steps to the target over those of AdamW: Muon: digits not reached, words not reached; "
        "SOAP: digits not reached, words not reached."
    )


def test_all_optimizers_have_the_same_trials_with_rates_over_their_whole_range(which):
    trials = 8
    positions = []
    for contender in which.CONTENDERS.values():
        drawn = [contender.arguments(k, trials)[contender.rate] for k in range(trials)]
        low, high = map(math.log, contender.rates)
        positions.append([(math.log(rate) - low) / (high - low) for rate in drawn])
    np.testing.assert_allclose(positions, [positions[0]] * len(positions), atol=0.01)
    assert [int(place * trials) for place in positions[0]] == [*range(trials)]


# The models


@pytest.mark.parametrize("name", MODELS)
def test_gradients_lead_downhill_and_seeds_give_the_same_numbers(which, name):
    pytest.importorskip("sklearn")
    workload, ends = which.WORKLOADS[name], []
    for _ in range(2):
        model = workload.start(3)
        start = model.held_out()
        for grads in islice(model.steps(), 30):
            for weight, grad in zip(model.weights, grads, strict=True):
                assert grad.shape == weight.shape
                assert grad.dtype == weight.dtype == np.float32
                weight -= np.float32(RATES[name]) * grad
        ends.append(model.held_out())
    assert ends[0] == ends[1] < start


RATES = {"digits": 0.1, "characters": 0.05, "factors": 5.0, "words": 5.0}
