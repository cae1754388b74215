"""``asv_benchmarks/compare.py``: its tables, and what it refuses."""

import importlib
import sys

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._console import Refused
from helpers.paths import ROOT

RESULTS = {
    "Adam, 1,000": {"fastopt": [8.5e-6] * 2, "limit": [2.125e-6] * 2, "NumPy": [8.5e-6, 9.52e-6]},
    "lazy Adam": {"fastopt": [1.25e-3] * 2, "torch SparseAdam": [1e-2] * 2},
}
RESULTS = {
    label: {column: np.array(seconds) for column, seconds in times.items()}
    for label, times in RESULTS.items()
}


@pytest.fixture
def compare(monkeypatch):
    pytest.importorskip("ml_dtypes")
    monkeypatch.syspath_prepend(ROOT / "asv_benchmarks")
    return importlib.import_module("compare")


def test_a_line_has_a_time_and_ratios_and_blanks_for_what_was_not_measured(compare):
    head, lines = compare.lines_of(compare.peers(), RESULTS)
    assert head == ["step", "fastopt, time", "limit", "NumPy", "torch SparseAdam"]
    assert lines[0] == ["Adam, 1,000", "8.5 us", "0.25", "1.06", ""]
    assert lines[1] == ["lazy Adam", "1.25 ms", "", "", "8.00"]


def test_bars_are_columns_of_their_table_and_lines_of_the_page(compare):
    asked = compare.bars()
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert all({*bars} <= {*asked.columns} for bars in asked.bars.values())
    for label in ("Adam, 1,000 elements", "SGD with momentum, 1,000 elements"):
        for column, bar in asked.bars[label].items():
            assert f"| {label}, time of {column} / time | >= {bar:g} |" in page


@pytest.mark.parametrize(
    ("arguments", "versions", "sentence"),
    [
        (["--only", "no"], ["fastopt", "numpy"], "--only: no case matches 'no'; there are "),
        (["torch"], ["fastopt"], "this table needs torch"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    arguments, versions, sentence, compare, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.setattr(compare, "installed", lambda columns: dict.fromkeys(versions, "1"))
    assert compare.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"compare.py: {sentence}" in captured.err.splitlines()[-1]


def test_numpy_code_steps_rows_as_fastopt_does(compare):
    libraries = importlib.import_module("libraries")
    ids = np.array([7, 3, 19, 7, 3, 3])
    rng = np.random.default_rng(0)
    ours, theirs = np.zeros((2, 20, 4), np.float32)
    updater, plain = optimizer.get_updater(optimizer.Adam()), libraries.forms.Adam()
    for _ in range(2):
        values = rng.standard_normal((len(ids), 4), np.float32)
        plain.rows(0, libraries.summed(ids, values), theirs)
        updater(0, (values, ids), ours)
    assert abs(ours).max() > 1e-3
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-7)


@pytest.fixture
def page(compare):
    return importlib.import_module("performance_page")


def test_the_page_gets_the_tables_that_were_measured(page):
    text = page.PAGE.read_text(encoding="utf-8")
    (old,) = page.PEERS.findall(text)
    head, _, *lines = (
        [c.strip() for c in row.split("|")[1:-1]] for row in old.split("\n\n")[0].splitlines()
    )
    conditions = " ".join(old.split("\n\n")[1].split())
    assert page.with_peers(text, head, lines, conditions) == text
    lines[0][1] = "77.7 us"
    written = page.with_peers(text, head, lines, f"{conditions} Quiet.")
    assert "77.7 us" in written
    assert "Quiet." in written
    assert written.count("\n| ") == text.count("\n| ")
    with pytest.raises(Refused, match="the page also has torch fused"):
        page.with_peers(text, [c for c in head if c != "torch fused"], lines, conditions)


def test_bars_are_written_to_the_column_of_the_processor(page):
    text = "| measurement | bar | AMD | Intel |\n| --- | --- | --- | --- |\n| a | 1 | 2 | 3 |\n"
    written = page.with_bars(text, [["a", ">= 1", "7"], ["b", "5", "6"]], "an Intel(R) Xeon")
    assert written.endswith("| a | >= 1 | 2 | 7 |\n| b | 5 |  | 6 |\n")
    with pytest.raises(Refused, match="no column for M4"):
        page.with_bars(text, [], "M4")
    assert len(page.BARS.findall(page.PAGE.read_text(encoding="utf-8"))) == 1
