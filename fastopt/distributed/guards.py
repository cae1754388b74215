"""Compiled check that a call has the arrays of a plan, with gradients that match them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fastopt._engine.overlap import Addresses, Ranges
from fastopt._kernels import cpu_calls
from fastopt._kernels.compiling import bind
from fastopt._kernels.numpy_abi import guard


@cache
def comparer() -> Any:
    """Compiled :func:`fastopt._kernels.cpu_calls.fit`."""
    return bind(cpu_calls.fit(), 0, 0, np.empty((2, 0, 0), np.uint64), np.empty((2, 0), np.int64))


class Guards:
    """Expected properties of the arrays of a list call, which one compiled function compares.

    Weights are C-contiguous. Gradients fit if they are NumPy arrays with the shapes and dtypes of
    their weights, aligned and C-contiguous, and share no memory with any weight.

    Parameters
    ----------
    weights : sequence of numpy.ndarray
        Weights of the call.
    written : Ranges
        Memory of the weights.
    """

    def __init__(self, weights: Sequence[Any], written: Ranges) -> None:
        self._count, self._written = len(weights), written
        self._at = np.array([weight.ctypes.data for weight in weights], np.int64).tobytes()
        self._bytes = np.array([weight.nbytes for weight in weights], np.int64)
        forms = [[guard((weight,), 1)[0] for weight in weights]]
        forms += [[guard((np.asarray(weight),), 0)[0] for weight in weights]]
        self._guards = np.zeros((2, len(weights), max(map(len, forms[0]))), np.uint64)
        for guards, rows in zip(self._guards, forms, strict=True):
            for own, row in zip(guards, rows, strict=True):
                own[: len(row)] = row
        self._clear = b""

    def fit(self, grads: list[Any], weights: list[Any]) -> Addresses | None:
        """Addresses of the gradients if they match the weights, which are those of the plan.

        Otherwise None. Weights must also be in the same memory.
        """
        if not (type(grads) is type(weights) is list):
            grads, weights = [*grads], [*weights]
        if not len(grads) == len(weights) == self._count:
            return None
        found = np.empty((2, self._count), np.int64)
        if not comparer()(id(weights), id(grads), self._guards, found):
            return None
        first, at = found[0].tobytes(), found[1].tobytes()
        if first != self._at:
            return None
        grads_at: Addresses = found[1]
        if at != self._clear and self._written.meeting(grads_at, grads_at + self._bytes):
            return None
        self._clear = at
        return grads_at
