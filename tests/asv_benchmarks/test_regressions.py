"""``asv_benchmarks/regressions.py``: what it calls slower, and a slowdown that was planted."""

import importlib
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
