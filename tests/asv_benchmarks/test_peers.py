"""``asv_benchmarks/peers.py``: its table, its plot, and what it refuses."""

import importlib
import re
import sys

import numba
import numpy as np
import pytest

from fastopt import optimizer
from helpers.paths import ROOT

SUITES = ROOT / "asv_benchmarks"
RESULTS = {
    "Adam, 1,000": {"fastopt": (8.5e-6, 1.0), "limit": (2e-6, 0.25), "NumPy": (9e-6, 1.06)},
    "lazy Adam": {"fastopt": (1.25e-3, 1.0), "torch SparseAdam": (1e-2, 8.0)},
}


@pytest.fixture
def peers(monkeypatch):
    pytest.importorskip("ml_dtypes")
    monkeypatch.syspath_prepend(SUITES)
    return importlib.import_module("peers")


def run(peers, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    return peers.main()


def test_a_line_has_a_time_and_ratios_and_blanks_for_what_was_not_measured(peers):
    head, lines = peers.lines_of(RESULTS)
    assert head == ["step", "fastopt, time", "limit", "NumPy", "torch SparseAdam"]
    assert lines[0] == ["Adam, 1,000", "8.5 us", "0.25", "1.06", ""]
    assert lines[1] == ["lazy Adam", "1.25 ms", "", "", "8.00"]


@pytest.mark.exhaustive
@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="measures compiled kernels")
def test_one_command_prints_one_table_and_draws_it(peers, monkeypatch, tmp_path, capfd):
    """In the libraries that are always there; the others are skipped with a line."""
    monkeypatch.setattr(peers, "find_spec", lambda library: library == "numpy")
    plot = tmp_path / "peers.png"
    arguments = ["--quick", "--only", "^Adam, 1,000$", "--markdown"]
    assert run(peers, monkeypatch, *arguments, "--plot", str(plot)) == 0
    out, err = capfd.readouterr()
    assert "torch: skipped, it is not installed\n" in err
    assert re.search(r"^\| step +\| fastopt, time \| limit \| NumPy \|$", out, re.MULTILINE)
    cells = r" +[\d.]+ [um]s \| +[\d.]+ \| +[\d.]+ \|"
    assert re.search(rf"^\| Adam, 1,000 \|{cells}$", out, re.MULTILINE)
    assert re.search(r"\n\w+ .* threads; Python .*, fastopt .*; \d{4}-\d\d-\d\d\.\n$", out)
    assert plot.stat().st_size < 100_000


def test_plot_has_a_transparent_background(peers, tmp_path):
    from matplotlib.image import imread

    importlib.import_module("peers_plot").draw(
        {words: peers.ratios(times) for words, times in RESULTS.items()}, tmp_path / "peers.png"
    )
    pixels = imread(tmp_path / "peers.png")
    assert pixels[0, 0, 3] == 0
    assert (pixels[..., 3] == 1).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--only", "nothing like it"],
            "--only: no case matches 'nothing like it'; there are Adam,",
        ),
        (["--plot", "missing/peers.png"], "cannot write the plot to 'missing/peers.png'"),
    ],
)
def test_what_cannot_be_measured_or_drawn_is_refused_in_a_line(
    arguments, words, peers, monkeypatch, capsys
):
    monkeypatch.setattr(peers, "find_spec", lambda library: True)
    monkeypatch.setattr(peers, "installed", lambda: dict.fromkeys(peers.COLUMNS.values(), "1"))
    assert run(peers, monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"peers.py: {words}")
    assert captured.err.count("\n") == 1


def test_numpy_code_steps_rows_as_fastopt_does(peers):
    rows = importlib.import_module("row_steps")
    ids = np.array([7, 3, 19, 7, 3, 3])
    rng = np.random.default_rng(0)
    arrays = np.zeros((3, 20, 4), np.float32)
    weight, adam = arrays[0].copy(), optimizer.Adam()
    updater = optimizer.get_updater(optimizer.Adam())
    for t in (1, 2):
        values = rng.standard_normal((len(ids), 4), np.float32)
        rows.lazy_adam(adam, t, *rows.summed(ids, values), *arrays)
        updater(0, (values, ids), weight)
    assert abs(weight).max() > 1e-3
    np.testing.assert_allclose(arrays[0], weight, rtol=1e-4, atol=1e-7)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["fastopt", "torch", "optax", "prodigyopt", "schedulefree"])
def test_every_rule_steps_in_the_libraries_that_have_it(library, peers):
    pytest.importorskip(library)
    rules = importlib.import_module("rule_steps")
    done = set()
    for name, _ in rules.CASES.values():
        try:
            rules.PEERS[library][1](name, (4, 3))()
        except NotImplementedError:
            continue
        done.add(name)
    of_all = {name for name, _ in rules.CASES.values()}
    of_authors = {name for name, (package, _) in rules.AUTHORS.items() if package == library}
    named = {"fastopt": of_all, "torch": {*rules.TORCH}, "optax": {*rules.OPTAX}}
    assert done == named.get(library, of_authors) != set()
