"""The gradient of one parameter on all of its devices."""

import operator
from collections.abc import Sequence
from copy import copy
from functools import reduce
from itertools import compress
from typing import Any

import numpy as np

from fastopt._kernels.device_memory import host
from fastopt.parameter.checks import Array, Shape, as_array
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse


class Gradient:
    """Gradient buffers, one for each device, and which of them are fresh in the current step.

    A dense buffer is written in place; a row-sparse buffer is replaced by each change.
    """

    def __init__(self, shape: Shape, dtype: np.dtype[Any], devices: int, row_sparse: bool) -> None:
        self.shape, self.dtype, self.row_sparse = shape, dtype, row_sparse
        self.buffers = [self._zeros() for _ in range(devices)]
        self.finish()

    def finish(self) -> None:
        """Start a new step: mark all buffers as stale; the next gradient replaces them."""
        self.fresh = [False] * len(self.buffers)
        self._written = [False] * len(self.buffers)
        self._summed = False

    @staticmethod
    def finish_all(gradients: "Sequence[Gradient]") -> None:
        """Call :meth:`finish` for several gradients."""
        for gradient in gradients:
            if type(gradient) is Gradient:
                stale = [False] * len(gradient.buffers)
                gradient.fresh, gradient._written, gradient._summed = stale, stale.copy(), False
            else:
                gradient.finish()

    def touch(self, i: int) -> Any:
        """Return buffer `i` for writing and mark it as fresh."""
        self.fresh[i], self._summed = True, False
        return self.buffers[i]

    def set(self, i: int, given: object) -> None:
        """Replace buffer `i`."""
        grad = self._admitted(given)
        self.touch(i)
        self._written[i] = True
        self._store(i, grad)

    def add(self, i: int, given: object, *, always: bool) -> None:
        """Add to buffer `i`; unless `always`, the first gradient of a step replaces it."""
        if not (always or self._written[i]):
            self.set(i, given)
            return
        grad = self._admitted(given)
        self.touch(i)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow shows as infinities and NaN
            if isinstance(grad, np.ndarray):
                self.buffers[i] += grad
            elif self.row_sparse:
                self.buffers[i] = self.buffers[i] + grad
            else:
                summed = grad.coalesce()
                self.buffers[i][summed.indices] += summed.values

    def zero(self) -> None:
        """Set all buffers to zero."""
        self._summed = False
        for i, buffer in enumerate(self.buffers):
            if self.row_sparse:
                self.buffers[i] = self._zeros()
            else:
                buffer.fill(0)

    def allreduce(self) -> None:
        """Store the sum of the fresh buffers, in order, in all buffers; at most once per step."""
        fresh = list(compress(self.buffers, self.fresh))
        if len(self.buffers) == 1 or not fresh or self._summed:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            total = reduce(operator.add, fresh)
        for i in range(len(self.buffers)):
            self._store(i, total)
        self._summed = True

    def cast(self, dtype: np.dtype[Any]) -> "Gradient":
        """Return the same gradient with buffers of another dtype."""
        converted = copy(self)
        converted.dtype = dtype
        converted.buffers = [
            RowSparse(self._cast(buffer.values, dtype), buffer.indices, buffer.shape)
            if self.row_sparse
            else self._cast(buffer, dtype)
            for buffer in self.buffers
        ]
        return converted

    def _cast(self, array: Array, dtype: np.dtype[Any]) -> Any:
        """Convert an array to another dtype; values out of range become infinite."""
        with np.errstate(over="ignore"):
            return array.astype(dtype)

    def _zeros(self) -> Any:
        if not self.row_sparse:
            return np.zeros(self.shape, self.dtype)
        none = np.zeros((0, *self.shape[1:]), self.dtype)
        return RowSparse(none, np.zeros(0, np.int64), self.shape)

    def _store(self, i: int, grad: Array | RowSparse) -> None:
        if self.row_sparse:
            self.buffers[i] = grad
        elif isinstance(grad, RowSparse):
            self.buffers[i][...] = grad.to_dense()
        else:
            self.buffers[i][...] = grad

    def _admitted(self, given: object) -> Any:
        """Convert a gradient to the dtype and storage type of the buffers.

        Raises
        ------
        TypeError, ValueError
            `given` does not consist of real numbers, or has another shape.
        """
        if not isinstance(given, list) and is_row_sparse(given):
            rows = as_row_sparse(given, self.shape)
            # Copy: the rows are kept until the step, and the caller may reuse its arrays.
            values = _as(self.dtype, host(rows.values), new=True)
            return RowSparse(values, host(rows.indices).copy(), self.shape)
        array = as_array(given)
        if array.shape != self.shape:
            raise ValueError(f"gradient must have shape {self.shape}, got {array.shape}")
        array = _as(self.dtype, array)
        return RowSparse.from_dense(array) if self.row_sparse else array


def _as(dtype: np.dtype[Any], values: Array, *, new: bool = False) -> Array:
    """Cast `values` to another dtype of the same kind; values out of range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(dtype, casting="same_kind", copy=new)
