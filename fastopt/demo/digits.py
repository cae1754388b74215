"""The demo of dense updates: a perceptron learns to read digits, and its optimizer is timed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from fastopt import optimizer, plain
from fastopt.demo import common
from fastopt.demo.common import Refused, Runner
from fastopt.plain import Array

__all__ = ["ARGUMENTS", "Options", "run"]

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


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do; None stands for what suits the optimizer."""

    optimizer: str = "adam"
    learning_rate: float | None = None
    momentum: float | None = None
    dtype: str = "float32"
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    plot: Path | None = None


class Perceptron:
    """A hidden layer of rectified units, then a softmax over the ten digits."""

    def __init__(self, rng: np.random.Generator, dtype: str) -> None:
        self.weights: list[Array] = []
        for inputs, outputs in LAYERS:
            weight = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs))
            self.weights += [weight.astype(dtype), np.zeros(outputs, dtype)]

    def forward(self, images: Array) -> tuple[Array, Array]:
        """Activations of the hidden layer, and scores of the digits."""
        w1, b1, w2, b2 = self.weights
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
        back = (delta @ self.weights[2].T) * (hidden > 0)
        gradients = [images.T @ back, back.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]
        return -float(log_likelihood[rows, digits].mean()), gradients

    def accuracy(self, images: Array, digits: Array) -> float:
        """Share of the images whose digit has the highest score."""
        return float((self.forward(images)[1].argmax(axis=1) == digits).mean())


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the perceptron, print what was measured, and return the accuracy on test images.

    Raises
    ------
    Refused
        An option does not fit, or a package is missing.
    """
    name = options.optimizer.lower()
    opt = _optimizer(name, options)
    datasets, progress = common.need("sklearn.datasets", "tqdm", plot=options.plot)
    rng = np.random.default_rng(options.seed)
    images, digits = datasets.load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    images, digits = (images[order] / 16).astype(options.dtype), digits[order]
    model = Perceptron(rng, options.dtype)
    print(common.heading(name, opt, options))
    print(
        f"{TRAIN} images to train and {TEST} to test; perceptron 64-128-10, "
        f"{sum(w.size for w in model.weights)} weights in {len(model.weights)} arrays",
        flush=True,
    )
    batch = slice(options.batch_size)
    print(common.first_step(opt, model.weights, model.backward(images[batch], digits[batch])[1]))

    ours = Runner(optimizer.get_updater(opt), model.weights)
    runners = [ours]
    if name in plain.UPDATES:
        runners.append(Runner(plain.UPDATES[name](opt), [w.copy() for w in model.weights]))

    def epoch() -> tuple[int, Iterator[tuple[float, list[Array]]]]:
        batches = common.chunks(rng.permutation(TRAIN), options.batch_size)
        return len(batches), (model.backward(images[batch], digits[batch]) for batch in batches)

    losses = common.train(options.epochs, epoch, runners, progress.tqdm)
    _report(name, *runners)
    accuracy = model.accuracy(images[TRAIN:], digits[TRAIN:])
    print(f"test accuracy: {accuracy:.3f}", flush=True)
    if options.plot:
        common.draw(losses, "cross-entropy of the batch", options.plot)
    return accuracy


def _optimizer(name: str, options: Options) -> optimizer.Optimizer:
    if options.batch_size > TRAIN:
        raise Refused(f"--batch-size is at most {TRAIN}, the number of images to train")
    given = {"learning_rate": options.learning_rate, "momentum": options.momentum}
    suited = ARGUMENTS.get(name, {})
    return common.create(name, suited, given, param_idx2name=NAMES, seed=options.seed)


def _report(name: str, ours: Runner, shadow: Runner | None = None) -> None:
    print(f"optimizer, fastopt:     {common.summary(ours.seconds)}")
    if shadow is None:
        print(f"optimizer, plain NumPy: not compared, the demo has no NumPy code for {name}")
        return
    print(f"optimizer, plain NumPy: {common.summary(shadow.seconds)}")
    words = common.faster(median(ours.seconds), median(shadow.seconds))
    print(f"by the medians, fastopt is {words} than plain NumPy")
    print(common.agreement("plain NumPy", ours, shadow))
