"""The initializers of MXNet, replayed by the checker that came with the recorded cases."""

import re

import numpy as np
import pytest

from fastopt import initializer
from helpers import golden
from helpers.paths import DOCS, GOLDEN

checker, replay = golden.checker, golden.replay
ACCEPTED = {"pass", "recommended", "raises-like-mxnet", "works-where-mxnet-raises"}
CASES = {case["id"]: case for case in golden.manifest()["initializer_cases"]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:plain names are deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* gets zeros because of its name:UserWarning"),
]


@pytest.fixture
def records(replay):
    return {record["id"]: record for record in replay("run_init_cases", None, False)}


def test_every_case_passes_and_none_is_skipped(records):
    assert len(records) == len(CASES) == 343
    assert {record["status"] for record in records.values()} <= ACCEPTED
    core = {r["status"] for r in records.values() if r["category"] == "core"}
    assert core == {"pass"}


def test_recommended_numbers_are_taken_wherever_there_are_some(records):
    alternatives = {name for name, case in CASES.items() if case.get("alt")}
    assert len(alternatives) == 6
    assert {records[name]["status"] for name in alternatives} == {"recommended"}


def test_what_fails_in_the_newest_mxnet_fails_here_but_for_the_text_of_fused_layers(records):
    failing = {
        name: case
        for name, case in CASES.items()
        if "error" in case and "1.9.1" in (case["mxnet"], *case["also_identical_in"])
    }
    assert len(failing) > 50
    working = {name for name in failing if records[name]["status"] != "raises-like-mxnet"}
    assert working == {name for name, case in failing.items() if case["kind"] == "fusedrnn"}


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if "layout" in case], ids=lambda case: case["id"]
)
def test_layout_of_packed_layers(case):
    name, kwargs = case["init"]
    layout = initializer.create(name, **kwargs).layout(*case["shape"])
    assert [[part, list(shape), start] for part, shape, start in layout] == case["layout"]


def test_arrays_of_the_cases_load_from_their_file():
    """The file of the recorded cases is an .npz file of many arrays."""
    path = GOLDEN / "initializers.npz"
    load = initializer.Load(path)
    with np.load(path) as file:
        assert set(load.param) == {name.removeprefix("arg:") for name in file}


def test_the_guide_mentions_every_quirk_of_the_cases():
    text = (DOCS / "initializers.md").read_text(encoding="utf-8")
    quirks = {case["quirk"] for case in CASES.values() if "quirk" in case}
    assert quirks
    assert quirks <= set(re.findall(r"`(Q-[A-Z0-9-]+)`", text))
