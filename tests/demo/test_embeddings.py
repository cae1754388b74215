import re
import sys

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.__main__ import main
from fastopt.demo import common, embeddings
from fastopt.demo.common import Refused
from fastopt.demo.embeddings import RATES, Options
from fastopt.demo.skipgram import Corpus, SkipGram, nearest
from helpers.cases import kept
from helpers.terminals import Terminal

TOPICS = [[f"{topic}{a}{b}" for a in "abcdefg" for b in "abcdefgh"] for topic in ("sea", "sky")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file in which words of two topics never stand in one sentence."""
    rng = np.random.default_rng(3)
    sentences = [" ".join(rng.choice(TOPICS[rng.integers(2)], 30)) for _ in range(200)]
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(". ".join(sentences), encoding="utf-8")
    return path


def table(out):
    """Words of the printed table, each with its neighbours."""
    rows = re.findall(r"^  (\w+) +((?:\w+ -?\d\.\d\d *)+)$", out, re.MULTILINE)
    return {word: re.findall(r"([^\W\d]+) -?\d", rest) for word, rest in rows}


def test_corpus_numbers_words_from_the_commonest_and_leaves_rare_ones_out():
    corpus = Corpus.of("To be, or not to be: that is TO a 42 be_am", least=2)
    assert corpus.words == ["to", "be"]
    assert corpus.counts.tolist() == [3, 3]
    assert [corpus.words[token] for token in corpus.tokens] == ["to", "be", "to", "be", "to", "be"]


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_pairs_are_words_that_stand_near_each_other(window, seed):
    corpus = Corpus([], np.ones(30), np.arange(30))
    pairs = corpus.pairs(np.random.default_rng(seed), window, threshold=1)
    distances = abs(pairs[:, 0] - pairs[:, 1])
    assert distances.min() == 1
    assert distances.max() <= window
    # Each word reaches at least its next ones, and is reached by them.
    adjacent = {tuple(pair) for pair in pairs[distances == 1]}
    assert adjacent == {(i, j) for i in range(30) for j in (i - 1, i + 1) if 0 <= j < 30}


def test_frequent_words_are_thinned_out_and_rare_ones_are_kept():
    tokens = np.append(np.zeros(9000, int), np.arange(1, 1001))
    corpus = Corpus([], np.bincount(tokens), np.random.default_rng(0).permutation(tokens))
    pairs = corpus.pairs(np.random.default_rng(0), 1, threshold=0.01)
    share = (pairs[:, 0] == 0).mean()
    kept = 9000 * (np.sqrt(0.01 / 0.9) + 0.01 / 0.9)
    assert share == pytest.approx(kept / (kept + 1000), rel=0.05)
    assert len(np.unique(pairs)) == 1001


def test_text_without_pairs_is_an_empty_epoch():
    corpus = Corpus(["one"], np.ones(1), np.zeros(1, int))
    assert corpus.pairs(np.random.default_rng(0), 5, 1).shape == (0, 2)


def test_gradient_is_the_derivative_of_the_loss():
    rng = np.random.default_rng(1)
    model = SkipGram(rng, Corpus(["w"] * 9, np.arange(1, 10), np.arange(9)), 4, "float64")
    model.weights[1][:] = rng.standard_normal(model.weights[1].shape)
    pairs = rng.integers(9, size=(20, 2))

    def loss():
        return 20 * model.backward(pairs, 3, np.random.default_rng(7))[0]

    _, gradients = model.backward(pairs, 3, np.random.default_rng(7))
    step = 1e-6
    for weight, gradient in zip(model.weights, gradients, strict=True):
        assert len(np.unique(gradient.indices)) < len(gradient.indices)
        direction = rng.standard_normal(weight.shape)
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
        weight += step * direction
        slope = float((gradient.to_dense() * direction).sum())
        assert abs(slope) > 1e-3
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_padding_changes_no_gradient():
    rng = np.random.default_rng(1)
    model = SkipGram(rng, Corpus(["w"] * 9, np.arange(1, 10), np.arange(9)), 4, "float64")
    pairs = rng.integers(9, size=(20, 2))
    loss, gradients = model.backward(pairs, 3, np.random.default_rng(7))
    other, taller = model.padded(50).backward(pairs, 3, np.random.default_rng(7))
    assert loss == other
    for small, tall in zip(gradients, taller, strict=True):
        assert (small.shape, tall.shape) == ((9, 4), (50, 4))
        np.testing.assert_array_equal(small.values, tall.values)
        np.testing.assert_array_equal(small.indices, tall.indices)


def test_words_are_drawn_by_the_three_quarter_power_of_their_counts():
    rng = np.random.default_rng(0)
    model = SkipGram(rng, Corpus(["a", "b"], np.array([16, 1]), np.zeros(17, int)), 2, "float32")
    _, (_, gradient) = model.backward(np.zeros((1000, 2), int), 9, rng)
    drawn = gradient.indices.reshape(1000, 10)[:, 1:]
    assert drawn.mean() == pytest.approx(1 / 9, rel=0.1)


def test_nearest_rows_have_the_greatest_cosines(rng):
    vectors = rng.standard_normal((20, 3))
    rows, cosines = nearest(vectors, 4, 19)
    lengths = np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(cosines, (vectors @ vectors[4] / lengths / lengths[4])[rows])
    assert (np.diff(cosines) <= 0).all()
    assert set(rows) == set(range(20)) - {4}


@pytest.mark.further
@pytest.mark.parametrize("name", kept(RATES, "adam"))
@pytest.mark.filterwarnings("ignore:ccSGD is deprecated:DeprecationWarning")
def test_loss_falls_and_words_of_a_topic_become_neighbours(name, text, capsys):
    loss = embeddings.run(Options(name, text=text, epochs=8))
    captured = capsys.readouterr()
    assert captured.err == ""
    pattern = r"loss of a pair of words: ([\d.]+) in the first epoch, ([\d.]+) in the last"
    first, last = map(float, re.search(pattern, captured.out).groups())
    assert last == pytest.approx(loss, abs=1e-3)
    assert last < first - 0.1
    shown = table(captured.out)
    assert len(shown) == 12
    assert {len(neighbours) for neighbours in shown.values()} == {5}
    same = [w[:3] == word[:3] for word, neighbours in shown.items() for w in neighbours]
    assert np.mean(same) > 0.95


@pytest.mark.exhaustive
def test_default_text_is_python_s_reference(capsys):
    embeddings.run(Options(epochs=1))
    shown = table(capsys.readouterr().out)
    assert set(shown) == set(embeddings.WORDS)
    assert set(shown["exception"]) & {"raised", "handler", "clause", "raise", "caught", "except"}


@pytest.mark.exhaustive
def test_equal_seeds_repeat_the_run_and_others_do_not(text, capsys):
    first, again, other = (
        (embeddings.run(Options(text=text, epochs=1, seed=seed)), table(capsys.readouterr().out))
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first[0] != other[0]


@pytest.mark.exhaustive
def test_report_has_both_times_and_says_that_the_weights_agree(text, capsys):
    embeddings.run(Options(text=text, epochs=1))
    out = capsys.readouterr().out
    first = re.search(r"^fastopt updated two tables .*$", out, re.MULTILINE)[0]
    assert re.search(r": 896 row indices per step, \d+ unique;$", first)
    assert out.count("agreement with dense updates: yes") == 1
    lines = re.findall(r"^([\d,]+)(?: +[\d.]+ [um]s){3}$", out, re.MULTILINE)
    assert lines == ["112", "50,000"]
    words = r"^([\d,]+) rows: row-sparse updates are [\d.]+ times (?:fast|slow)er than making the"
    assert re.findall(words, out, re.MULTILINE) == lines


@pytest.mark.exhaustive
def test_progress_is_one_line_of_a_terminal(text, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    embeddings.run(Options(text=text, epochs=1))
    shown = terminal.getvalue()
    assert "\n" not in shown
    for label in ("comparison on 112 rows", "comparison on 50000 rows", "training, epoch 1/1"):
        assert label in shown


@pytest.mark.exhaustive
def test_report_does_not_compare_numbers_that_are_not_meant_to_agree(text, capsys):
    embeddings.run(Options("adam", text=text, epochs=1))
    out = capsys.readouterr().out
    assert "agreement" not in out
    assert "dense updates with adam also move rows whose gradient is zero" in out


@pytest.mark.exhaustive
def test_updates_are_compared_on_one_thread(monkeypatch, text):
    """Otherwise a busy machine would slow down the dense updates alone."""
    counts, step, before = [], embeddings.Dense.step, numba.get_num_threads()

    def counted(self, given):
        counts.append(numba.get_num_threads())
        step(self, given)

    monkeypatch.setattr(embeddings, "TALL", 0)
    monkeypatch.setattr(embeddings.Dense, "step", counted)
    embeddings.run(Options(text=text, epochs=1))
    assert set(counts) == {1}
    assert numba.get_num_threads() == before


@pytest.mark.further
def test_dense_updates_get_the_same_gradients(monkeypatch, text):
    monkeypatch.setattr(embeddings, "TALL", 0)
    seen, step = [], common.Runner.step
    monkeypatch.setattr(
        common.Runner, "step", lambda self, given: seen.append(given) or step(self, given)
    )
    monkeypatch.setattr(common, "first_step", lambda *args: 0.0)
    monkeypatch.setattr(embeddings, "_report", lambda *args: None)
    embeddings.run(Options(text=text, epochs=1))
    for sparse, dense in (seen[:2], seen[3:1:-1]):  # they take turns in going first
        for one, other in zip(sparse, dense, strict=True):
            np.testing.assert_array_equal(one.to_dense(), other)


@pytest.mark.exhaustive
def test_command_line_trains_on_a_text_of_one_s_own(text, tmp_path, capsys):
    plot = tmp_path / "loss.png"
    arguments = ["--epochs", "1", "--batch-size", "512", "--dtype", "float64", "--plot", str(plot)]
    assert main(["demo", "--task", "embeddings", "--text", str(text), *arguments]) == 0
    out = capsys.readouterr().out
    assert "float64, epochs 1, batch size 512, seed 0" in out
    assert "text of 6000 words, 112 of them different" in out
    assert out.splitlines()[-1] == f"loss over time with row-sparse and dense gradients: {plot}"
    assert plot.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "missing.txt"], "cannot read the text"),
        (["--momentum", "0.9"], "--task embeddings does not take --momentum"),
        (["--optimizer", "adum"], "Cannot find optimizer 'adum'"),
        (["--optimizer", "muon"], "muon takes dense gradients; those of this demo are row-sparse"),
        (["--optimizer", "soap"], "soap takes dense gradients; those of this demo are row-sparse"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_in_one_line(arguments, words, capsys):
    assert main(["demo", "--task", "embeddings", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fastopt demo: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_text_that_is_too_short_or_no_text_is_refused(tmp_path):
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("one two " * 50, encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(Refused, match=r"must have 100 words that occur 2 times or more, got 2"):
        embeddings.run(Options(text=short))
    with pytest.raises(Refused, match="cannot read the text"):
        embeddings.run(Options(text=binary))


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(Refused, match="pip install scikit-learn tqdm matplotlib"):
        embeddings.run(Options())
