"""The initializers of MXNet, whose recorded cases are replayed."""

import re

import pytest

from fastopt import initializer
from helpers.golden import MANIFEST, outcome_of_initializer
from helpers.paths import DOCS

CASES = {case["id"]: case for case in MANIFEST["initializer_cases"]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:plain names are deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* gets zeros because of its name:UserWarning"),
]


def test_every_case_passes_and_none_is_skipped():
    """What fails in the newest MXNet fails here too, but for the text of fused layers."""
    ends = {name: outcome_of_initializer(case) for name, case in CASES.items()}
    assert len(ends) == 343
    assert "differs" not in ends.values()
    assert {ends[name] for name, case in CASES.items() if case["category"] == "core"} == {"same"}
    recommended = {name for name, case in CASES.items() if case.get("alt")}
    assert {name for name in ends if ends[name] == "recommended"} == recommended
    failing = {
        name: case["kind"]
        for name, case in CASES.items()
        if "error" in case and "1.9.1" in (case["mxnet"], *case["also_identical_in"])
    }
    assert len(failing) > 50
    for name, kind in failing.items():
        assert ends[name] == ("works" if kind == "fusedrnn" else "raises"), name


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if "layout" in case], ids=lambda case: case["id"]
)
def test_layout_of_packed_layers(case):
    name, kwargs = case["init"]
    layout = initializer.create(name, **kwargs).layout(*case["shape"])
    assert [[part, list(shape), start] for part, shape, start in layout] == case["layout"]


def test_the_guide_mentions_every_quirk_of_the_cases():
    text = (DOCS / "initializers.md").read_text(encoding="utf-8")
    quirks = {case["quirk"] for case in CASES.values() if "quirk" in case}
    assert quirks
    assert quirks <= set(re.findall(r"`(Q-[A-Z0-9-]+)`", text))
