"""The numbers that MXNet computed, replayed by the checker that came with them."""

import pytest

from helpers import golden
from helpers.cases import kept
from helpers.golden import manifest

checker, replay = golden.checker, golden.replay


def names(kind):
    return sorted({case["optimizer"] for case in manifest()[kind]})


def right(case):
    """Status that a recorded case must come to."""
    if case["recommend"] == "diverge":
        return "works-where-mxnet-raises" if "error" in case else "recommended"
    return "raises-like-mxnet" if "error" in case else "pass"


@pytest.mark.parametrize("name", kept(names("optimizer_cases"), "adam", "sgd"))
def test_trajectories_and_states(name, replay):
    """Every case: all dtypes, dense and row-sparse gradients and weights, nothing skipped."""
    cases = {case["id"]: case for case in manifest()["optimizer_cases"]}
    records = replay("run_optimizer_cases", f"^{name}/", True, False)
    of_name = [case for case in cases.values() if case["optimizer"] == name]
    assert len(records) == len(of_name) > 0
    assert [r for r in records if r["status"] != right(cases[r["id"]])] == []


@pytest.mark.slow("exhaustive")
def test_recommended_behaviour_is_taken_where_mxnet_is_questionable(replay):
    """Cases that say 'diverge' have our numbers wherever these were recorded."""
    diverge = {
        case["id"]
        for case in manifest()["optimizer_cases"]
        if case["recommend"] == "diverge" and case.get("alt")
    }
    records = [r for r in replay("run_optimizer_cases", None, True, False) if r["id"] in diverge]
    assert len(records) == len(diverge) > 70
    assert [record["id"] for record in records if not record.get("matches_recommended")] == []


def test_noise_of_sgld(replay):
    records = replay("run_sgld_cases", None, False)
    assert len(records) == len(manifest()["sgld_cases"]) > 0
    assert {record["status"] for record in records} == {"pass"}


def test_schedules(replay):
    records = replay("run_lr_cases", None, False)
    assert len(records) == 51
    assert {record["status"] for record in records} <= {"pass", "recommended", "raises-like-mxnet"}
