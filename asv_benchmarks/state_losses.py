"""Losses of Adam with compressed state, relative to float32, on small models in NumPy.

Prints the table of ``docs/8-bit-state.md``: means over seeds, with standard errors. All states are
compressed, those of biases and of small weights too.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from statistics import fmean, stdev
from typing import Any

from workloads import Characters, Digits, Factorization, Model, Words, nearest_words

import fastopt
from fastopt.demo import digits
from fastopt.optimizer import Adam, Optimizer

STATES = (None, "bfloat16", "int8")
Loss = Callable[[Optimizer, int], float]


class WideFactorization(Factorization):
    """Factors of 16 numbers, the shortest rows whose state can be in 8 bits."""

    SIZE = 16


def adam(state: Any, rate: float) -> Optimizer:
    return Adam(learning_rate=rate, state_dtype=state, state_min_size=1)


def held_out(kind: Callable[[int], Model], steps: int, opt: Optimizer, seed: int) -> float:
    """Return the loss on held-out data after training."""
    model = kind(seed)
    updater = fastopt.Updater(opt)
    indices = [*range(len(model.weights))]
    for grads in islice(model.steps(), steps):
        updater(indices, grads, model.weights)
    return model.held_out()


def digits_demo(opt: Optimizer, seed: int) -> float:
    """Return the loss of the last epoch of ``fastopt demo``, for its first network."""
    run = digits.Run(digits.Options(seed=seed), digits.NETWORKS[0], opt)
    run.train()
    return fmean(run.losses[-1])


def word_vectors(opt: Optimizer, seed: int) -> float:
    """Return the loss of the last epoch of ``docs/examples/nearest_words.py``."""
    return nearest_words.train(opt, seed)[1][-1]


MODELS: dict[str, tuple[Loss, float, int]] = {
    # words: (loss, learning rate, number of seeds)
    "`fastopt demo`: digits": (digits_demo, 0.001, 12),
    "word vectors, row-sparse gradients": (word_vectors, 0.002, 3),
    "perceptron of two hidden layers, digits": (partial(held_out, Digits, 300), 0.003, 12),
    "characters after eight characters": (partial(held_out, Characters, 2000), 0.003, 12),
    "matrix factorization": (partial(held_out, WideFactorization, 1000), 0.01, 12),
    "word vectors, dense gradients": (partial(held_out, Words, 500), 0.01, 12),
}


def main(*chosen: str) -> None:
    """Print a row for each model whose description contains one of the words, or for all."""
    print("| model | float32 | bfloat16 / float32 | 8 bits / float32 |\n|---|---|---|---|")
    for words, (loss, rate, seeds) in MODELS.items():
        if chosen and not any(word in words for word in chosen):
            continue
        exact, *others = (
            [loss(adam(state, rate), seed) for seed in range(seeds)] for state in STATES
        )
        cells = [ratio(found, exact) for found in others]
        print(f"| {words} | {fmean(exact):.4f} | {' | '.join(cells)} |", flush=True)


def ratio(losses: Sequence[float], exact: Sequence[float]) -> str:
    """Return the mean ratio of losses, and its standard error, as text."""
    ratios = [one / other for one, other in zip(losses, exact, strict=True)]
    return f"{fmean(ratios):.3f} ± {stdev(ratios) / len(ratios) ** 0.5:.3f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
