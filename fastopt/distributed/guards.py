"""Compiled check that a call has the arrays of a plan, with gradients that match them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fastopt._engine.overlap import Addresses, Ranges
from fastopt._kernels import cpu_calls
from fastopt._kernels.compiling import bind
from fastopt._kernels.numpy_abi import FITS, TYPES, guard


@cache
def comparer() -> Any:
    """Compiled :func:`fastopt._kernels.numpy_abi.admit`."""
    table, guards = np.empty((0, 2), np.uint64), np.empty((0, 2, 0), np.uint64)
    return bind(cpu_calls.admit(), table, guards, table, TYPES, TYPES, 0)


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
        length = len(weights)
        self._table = np.zeros((length, 2), np.uint64)
        self._table[:, 0] = [weight.ctypes.data for weight in weights]
        each = [guard((weight, np.asarray(weight)), 1) for weight in weights]
        guards = np.zeros((length, 2, max(rows.shape[1] for rows in each)), np.uint64)
        for own, rows in zip(guards, each, strict=True):
            own[:, : rows.shape[1]] = rows
        memory = np.stack([written.first, written.last]).astype(np.uint64)
        ids = np.array([id(weight) for weight in weights], np.uint64)
        self._arguments = self._table, guards, memory, ids, TYPES

    def fit(self, indices: list[Any], grads: list[Any], weights: list[Any]) -> Addresses | None:
        """Addresses of the gradients if they match the weights, which are those of the plan.

        Otherwise None. Weights must also be in the same memory.
        """
        objects = indices, grads, weights
        if comparer()(*self._arguments, id(objects)) != FITS:
            return None
        return self._table[:, -1].astype(np.int64)
