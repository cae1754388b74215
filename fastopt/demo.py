"""The demo: a perceptron in plain NumPy learns to read digits, and its optimizer is timed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import optimizer

__all__ = ["ARGUMENTS", "Refused", "run"]

Array = NDArray[Any]
Update = Callable[[int, Array, Array], None]

HIDDEN = 128
TRAIN, TEST = 1437, 360
NAMES = {0: "hidden_weight", 1: "hidden_bias", 2: "output_weight", 3: "output_bias"}

ARGUMENTS: dict[str, dict[str, float]] = {
}
"""Arguments under which an optimizer learns this task where its own defaults do not suit it."""


class Refused(Exception):
    """The demo cannot run as asked; the message is one line that says what to do."""


class Perceptron:
    """A hidden layer of rectified units, and a softmax over the ten digits."""

    def __init__(self, rng: np.random.Generator, dtype: str) -> None:
        layers = ((64, HIDDEN), (HIDDEN, 10))
        self.weights: list[Array] = []
        for inputs, outputs in layers:
            weight = rng.normal(0, math.sqrt(2 / inputs), (inputs, outputs))
            self.weights += [weight.astype(dtype), np.zeros(outputs, dtype)]

    def forward(self, images: Array) -> tuple[Array, Array]:
        """Activations of the hidden layer, and the scores of the digits."""
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


def numpy_sgd(opt: optimizer.SGD) -> Update:
    """The rule of SGD, with or without momentum, in plain NumPy."""
    lr, momentum = opt.learning_rate, opt.momentum
    moments: dict[int, Array] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if momentum == 0:
            weight -= lr * grad
            return
        if index not in moments:
            moments[index] = np.zeros_like(weight)
        mom = moments[index]
        mom *= momentum
        mom -= lr * grad
        weight += mom

    return update


def numpy_adam(opt: optimizer.Adam) -> Update:
    """The rule of Adam in plain NumPy."""
    lr, beta1, beta2, epsilon = opt.learning_rate, opt.beta1, opt.beta2, opt.epsilon
    moments: dict[int, tuple[Array, Array]] = {}
    counts = dict.fromkeys(NAMES, 0)

    def update(index: int, grad: Array, weight: Array) -> None:
        if index not in moments:
            moments[index] = np.zeros_like(weight), np.zeros_like(weight)
        counts[index] += 1
        t, (mean, var) = counts[index], moments[index]
        mean *= beta1
        mean += (1 - beta1) * grad
        var *= beta2
        var += (1 - beta2) * grad * grad
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        weight -= rate * mean / (np.sqrt(var) + epsilon)

    return update


REFERENCES: dict[type[optimizer.Optimizer], Callable[[Any], Update]] = {
    optimizer.SGD: numpy_sgd,
    optimizer.Adam: numpy_adam,
}


@dataclass
class Runner:
    """An update with the weights that it changes and the seconds that each step took."""

    update: Update
    weights: list[Array]
    seconds: list[float] = field(default_factory=list)

    def step(self, gradients: Sequence[Array]) -> None:
        """Update every weight."""
        begin = perf_counter()
        for index, weight in enumerate(self.weights):
            self.update(index, gradients[index], weight)
        self.seconds.append(perf_counter() - begin)


