"""Updates on warm memory, the memory-bandwidth limit of each, and the same in plain NumPy."""

import math
from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import traffic

Array = NDArray[Any]
Update = Callable[[int, Array, Array], None]

MOMENTUM = 0.9
"""Momentum for optimizers whose default has none."""


def draw(shape: int | tuple[int, ...]) -> tuple[Array, Array]:
    """Draw a float32 weight and gradient from a normal distribution."""
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def momentum_of(name: str) -> dict[str, Any]:
    """Return arguments that enable momentum in a registered optimizer, if it has any.

    Examples
    --------
    >>> from fastopt.bench.steps import momentum_of
    >>> momentum_of("sgd"), momentum_of("adam")
    ({'momentum': 0.9}, {})
    """
    return {"momentum": MOMENTUM} if hasattr(optimizer.create(name), "momentum") else {}


class Step:
    """An update of one float32 weight, compiled and with all memory touched.

    Parameters
    ----------
    name : str
        Registered name of the optimizer.
    shape : int or tuple of int
        Shape of the weight.
    arrays : tuple of numpy.ndarray, optional
        Weight and gradient of this shape. Default: the result of :func:`draw`.
    **kwargs
        Arguments of the optimizer.
    """

    def __init__(
        self,
        name: str,
        shape: int | tuple[int, ...],
        arrays: tuple[Array, Array] | None = None,
        **kwargs: Any,
    ) -> None:
        self.weight, self.grad = arrays or draw(shape)
        self.updater = optimizer.get_updater(optimizer.create(name, **kwargs))
        self()
        moved = (self.weight, self.grad, *leaves(self.updater.states[0]))
        self._arrays = tuple(array.reshape(-1) for array in moved)
        rule = self.updater.optimizer.rule
        reads = rule.reads if rule else ()
        self._passes = [tuple(compress(self._arrays, read)) for read in reads]

    def __call__(self) -> None:
        """Do the update."""
        self.updater(0, self.grad, self.weight)

    def limit(self) -> None:
        """Read and write the same memory as the update, without computing.

        Weight, gradient and state are read, and all but the gradient are written; each reduction
        of the rule reads its inputs once more.
        """
        for arrays in self._passes:
            traffic.read(arrays)
        traffic.write(self._arrays)


def _sgd(opt: optimizer.SGD) -> Update:
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


def _adam(opt: optimizer.Adam) -> Update:
    lr, beta1, beta2, epsilon = opt.learning_rate, opt.beta1, opt.beta2, opt.epsilon
    states: dict[int, tuple[int, Array, Array]] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if index not in states:
            states[index] = 0, np.zeros_like(weight), np.zeros_like(weight)
        t, mean, var = states[index]
        t += 1
        states[index] = t, mean, var
        mean *= beta1
        mean += (1 - beta1) * grad
        var *= beta2
        var += (1 - beta2) * grad * grad
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        weight -= rate * mean / (np.sqrt(var) + epsilon)

    return update


PLAIN: dict[str, Callable[[Any], Update]] = {"adam": _adam, "sgd": _sgd, "ccsgd": _sgd}
"""Functions that create an update in plain NumPy from an optimizer, by its name.

Clipping, rescaling and weight decay, which are off by default, are omitted.
"""
