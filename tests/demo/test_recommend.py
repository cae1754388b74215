import re
import sys

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.__main__ import main
from fastopt.demo import recommend
from fastopt.demo.recommend import Choices, Model, Options, recall
from helpers.terminals import Terminal


@pytest.fixture
def small(monkeypatch):
    """A world of fewer users and items."""
    drawn = Choices.drawn
    monkeypatch.setattr(Choices, "drawn", lambda rng: drawn(rng, 300, 100))


def test_choices_are_different_items_in_the_odds_of_the_scores():
    choices = Choices.drawn(np.random.default_rng(0), 400, 100)
    assert all(len(set(row)) == len(row) for row in choices.chosen.tolist())
    ids = np.concatenate([choices.users, choices.items])
    assert (len(np.unique(ids)), ids.dtype) == (500, np.uint64)
    chosen = np.take_along_axis(choices.scores, choices.chosen, axis=1)
    assert chosen.mean() > choices.scores.mean() + 0.5
    assert choices.counts.sum() == choices.seen.size


def test_recall_counts_held_choices_among_the_best_that_are_not_known():
    choices = Choices.drawn(np.random.default_rng(0), 50, 100)
    scores = np.zeros((50, 100))
    np.put_along_axis(scores, choices.seen, 2.0, axis=1)
    np.put_along_axis(scores, choices.chosen[:, -1:], 1.0, axis=1)
    found = recall(choices, scores)
    assert 1 / 3 <= found < 0.6
    np.put_along_axis(scores, choices.chosen[:, -3:], 1.0, axis=1)
    assert recall(choices, scores) == 1


@pytest.mark.further
def test_a_step_follows_the_gradient_of_the_loss():
    made = optimizer.SGD(learning_rate=1.0, rescale_grad=1e-6, lazy_update=True)
    model = Model(made, "float64", 0)
    who, chosen, other = (np.arange(4, dtype=np.uint64) + 10 * k for k in range(3))
    before = model.step(who, chosen, other)
    u, v, w = (
        model.tables[name].lookup(ids, create=False)
        for name, ids in (("users", who), ("items", chosen), ("items", other))
    )
    slope = 1 / (1 + np.exp(((v - w) * u).sum(axis=1)))
    squares = slope**2 * (((v - w) ** 2).sum(axis=1) + 2 * (u**2).sum(axis=1))
    after = model.step(who, chosen, other)
    assert (before - after) * 4 / 1e-6 == pytest.approx(squares.sum(), rel=1e-3)


def test_vectors_rank_better_than_popularity(small, tmp_path, capsys):
    plot = tmp_path / "recall.png"
    got = recommend.run(Options(epochs=6, batch_size=256, plot=plot))
    captured = capsys.readouterr()
    assert captured.err == ""
    shown = re.findall(r"^(?:vectors|the most|the tastes).* ([\d.]+)%$", captured.out, re.MULTILINE)
    vectors, popular, tastes = (float(number) / 100 for number in shown)
    assert vectors == pytest.approx(got, abs=1e-3)
    assert popular < vectors < tastes
    assert re.search(r"lookups and updates by id: [\d,]+ ids a second", captured.out)
    assert captured.out.splitlines()[-1] == f"recall after each epoch: {plot}"
    assert plot.stat().st_size > 0


@pytest.mark.exhaustive
def test_equal_seeds_repeat_the_run(small):
    first, again = (recommend.run(Options(epochs=1, seed=5)) for _ in range(2))
    assert first == again


@pytest.mark.exhaustive
def test_progress_is_one_line_of_a_terminal(small, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    recommend.run(Options(epochs=1))
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert shown.startswith("\r")
    assert shown.endswith("\r")  # the line is cleared


@pytest.mark.further
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "a.txt"], "--task recommend does not take --text"),
        (["--dtype", "float16"], "--task recommend takes --dtype float32 or float64"),
        (["--optimizer", "adum"], "Cannot find optimizer 'adum'"),
        (["--optimizer", "muon"], "table 'users': optimizer must update by a rule"),
    ],
)
def test_wrong_options_are_refused_in_one_line(arguments, words, capsys):
    assert main(["demo", "--task", "recommend", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fastopt demo: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
