"""Updates on warm memory, and the memory-bandwidth limit of each."""

from itertools import compress
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import traffic
from fastopt.bench.clock import against
from fastopt.reference import Array

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


def against_limit(step: Step, rounds: int = 15) -> tuple[float, float]:
    """Return :func:`~fastopt.bench.clock.against` for a step and the limit of its arrays."""
    return against(step.limit, step, rounds)
