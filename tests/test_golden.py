"""The numbers that MXNet computed, replayed by the checker that came with them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
ACCEPTED = {"pass", "recommended", "raises-like-mxnet", "works-where-mxnet-raises"}


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_golden", GOLDEN / "check_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def replay(checker):
    folder = checker.Folder(str(GOLDEN))
    adapter = checker.load_adapter(str(Path(__file__).parent / "golden_adapter.py"))
    yield lambda run, only, *options: getattr(checker, run)(folder, adapter, only, *options)
    sys.modules.pop("golden_adapter", None)


def manifest():
    return json.loads((GOLDEN / "manifest.json").read_text())


def dense(case):
    return case["dtype"] != "float16" and case["grad_stype"] == "default"


def names(kind):
    return sorted({case["optimizer"] for case in manifest()[kind]})


@pytest.mark.parametrize("name", names("optimizer_cases"))
def test_dense_trajectories_and_states(name, replay):
    wanted = {case["id"] for case in manifest()["optimizer_cases"] if dense(case)}
    records = replay("run_optimizer_cases", f"^{name}/", True, False)
    records = [record for record in records if record["id"] in wanted]
    assert records
    assert [record for record in records if record["status"] not in ACCEPTED] == []
    core = [record["status"] for record in records if record["category"] == "core"]
    assert set(core) == {"pass"}


def test_recommended_behaviour_is_taken_where_mxnet_is_questionable(replay):
    """Cases that say 'diverge' have our numbers wherever these were recorded."""
    diverge = {
        case["id"]
        for case in manifest()["optimizer_cases"]
        if dense(case) and case["recommend"] == "diverge" and case.get("alt")
    }
    records = [r for r in replay("run_optimizer_cases", None, True, False) if r["id"] in diverge]
    assert len(records) == len(diverge) > 0
    assert [record["id"] for record in records if not record.get("matches_recommended")] == []


def test_noise_of_sgld(replay):
    wanted = {case["id"] for case in manifest()["sgld_cases"] if case["dtype"] != "float16"}
    records = [r for r in replay("run_sgld_cases", None, False) if r["id"] in wanted]
    assert len(records) == len(wanted) > 0
    assert {record["status"] for record in records} == {"pass"}


def test_schedules(replay):
    records = replay("run_lr_cases", None, False)
    assert len(records) == 51
    assert {record["status"] for record in records} <= ACCEPTED
