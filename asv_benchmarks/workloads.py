"""Four small models in NumPy for the comparison of optimizers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fastopt.sparse import RowSparse

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))

import nearest_words

__all__ = ["WORKLOADS", "Model", "Workload"]

Array = np.ndarray[Any, Any]
Gradients = tuple[float, list[Array]]


class Model(Protocol):
    """Weights with a loss and its gradients."""

    names: Sequence[str]
    weights: list[Array]

    def steps(self) -> Iterator[list[Array]]:
        """Yield gradients batch by batch, at the current weights."""

    def held_out(self) -> float:
        """Return the loss on held-out data."""


@dataclass(frozen=True)
class Workload:
    """A model, a description of it and its loss, and the number of steps of a run."""

    words: str
    start: Callable[[int], Model]
    steps: int


def cross_entropy(scores: Array, classes: Array) -> tuple[float, Array]:
    """Return the mean cross-entropy and its gradient with respect to the scores."""
    scores = scores - scores.max(axis=1, keepdims=True)
    log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(classes))
    grad = np.exp(log_likelihood)
    grad[rows, classes] -= 1
    return -float(log_likelihood[rows, classes].mean()), grad / np.float32(len(classes))


class Network:
    """Fully connected layers with ReLU, a weight and a bias for each."""

    def __init__(self, rng: np.random.Generator, sizes: Sequence[int]) -> None:
        self.names, self.weights = [], []
        last = len(sizes) - 2
        for k, (inputs, outputs) in enumerate(pairwise(sizes)):
            name = "output" if k == last else f"hidden{k}"
            scale = np.sqrt(2 / inputs)
            self.names += [f"{name}_weight", f"{name}_bias"]
            self.weights += [
                (rng.standard_normal((outputs, inputs)) * scale).astype(np.float32),
                np.zeros(outputs, np.float32),
            ]

    def forward(self, x: Array) -> tuple[Array, list[Array]]:
        """Return the scores and the inputs of each layer."""
        inputs = [x]
        for weight, bias in zip(self.weights[:-2:2], self.weights[1:-2:2], strict=True):
            inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
        return inputs[-1] @ self.weights[-2].T + self.weights[-1], inputs

    def backward(self, x: Array, classes: Array) -> tuple[list[Array], Array]:
        """Return the gradients of the weights, and the gradient of the inputs."""
        scores, inputs = self.forward(x)
        _, grad = cross_entropy(scores, classes)
        found: list[Array] = []
        for k in range(len(inputs) - 1, -1, -1):
            found = [grad.T @ inputs[k], grad.sum(axis=0), *found]
            grad = grad @ self.weights[2 * k]
            if k:
                grad *= inputs[k] > 0
        return found, grad


class Digits:
    """A perceptron with two hidden layers that classifies the digits of scikit-learn."""

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(digits))
        images, digits = (images[order] / 16).astype(np.float32), digits[order]
        self.train, self.test = (images[:1437], digits[:1437]), (images[1437:], digits[1437:])
        self.rng = np.random.default_rng(seed)
        self.network = Network(self.rng, (64, 64, 64, 10))
        self.names, self.weights = self.network.names, self.network.weights

    def steps(self) -> Iterator[list[Array]]:
        images, digits = self.train
        while True:
            batch = self.rng.integers(0, len(digits), 64)
            yield self.network.backward(images[batch], digits[batch])[0]

    def held_out(self) -> float:
        return cross_entropy(self.network.forward(self.test[0])[0], self.test[1])[0]


def text() -> str:
    """Return the text of the reference pages of Python's ``help``."""
    from pydoc_data.topics import topics

    return " ".join(" ".join(topics[name].split()) for name in sorted(topics)).lower()


class Characters:
    """A network with two hidden layers that predicts a character from the eight before it."""

    CONTEXT, SIZE, BATCH, LENGTH, KNOWN = 8, 16, 64, 200_000, 48

    def __init__(self, seed: int) -> None:
        codes = np.frombuffer(text()[: self.LENGTH].encode("ascii", "replace"), np.uint8)
        common = np.argsort(-np.bincount(codes, minlength=256), kind="stable")[: self.KNOWN - 1]
        numbers = np.full(256, self.KNOWN - 1)
        numbers[common] = np.arange(len(common))
        windows = np.lib.stride_tricks.sliding_window_view(numbers[codes], self.CONTEXT + 1)
        cut = len(windows) * 9 // 10
        self.train = windows[:cut]
        self.test = windows[cut + self.CONTEXT :][:: (len(windows) - cut) // 512]
        self.rng = np.random.default_rng(seed)
        sizes = (self.CONTEXT * self.SIZE, 96, 96, self.KNOWN)
        self.network = Network(self.rng, sizes)
        embed = self.rng.standard_normal((self.KNOWN, self.SIZE)).astype(np.float32)
        self.names = ["embed_weight", *self.network.names]
        self.weights = [embed, *self.network.weights]

    def _inputs(self, windows: Array) -> Array:
        return self.weights[0][windows[:, :-1]].reshape(len(windows), -1)

    def steps(self) -> Iterator[list[Array]]:
        while True:
            windows = self.train[self.rng.integers(0, len(self.train), self.BATCH)]
            found, grad = self.network.backward(self._inputs(windows), windows[:, -1])
            embed = np.zeros_like(self.weights[0])
            np.add.at(embed, windows[:, :-1].ravel(), grad.reshape(-1, self.SIZE))
            yield [embed, *found]

    def held_out(self) -> float:
        scores, _ = self.network.forward(self._inputs(self.test))
        return cross_entropy(scores, self.test[:, -1])[0]


class Factorization:
    """Factorization of a noisy matrix of which a third is known."""

    USERS, ITEMS, RANK, SIZE, BATCH, NOISE = 300, 200, 4, 8, 512, 0.3

    def __init__(self, seed: int) -> None:
        data = np.random.default_rng(0)
        shape = self.USERS, self.ITEMS
        left, right = (data.standard_normal((n, self.RANK)) for n in shape)
        known = data.permutation(self.USERS * self.ITEMS)[: self.USERS * self.ITEMS // 3]
        self.pairs = np.stack(np.unravel_index(known, shape))
        clean = (left[self.pairs[0]] * right[self.pairs[1]]).sum(axis=1) / np.sqrt(self.RANK)
        self.values = clean + self.NOISE * data.standard_normal(len(known))
        self.values = self.values.astype(np.float32)
        self.cut = len(known) * 9 // 10
        self.rng = np.random.default_rng(seed)
        self.names = ["users", "items"]
        self.weights = [
            (0.3 * self.rng.standard_normal((n, self.SIZE))).astype(np.float32) for n in shape
        ]

    def steps(self) -> Iterator[list[Array]]:
        while True:
            batch = self.rng.integers(0, self.cut, self.BATCH)
            found = [np.zeros_like(weight) for weight in self.weights]
            users, items = self.pairs[:, batch]
            u, v = self.weights[0][users], self.weights[1][items]
            slope = ((u * v).sum(axis=1) - self.values[batch])[:, np.newaxis]
            slope *= np.float32(2 / self.BATCH)
            np.add.at(found[0], users, slope * v)
            np.add.at(found[1], items, slope * u)
            yield found

    def held_out(self) -> float:
        users, items = self.pairs[:, self.cut :]
        scores = (self.weights[0][users] * self.weights[1][items]).sum(axis=1)
        return float(np.square(scores - self.values[self.cut :]).mean())


class Words:
    """Skip-gram word vectors, which distinguish a word's neighbours from random words."""

    SIZE, NEGATIVES, BATCH, LEAST = 32, 5, 128, 15

    def __init__(self, seed: int) -> None:
        _, counts, tokens = nearest_words.vocabulary(text(), self.LEAST)
        found = nearest_words.pairs(counts, tokens, np.random.default_rng(0), 5, 3e-4)
        self.train, self.test = found[1024:], found[:1024]
        self.rng = np.random.default_rng(seed)
        self.model = nearest_words.SkipGram(self.rng, counts, self.SIZE)
        self.names, self.weights = ["words", "contexts"], self.model.weights

    def steps(self) -> Iterator[list[Array]]:
        while True:
            batch = self.train[self.rng.integers(0, len(self.train), self.BATCH)]
            _, found = self.model.gradients(batch, self.NEGATIVES, self.rng)
            sparse = [RowSparse(*g, w.shape) for g, w in zip(found, self.weights, strict=True)]
            yield [gradient.to_dense() / np.float32(self.BATCH) for gradient in sparse]

    def held_out(self) -> float:
        loss, _ = self.model.gradients(self.test, self.NEGATIVES, np.random.default_rng(0))
        return loss


WORKLOADS = {
    "digits": Workload("a perceptron reads digits; cross-entropy", Digits, 300),
    "characters": Workload("a network predicts characters; cross-entropy", Characters, 400),
    "factors": Workload("factors of a matrix; mean square", Factorization, 300),
    "words": Workload("vectors of words; loss of a pair", Words, 300),
}
"""Workloads by name in the table."""
