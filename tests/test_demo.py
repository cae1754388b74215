import re
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from fastopt import demo, optimizer, plain
from fastopt.demo import Options, Perceptron, Refused, Runner

UNTRAINABLE = {"test", "groupadagrad"}
NAMES = sorted(
    cls.__name__.lower()
    for cls in vars(optimizer).values()
    if isinstance(cls, type) and issubclass(cls, optimizer.Optimizer)
)


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def test_gradient_is_the_derivative_of_the_loss():
    rng = np.random.default_rng(1)
    model = Perceptron(rng, "float64")
    images, digits = rng.random((7, 64)), rng.integers(10, size=7)
    _, gradients = model.backward(images, digits)
    step = 1e-6
    for weight, gradient in zip(model.weights, gradients, strict=True):
        direction = rng.standard_normal(weight.shape)
        weight += step * direction
        above, _ = model.backward(images, digits)
        weight -= 2 * step * direction
        below, _ = model.backward(images, digits)
        weight += step * direction
        slope = float((gradient * direction).sum())
        assert abs(slope) > 1e-3
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_default_demo_reads_at_least_96_percent_of_the_test_images(capsys):
    accuracy = demo.run(Options())
    assert accuracy >= 0.96
    assert last_line(capsys) == f"test accuracy: {accuracy:.3f}"


@pytest.mark.parametrize("seed", range(1, 4))
def test_accuracy_does_not_hang_on_the_seed(seed):
    assert demo.run(Options(seed=seed)) >= 0.96


@pytest.mark.filterwarnings("ignore:ccSGD is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in {*UNTRAINABLE, "optimizer"}]
)
def test_every_trainable_optimizer_reads_at_least_90_percent(name):
    assert demo.run(Options(optimizer=name)) >= 0.9


def test_every_argument_of_the_table_belongs_to_a_registered_optimizer():
    assert set(demo.ARGUMENTS) <= set(optimizer.opt_registry)


def test_double_precision_learns_as_well():
    assert demo.run(Options(dtype="float64", epochs=10)) >= 0.94


needs_ml_dtypes = pytest.mark.skipif(find_spec("ml_dtypes") is None, reason="needs ml_dtypes")
HALVES = ["float16", pytest.param("bfloat16", marks=needs_ml_dtypes)]


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_with_masters_learns_as_float32_does(dtype, capsys):
    exact, half = (demo.run(Options(dtype=name)) for name in ("float32", dtype))
    assert abs(half - exact) <= 0.005
    out = capsys.readouterr().out
    assert f"{dtype} with float32 masters, epochs 20" in out
    assert out.count("agreement with plain NumPy: yes") == 2


@needs_ml_dtypes
def test_without_masters_small_steps_are_lost_unless_rounding_is_stochastic(capsys):
    small = Options(learning_rate=1e-4, epochs=12)
    exact = demo.run(small)
    with pytest.warns(UserWarning, match="bfloat16 weights without masters lose small updates"):
        frozen = demo.run(replace(small, dtype="bfloat16", no_master=True))
    moving = demo.run(replace(small, dtype="bfloat16", rounding="stochastic"))
    assert exact >= 0.8
    assert frozen <= 0.5
    assert abs(moving - exact) <= 0.02
    out = capsys.readouterr().out
    for how in ("to nearest", "stochastically"):
        assert out.count(f"no NumPy code for adam without masters, rounded {how}") == 1


def test_bfloat16_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(Refused, match=r"pip install fastopt\[bfloat16\]"):
        demo.run(Options(dtype="bfloat16"))


def test_equal_seeds_repeat_the_run_and_others_do_not(capsys):
    options = [Options(epochs=1, seed=seed) for seed in (5, 5, 6)]
    first, again, other = (demo.run(o) for o in options)
    losses = re.findall(r"45/45 .*loss ([\d.]+)", capsys.readouterr().err)
    assert first == again
    assert losses[0] == losses[1] != losses[2]
    assert other > 0


@pytest.mark.parametrize(
    "options",
    [
        Options("sgd", epochs=2),
        Options("sgd", momentum=0.9, epochs=2),
        Options("adam", epochs=2),
        Options("Adam", dtype="float64", epochs=2),
    ],
    ids=["sgd", "momentum", "adam", "float64"],
)
def test_comparison_reports_both_times_and_that_the_weights_agree(options, capsys):
    demo.run(options)
    out = capsys.readouterr().out
    assert re.search(r"fastopt: +median +[\d.]+ us a step, [\d.]+ ms in 90 steps", out)
    assert re.search(r"plain NumPy: +median +[\d.]+ us a step, [\d.]+ ms in 90 steps", out)
    assert re.search(r"fastopt is [\d.]+ times (faster|slower) than plain NumPy", out)
    assert "agreement with plain NumPy: yes" in out
    assert re.search(r"first step: [\d.]+ s", out)


def test_comparison_says_so_when_the_rules_differ(monkeypatch, capsys):
    monkeypatch.setitem(
        plain.UPDATES,
        "adam",
        lambda opt: plain.numpy_adam(optimizer.Adam(opt.lr * 1.01)),
    )
    demo.run(Options(epochs=1))
    assert "agreement with plain NumPy: NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "word"), [(1, 3, "3.0 times faster"), (4, 1, "4.0 times slower")]
)
def test_comparison_is_worded_by_who_was_faster(ours, theirs, word, capsys):
    def runner(seconds):
        return Runner(lambda index, grad, weight: None, [np.ones(1)], [seconds])

    demo._report("adam", runner(ours), runner(theirs))
    assert f"fastopt is {word} than plain NumPy" in capsys.readouterr().out


def test_no_comparison_is_made_up_without_a_reference(capsys):
    demo.run(Options("nag", epochs=1))
    out = capsys.readouterr().out
    assert out.count("no NumPy code for nag") == 1
    assert "times faster" not in out
    assert "times slower" not in out


def test_neither_run_always_goes_first(monkeypatch):
    order = []
    monkeypatch.setattr(Runner, "step", lambda self, gradients: order.append(self))
    monkeypatch.setattr(demo, "_first_step", lambda *args: 0.0)
    monkeypatch.setattr(demo, "_report", lambda *args: None)
    demo.run(Options(epochs=1))
    ours, shadow = order[:2]
    assert ours is not shadow
    assert order[:4] == [ours, shadow, shadow, ours]


def test_progress_shows_one_bar_with_the_loss_for_each_epoch(capsys):
    demo.run(Options(epochs=2))
    captured = capsys.readouterr()
    bars = re.findall(r"epoch (\d)/2: 100%.* 45/45 .*loss (\d\.\d+)", captured.err)
    assert [epoch for epoch, _ in bars] == ["1", "2"]
    assert float(bars[1][1]) < float(bars[0][1])
    assert "epoch 1/2" not in captured.out


def test_diverging_run_says_what_to_change_and_keeps_the_last_line(capsys):
    accuracy = demo.run(Options("sgd", learning_rate=1e30, epochs=1))
    out = capsys.readouterr().out
    assert "try a smaller --learning-rate" in out
    assert "agreement with plain NumPy: unknown" in out
    assert out.splitlines()[-1] == f"test accuracy: {accuracy:.3f}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options("adum"), "Cannot find optimizer 'adum'"),
        (Options(batch_size=demo.TRAIN + 1), "--batch-size is at most 1437"),
        (Options("adam", momentum=0.9), "adam does not take momentum"),
        (Options("sgd", momentum=float("nan")), "momentum must be a finite number"),
        (Options(no_master=True), "--no-master and --rounding need --dtype float16 or bfloat16"),
        (Options(rounding="stochastic"), "need --dtype float16 or bfloat16"),
        (Options("groupadagrad"), r"index 1 \(hidden_bias\): rule group_adagrad works on rows"),
    ],
    ids=["unknown", "batch", "argument", "nan", "master", "rounding", "shape"],
)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(Refused, match=words) as caught:
        demo.run(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["sklearn.datasets", "tqdm", "matplotlib.figure"])
def test_missing_package_is_named_with_the_command_that_installs_it(missing, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Refused, match=re.escape(missing)) as caught:
        demo.run(Options(plot=tmp_path / "loss.png"))
    assert 'pip install "fastopt[demo]"' in str(caught.value)


def test_plot_is_an_image_with_a_transparent_background(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "loss.png"
    demo.run(Options(epochs=1, plot=path))
    pixels = imread(path)
    assert pixels[0, 0, 3] == 0
    assert (pixels[..., 3] == 1).any()


def test_plot_that_cannot_be_written_is_refused(tmp_path, capsys):
    with pytest.raises(Refused, match="cannot write the plot"):
        demo.run(Options(epochs=1, plot=tmp_path / "missing" / "loss.png"))
    assert last_line(capsys).startswith("test accuracy: ")
