import math
import os
import re
import sys
import types
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._console import Refused
from fastopt.demo import digits as demo
from fastopt.demo.digits import Options, Runner, agreement
from fastopt.demo.perceptron import Perceptron
from helpers.cases import exhaustive, kept

UNTRAINABLE = {"test", "groupadagrad", "rprop"}  # Rprop is for the gradient of all examples
NAMES = sorted({kind.__name__.lower() for kind in optimizer.opt_registry.values()} - UNTRAINABLE)


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


RATIO = r"[\d.]+ times (?:faster|slower) \([\d-]+\)"
COMPARED = rf"by the medians, fastopt is {RATIO}(?: and {RATIO})* than plain NumPy"


@pytest.fixture
def _small(monkeypatch):
    """Train the small network alone."""
    monkeypatch.setattr(demo, "NETWORKS", demo.NETWORKS[:1])


small = pytest.mark.usefixtures("_small")


@pytest.mark.parametrize("hidden", [(), (128,), (20, 30)])
def test_gradient_is_the_derivative_of_the_loss(hidden):
    rng = np.random.default_rng(1)
    model = Perceptron("float64", rng, hidden)
    images, digits = rng.random((7, 64)), rng.integers(10, size=7)
    model.backward(images, digits)
    gradients = [parameter.grad().copy() for parameter in model.params.values()]
    step = 1e-6
    for weight, gradient in zip(model.weights, gradients, strict=True):
        direction = rng.standard_normal(weight.shape)
        weight += step * direction
        above = model.backward(images, digits)
        weight -= 2 * step * direction
        below = model.backward(images, digits)
        weight += step * direction
        slope = float((gradient * direction).sum())
        assert abs(slope) > 1e-3
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_that_of_weights_and_gradients_alone(dtype):
    rng = np.random.default_rng(1)
    model = Perceptron(dtype, rng, ())
    images = rng.random((7, 64), np.float32)
    model.backward(images, rng.integers(10, size=7))
    assert {p.data().dtype.name for p in model.params.values()} == {dtype}
    assert {p.grad().dtype.name for p in model.params.values()} == {dtype}
    exact = images @ model.weights[0].astype(np.float32).T
    scores, _ = model.forward(images)
    np.testing.assert_allclose(scores, exact, rtol=0, atol=1e-5)
    assert scores.dtype == np.float32


@small
@pytest.mark.parametrize("seed", [1, *exhaustive(2, 3)])
def test_accuracy_does_not_hang_on_the_seed(seed):
    assert demo.run(Options(seed=seed)) >= 0.96


@small
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ccSGD is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", kept(sorted({"adam", *demo.ARGUMENTS}), "adam", "sgd"))
def test_optimizers_read_at_least_90_percent_with_their_arguments(name):
    assert demo.run(Options(optimizer=name)) >= 0.9


@small
@pytest.mark.filterwarnings("ignore:ccSGD is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", kept(NAMES, "muon"))
def test_every_trainable_optimizer_takes_the_weights(name):
    assert demo.run(Options(optimizer=name, epochs=1, batch_size=demo.TRAIN)) > 0


HALVES = {
    Options(dtype="float16"): "float16 with float32 masters",
    Options(dtype="bfloat16", no_master=True): "bfloat16 without masters, rounded to nearest",
    Options(dtype="bfloat16", no_master=True, rounding="stochastic"): (
        "bfloat16 without masters, rounded stochastically"
    ),
}


@small
@pytest.mark.slow
@pytest.mark.parametrize("options", HALVES)
def test_runs_in_half_precision_say_so_and_are_not_compared(options, capsys):
    demo.run(replace(options, epochs=1))
    out = capsys.readouterr().out
    text = " ".join(out.split())  # which is wrapped to the width of the terminal
    assert f"360 to test; {HALVES[options]} " in text
    assert f"not compared, NumPy would round every intermediate result to {options.dtype}" in text
    assert " plain NumPy\n" not in out


@small
def test_equal_seeds_repeat_the_run_and_others_do_not(capsys):
    options = [Options(epochs=1, seed=seed) for seed in (5, 5, 6)]
    first, again, other = (demo.run(o) for o in options)
    losses = re.findall(r"^64-128-10 +9,610 +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert first == again
    assert losses[0] == losses[1] != losses[2]
    assert other > 0


@pytest.mark.slow
def test_comparison_reports_both_times_and_that_the_weights_agree(capsys):
    demo.run(Options("adam", epochs=2))
    out = capsys.readouterr().out
    assert len(re.findall(r"^64-.* [\d.]+ [um]s +[\d.]+ [um]s$", out, re.MULTILINE)) == 2
    assert re.search(COMPARED, " ".join(out.split()))
    assert "agreement with plain NumPy: yes" in out
    assert re.search(r"first step: [\d.]+ s", out)


def runners(ours, plain, seconds=(1.0, 1.0)):
    """A race that was run, with weights of these values."""
    pairs = zip((ours, plain), seconds, strict=True)
    made = [Runner(lambda given: None, [np.full(2, value)], [time]) for value, time in pairs]
    return types.SimpleNamespace(runners=dict(zip(("fastopt", "plain NumPy"), made, strict=True)))


@pytest.mark.parametrize("far", [0.5, math.nan, math.inf])
def test_agreement_is_that_of_every_network(far):
    same, apart = runners(1.0, 1.0), runners(1.0, far)
    assert agreement([same, same]).startswith("yes")
    words = "NO, weights differ by 5.0e-01" if far == 0.5 else "unknown"
    for pair in ([apart, same], [same, apart]):
        assert agreement(pair).startswith(words)


@small
def test_no_comparison_is_made_up_without_a_reference(capsys):
    demo.run(Options("nag", epochs=1))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("no NumPy code for nag") == 1
    assert "times faster" not in out
    assert "times slower" not in out


def test_both_take_the_same_gradients(monkeypatch):
    """A last batch that is shorter counts for as much in both."""
    monkeypatch.setitem(demo.ARGUMENTS, "sgd", {"learning_rate": 0.5})
    seen = []
    monkeypatch.setattr(demo, "_report", lambda options, runs: seen.extend(runs))
    demo.run(Options("sgd", dtype="float64", epochs=1, batch_size=1000))
    assert len(seen) == 2
    for run in seen:
        ours, plain = (runner.weights for runner in run.race.runners.values())
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@small
def test_diverging_run_says_what_to_change_and_keeps_the_last_line(capsys):
    accuracy = demo.run(Options("sgd", learning_rate=1e30, epochs=1))
    out = capsys.readouterr().out
    assert "try a smaller --learning-rate" in out
    assert "agreement with plain NumPy: unknown" in out
    assert f" {accuracy:.3f} " in out
    assert re.fullmatch(COMPARED, out.splitlines()[-1])


EXTRA = "scikit-learn tqdm matplotlib"
MISSING = {"sklearn.datasets": EXTRA, "matplotlib.backend_bases": EXTRA, "ml_dtypes": "ml_dtypes"}


@pytest.mark.parametrize("missing", MISSING)
def test_missing_package_is_named_with_the_command_that_installs_it(missing, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    dtype = "bfloat16" if missing == "ml_dtypes" else "float32"
    words = f"(?s){re.escape(missing)}.*pip install {MISSING[missing]}"
    with pytest.raises(Refused, match=words) as caught:
        demo.run(Options(dtype=dtype, plot=tmp_path / "loss.png"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_plot_shows_the_loss_over_the_time_of_each_way_to_update(tmp_path, monkeypatch, capsys):
    drawn, path = [], tmp_path / "loss.svg"
    monkeypatch.setattr(demo, "plot_race", lambda *given: drawn.append(given))
    demo.run(Options(epochs=2, plot=path))
    ((losses, times, *titled),) = drawn
    assert [len(epoch) for epoch in losses] == [45, 45]
    assert fmean(losses[1]) < fmean(losses[0])
    assert {name: len(seconds) for name, seconds in times.items()} == {
        "fastopt": 90,
        "plain NumPy": 90,
    }
    assert all((np.diff(seconds) > 0).all() for seconds in times.values())
    assert titled == ["adam trains a 64-512-512-10 network to read digits", path]
    assert last_line(capsys) == f"loss over time with fastopt, plain NumPy: {path}"


def test_plot_states_the_times(tmp_path, monkeypatch):
    times = {"fastopt": np.array([0.5, 1.0, 2.0]), "NumPy": np.array([1.0, 2.0, 5.0])}
    drawn = []
    monkeypatch.setattr("matplotlib.text.Text.draw", lambda self, *_: drawn.append(self.get_text()))
    demo.plot_race([[3.0, 2.0], [1.0]], times, "the title", tmp_path / "race.svg")
    text = "\n".join(drawn)
    for words in ("the title", "mean loss", "fastopt: 2.00 s", "NumPy: 5.00 s"):
        assert words in text


UNWRITABLE = {
    "missing/loss.png": "No such file or directory",
    "folder.png": "Is a directory",
    "loss.tiff.txt": "its name must end in a format, such as .png",
}


@pytest.mark.parametrize("name", UNWRITABLE)
@pytest.mark.skipif(os.name == "nt", reason="Windows words these errors in another way")
def test_plot_that_cannot_be_written_is_refused_before_any_training(name, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(Refused, match=f"cannot write the plot to .*: .*{UNWRITABLE[name]}"):
        demo.run(Options(epochs=1, plot=tmp_path / name))
    assert capsys.readouterr().out == ""


def test_the_check_of_a_plot_leaves_the_folder_as_it_is(tmp_path):
    before = tmp_path / "before.png"
    before.write_bytes(b"plot")
    for name in ("before.png", "new.png"):
        demo.check_plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == [before]
    assert before.read_bytes() == b"plot"


@small
def test_plot_that_fails_to_be_written_in_the_end_is_one_line(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(Refused, match=r"cannot write the plot to .*: no space left"):
        demo.run(Options(epochs=1, plot=tmp_path / "loss.png"))
    assert re.fullmatch(COMPARED, last_line(capsys))
