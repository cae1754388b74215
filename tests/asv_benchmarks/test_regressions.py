"""``asv_benchmarks/regressions.py``: what it calls slower, and a slowdown that was planted."""

import importlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import ROOT

SUITES = ROOT / "asv_benchmarks"


@pytest.fixture
def regressions(monkeypatch):
    monkeypatch.syspath_prepend(SUITES)
    return importlib.import_module("regressions")


@pytest.mark.parametrize(("rounds", "left"), [(6, 1), (8, 1), (9, 2), (12, 3), (25, 8)])
def test_the_interval_is_that_of_the_sign_test(regressions, rounds, left):
    """Ranks from tables of the sign test at 95%."""
    times = np.array([[1.0, ratio] for ratio in range(1, rounds + 1)])
    assert regressions.Comparison(times).interval == (left, rounds + 1 - left)


def test_fewer_than_six_rounds_say_nothing(regressions):
    with pytest.raises(ValueError, match="needs 6 rounds, got 5"):
        _ = regressions.Comparison(np.ones((5, 2))).interval


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=20), st.floats(1e-6, 1e6))
def test_slow_rounds_of_both_sides_change_nothing(noise, scale):
    sys.path.insert(0, str(SUITES))
    try:
        Comparison = importlib.import_module("regressions").Comparison
    finally:
        sys.path.remove(str(SUITES))
    base = scale * np.array(noise)
    assert not Comparison(np.stack([base, base], 1)).is_slower(1.0)
    assert Comparison(np.stack([base, 1.2 * base], 1)).is_slower(1.1)
    assert not Comparison(np.stack([base, 1.2 * base], 1)).is_slower(1.3)


def test_a_ratio_that_may_be_luck_is_not_slower(regressions):
    times = np.ones((9, 2))
    times[:, 1] = [0.7, 0.8, 0.9, 1.1, 1.3, 1.3, 1.4, 1.4, 1.5]
    assert regressions.Comparison(times).ratio > 1.1
    assert not regressions.Comparison(times).is_slower(1.1)


def test_wrong_arguments_are_reported(regressions, capsys):
    for arguments, words in [
        (["HEAD", "--rounds", "5"], "--rounds must be at least 6, got 5"),
        (["HEAD", "--factor", "0.9"], "--factor must be at least 1, got 0.9"),
        (["HEAD", "--bench", "("], "'(' is no regular expression"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            regressions.main(arguments)
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow("exhaustive")
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_planted_slowdown_is_found_and_nothing_else(tmp_path):
    pytest.importorskip("asv_runner")
    repository = tmp_path / "fastopt"
    for folder in ("fastopt", "asv_benchmarks"):
        kept = shutil.ignore_patterns("__pycache__", "env", "results", "html")
        shutil.copytree(ROOT / folder, repository / folder, ignore=kept)
    identity = {
        f"GIT_{who}_{what}": "a@b.c"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **identity, "PYTEST_ADDOPTS": ""}

    def run(*command, status=0):
        done = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "commit", "-q", "-m", "fast")
    updater = repository / "fastopt" / "_updater" / "updater.py"
    line = " " * 8 + "optimizer, records = self.optimizer, self.records"
    fast, place, rest = updater.read_text("utf-8").partition(line)
    assert place
    updater.write_text(fast + " " * 8 + "sum(range(20_000))\n" + place + rest, "utf-8")
    run("git", "commit", "-q", "-am", "slow")

    def compare(*commits, status, bench=r"^dispatch\..*adam"):
        command = [sys.executable, "asv_benchmarks/regressions.py", *commits]
        return run(*command, "--bench", bench, "--factor", "1.5", status=status)

    told = compare("HEAD~1", "HEAD", status=1)
    assert "1 of 1 benchmarks are slower by more than 50%" in told
    assert "again, in new processes:" in told
    assert "0 of 1" in compare("HEAD", "HEAD~1", status=0)
    assert "no such commit: nowhere" in compare("nowhere", status=2)
    assert "no benchmark matches 'nothing'" in compare("HEAD", status=2, bench="nothing")
