"""Updates in plain NumPy, the baseline of comparisons and benchmarks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import optimizer

__all__ = ["UPDATES", "numpy_adam", "numpy_sgd", "with_masters"]

Array = NDArray[Any]
Update = Callable[[int, Array, Array], None]


def numpy_sgd(opt: optimizer.SGD) -> Update:
    """Return an SGD update in plain NumPy, with or without momentum."""
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
    """Return an Adam update in plain NumPy."""
    lr, beta1, beta2, epsilon = opt.learning_rate, opt.beta1, opt.beta2, opt.epsilon
    moments: dict[int, tuple[Array, Array]] = {}
    counts: dict[int, int] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if index not in moments:
            moments[index] = np.zeros_like(weight), np.zeros_like(weight)
        t = counts[index] = counts.get(index, 0) + 1
        mean, var = moments[index]
        mean *= beta1
        mean += (1 - beta1) * grad
        var *= beta2
        var += (1 - beta2) * grad * grad
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        weight -= rate * mean / (np.sqrt(var) + epsilon)

    return update


def with_masters(update: Update) -> Update:
    """Apply an update to float32 masters of half-precision weights, with casts around it."""
    masters: dict[int, Array] = {}

    def cast(index: int, grad: Array, weight: Array) -> None:
        if index not in masters:
            masters[index] = weight.astype(np.float32)
        update(index, grad.astype(np.float32), masters[index])
        weight[...] = masters[index]

    return cast


UPDATES: dict[str, Callable[[Any], Update]] = {
    "sgd": numpy_sgd,
    "ccsgd": numpy_sgd,
    "adam": numpy_adam,
}
"""Functions that create an update from an optimizer, by the optimizer's name."""
