"""The demo: a perceptron in plain NumPy learns to read digits, and its optimizer is timed."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from fastopt import optimizer, plain
from fastopt.kernels.layout import real_of
from fastopt.optimizer.base import bfloat16
from fastopt.plain import Array, Update

__all__ = ["ARGUMENTS", "Options", "Refused", "run"]

TRAIN, TEST = 1437, 360
LAYERS = ((64, 128), (128, 10))
NAMES = {0: "hidden_weight", 1: "hidden_bias", 2: "output_weight", 3: "output_bias"}

ARGUMENTS: dict[str, dict[str, float]] = {
    **{name: {"learning_rate": 0.1} for name in ("sgd", "ccsgd", "nag", "lbsgd", "dcasgd")},
    "lars": {"learning_rate": 2.0},
    "signum": {"learning_rate": 0.001},
    "lion": {"learning_rate": 0.0003},
    # The posterior that SGLD samples has the gradient of the sum over all images, not the mean.
    "sgld": {"learning_rate": 0.0001, "rescale_grad": TRAIN},
}
"""Arguments that suit this task better than the optimizer's own defaults."""


class Refused(Exception):
    """The demo cannot run as asked; the message is one line that says what to do."""


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do; None stands for what suits the optimizer."""

    optimizer: str = "adam"
    learning_rate: float | None = None
    momentum: float | None = None
    dtype: str = "float32"
    no_master: bool = False
    rounding: str = "nearest"
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    plot: Path | None = None

    @property
    def masters(self) -> bool:
        """Whether weights of half precision have float32 masters."""
        return not self.no_master and self.rounding == "nearest"


class Perceptron:
    """A hidden layer of rectified units, then a softmax over the ten digits.

    With weights of half precision it computes in float32, and rounds the gradients to halves.
    """

    def __init__(self, rng: np.random.Generator, dtype: Any) -> None:
        self.weights: list[Array] = []
        for inputs, outputs in LAYERS:
            weight = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs))
            self.weights += [weight.astype(dtype), np.zeros(outputs, dtype)]

    def forward(self, images: Array) -> tuple[Array, Array]:
        """Activations of the hidden layer, and scores of the digits."""
        w1, b1, w2, b2 = map(_widened, self.weights)
        hidden = np.maximum(images @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2

    def backward(self, images: Array, digits: Array) -> tuple[float, list[Array]]:
        """Mean cross-entropy of a batch, and its gradient with respect to each weight."""
        hidden, scores = self.forward(images)
        rows = np.arange(len(digits))
        scores -= scores.max(axis=1, keepdims=True)
        log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        delta = np.exp(log_likelihood)
        delta[rows, digits] -= 1
        delta /= len(digits)
        back = (delta @ _widened(self.weights[2]).T) * (hidden > 0)
        gradients = [images.T @ back, back.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]
        dtype = self.weights[0].dtype
        rounded = [gradient.astype(dtype, copy=False) for gradient in gradients]
        return -float(log_likelihood[rows, digits].mean()), rounded

    def accuracy(self, images: Array, digits: Array) -> float:
        """Share of the images whose digit has the highest score."""
        return float((self.forward(images)[1].argmax(axis=1) == digits).mean())


def _widened(weight: Array) -> Array:
    """The weight in the precision of the arithmetic."""
    return weight.astype(real_of(weight.dtype), copy=False)


@dataclass
class Runner:
    """An update, the weights that it changes, and the seconds that each step took."""

    update: Update
    weights: list[Array]
    seconds: list[float] = field(default_factory=list)

    def step(self, gradients: Sequence[Array]) -> None:
        """Update every weight."""
        begin = perf_counter()
        for index, weight in enumerate(self.weights):
            self.update(index, gradients[index], weight)
        self.seconds.append(perf_counter() - begin)


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the perceptron, print what was measured, and return the accuracy on test images.

    Raises
    ------
    Refused
        An option does not fit, or a package is missing.
    """
    name = options.optimizer.lower()
    dtype, form = _precision(options)
    opt = _optimizer(name, options)
    load_digits, progress = _extras(options.plot)
    rng = np.random.default_rng(options.seed)
    images, digits = load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    images, digits = (images[order] / 16).astype(real_of(dtype)), digits[order]
    model = Perceptron(rng, dtype)
    print(
        f"{name}: learning rate {opt.learning_rate:g}, {options.dtype}{form}, "
        f"epochs {options.epochs}, batch size {options.batch_size}, seed {options.seed}\n"
        f"{TRAIN} images to train and {TEST} to test; perceptron 64-128-10, "
        f"{sum(w.size for w in model.weights)} weights in {len(model.weights)} arrays",
        flush=True,
    )
    batch = slice(options.batch_size)
    seconds = _first_step(deepcopy(opt), model, images[batch], digits[batch])
    print(f"first step: {seconds:.2f} s to compile the kernels or load them from the cache")

    ours = Runner(optimizer.get_updater(opt), model.weights)
    runners = [ours]
    if name in plain.UPDATES and options.masters:
        update = plain.UPDATES[name](opt)
        update = plain.with_masters(update) if dtype.itemsize == 2 else update
        runners.append(Runner(update, [w.copy() for w in model.weights]))
    losses = _train(options, rng, progress, (images[:TRAIN], digits[:TRAIN]), model, runners)
    if not math.isfinite(losses[-1]):
        print("the loss is no longer a finite number: try a smaller --learning-rate")
    _report(name + form, *runners)
    accuracy = model.accuracy(images[TRAIN:], digits[TRAIN:])
    print(f"test accuracy: {accuracy:.3f}", flush=True)
    if options.plot:
        _draw(losses, options.plot)
    return accuracy


def _precision(options: Options) -> tuple[Any, str]:
    """Dtype of the weights, and words for how halves are kept."""
    try:
        dtype = bfloat16() if options.dtype == "bfloat16" else np.dtype(options.dtype)
    except ImportError as error:
        raise Refused(str(error)) from None
    if options.masters:
        return dtype, " with float32 masters" if dtype.itemsize == 2 else ""
    if dtype.itemsize > 2:
        raise Refused("--no-master and --rounding need --dtype float16 or bfloat16")
    how = "to nearest" if options.rounding == "nearest" else "stochastically"
    return dtype, f" without masters, rounded {how}"


def _optimizer(name: str, options: Options) -> optimizer.Optimizer:
    if options.batch_size > TRAIN:
        raise Refused(f"--batch-size is at most {TRAIN}, the number of images to train")
    given = {"learning_rate": options.learning_rate, "momentum": options.momentum}
    arguments = ARGUMENTS.get(name, {}) | {k: v for k, v in given.items() if v is not None}
    try:
        return optimizer.create(
            name,
            param_idx2name=NAMES,
            seed=options.seed,
            multi_precision=options.masters,
            rounding=options.rounding,
            **arguments,
        )
    except TypeError as error:
        raise Refused(f"{name} does not take {', '.join(arguments)}: {error}") from None
    except ValueError as error:
        raise Refused(str(error)) from None


def _extras(plot: Path | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        if plot:
            import matplotlib.figure  # noqa: F401 - missing packages are reported before training
        from sklearn.datasets import load_digits
        from tqdm import tqdm
    except ImportError as error:
        raise Refused(
            f'the demo needs another package ({error}): pip install "fastopt[demo]"'
        ) from None
    return load_digits, tqdm


def _first_step(opt: optimizer.Optimizer, model: Perceptron, images: Array, digits: Array) -> float:
    """Seconds of one step on copies, so that nothing is compiled when steps are compared."""
    runner = Runner(optimizer.get_updater(opt), [w.copy() for w in model.weights])
    try:
        runner.step(model.backward(images, digits)[1])
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    return runner.seconds[0]


def _train(
    options: Options,
    rng: np.random.Generator,
    progress: Callable[..., Any],
    data: tuple[Array, Array],
    model: Perceptron,
    runners: Sequence[Runner],
) -> list[float]:
    """Loss of each step; the runners take turns in going first."""
    images, digits = data
    starts = range(0, TRAIN, options.batch_size)
    losses: list[float] = []
    for epoch in range(1, options.epochs + 1):
        order = rng.permutation(TRAIN)
        bar = progress(starts, desc=f"epoch {epoch}/{options.epochs}", unit="batch")
        for done, start in enumerate(bar, 1):
            batch = order[start : start + options.batch_size]
            loss, gradients = model.backward(images[batch], digits[batch])
            for runner in runners[:: 1 if done % 2 else -1]:
                runner.step(gradients)
            losses.append(loss)
            bar.set_postfix_str(f"loss {fmean(losses[-done:]):.4f}", refresh=False)
    return losses


def _report(name: str, ours: Runner, shadow: Runner | None = None) -> None:
    print(f"optimizer, fastopt:     {_time(ours)}")
    if shadow is None:
        print(f"optimizer, plain NumPy: not compared, the demo has no NumPy code for {name}")
        return
    print(f"optimizer, plain NumPy: {_time(shadow)}")
    ratio = median(shadow.seconds) / median(ours.seconds)
    words = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
    print(f"by the medians, fastopt is {words} than plain NumPy")
    print(_agreement(ours.weights, shadow.weights, len(ours.seconds)))


def _time(runner: Runner) -> str:
    seconds = runner.seconds
    return (
        f"median {median(seconds) * 1e6:6.1f} us a step, "
        f"{sum(seconds) * 1e3:.1f} ms in {len(seconds)} steps"
    )


def _agreement(ours: Sequence[Array], theirs: Sequence[Array], steps: int) -> str:
    """Whether rounding explains how far apart two runs with the same gradients have ended."""
    largest = max(float(abs(weight).max()) for weight in theirs)
    difference = max(float(abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    if not math.isfinite(difference):
        return "agreement with plain NumPy: unknown, weights are no longer finite numbers"
    # Each step rounds a weight once in either run, and the state behind it a few times; that of a
    # half is rounded in its master, and once more at the end.
    dtype = ours[0].dtype
    last = float(np.spacing(dtype.type(1))) if dtype.itemsize == 2 else 0.0
    allowed = (4 * steps * float(np.finfo(real_of(dtype)).eps) + last) * largest
    return (
        f"agreement with plain NumPy: {'yes' if difference <= allowed else 'NO'}, weights differ "
        f"by {difference:.1e} at most, rounding accounts for {allowed:.1e}"
    )


def _draw(losses: Sequence[float], path: Path) -> None:
    """Write the loss curve as an image that can be read on light and on dark backgrounds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    gray = {f"{part}color": "#808080" for part in ("axes.edge", "axes.label", "xtick.", "ytick.")}
    style: dict[Any, Any] = {**gray, "savefig.transparent": True}
    with rc_context(style):
        figure = Figure(figsize=(6, 3.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(losses) + 1), losses, color="#3b8ed0", linewidth=0.8)
        axes.set(xlabel="step", ylabel="cross-entropy of the batch")
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise Refused(f"cannot write the plot: {error}") from None
