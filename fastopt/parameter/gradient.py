"""The gradient of one parameter on all of its devices, or on one CUDA device."""

import operator
from collections.abc import Callable, Sequence
from copy import copy
from functools import reduce
from itertools import compress
from typing import Any

import numpy as np

from fastopt._engine.accumulate import adding, joined_rows
from fastopt._kernels.device_memory import host, owned, snapshot, zero
from fastopt._kernels.devices import device_of, header, is_cuda
from fastopt._kernels.layout import kind_of
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

    def set(self, i: int, gradient: object) -> None:
        """Replace buffer `i`."""
        grad = self._admitted(gradient)
        self.touch(i)
        self._written[i] = True
        self._store(i, grad)

    def add(self, i: int, gradient: object, *, always: bool) -> None:
        """Add to buffer `i`; unless `always`, the first gradient of a step replaces it."""
        if not (always or self._written[i]):
            self.set(i, gradient)
            return
        grad = self._admitted(gradient)
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

    def _admitted(self, gradient: object) -> Any:
        """Convert a gradient to the dtype and storage type of the buffers.

        Raises
        ------
        TypeError, ValueError
            `gradient` does not consist of real numbers, or has another shape.
        """
        if not isinstance(gradient, list) and is_row_sparse(gradient):
            rows = as_row_sparse(gradient, self.shape)
            # Copy: the rows are kept until the step, and the caller may reuse its arrays.
            values = _as(self.dtype, host(rows.values), new=True)
            return RowSparse(values, host(rows.indices).copy(), self.shape)
        array = as_array(gradient)
        if array.shape != self.shape:
            raise ValueError(f"gradient must have shape {self.shape}, got {array.shape}")
        array = _as(self.dtype, array)
        return RowSparse.from_dense(array) if self.row_sparse else array


def _as(dtype: np.dtype[Any], values: Array, *, new: bool = False) -> Array:
    """Cast `values` to another dtype of the same kind; values out of range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(dtype, casting="same_kind", copy=new)


class DeviceGradient(Gradient):
    """Gradient with one buffer, on the CUDA device of the parameter."""

    def __init__(self, weight: Array, row_sparse: bool) -> None:
        of = header(weight)
        self.device: Any = device_of(of)
        super().__init__(tuple(of.shape), of.dtype, 1, row_sparse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with the buffers copied to the host."""
        return {**vars(self), "buffers": [self._mapped(host, buffer) for buffer in self.buffers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.buffers = [self._mapped(self._own, buffer) for buffer in self.buffers]

    def set(self, i: int, gradient: object) -> None:
        """See :meth:`Gradient.set`."""
        self._take(gradient, keep=False)

    def add(self, i: int, gradient: object, *, always: bool) -> None:
        """See :meth:`Gradient.add`."""
        self._take(gradient, keep=always or self._written[i])

    def _take(self, gradient: object, keep: bool) -> None:
        grad = self._admitted(gradient)
        buffer, rows = self.buffers[0], isinstance(grad, RowSparse)
        if self.row_sparse:
            if keep:
                grad = joined_rows("gradient", [buffer, grad], self.dtype)
            self.buffers[0] = grad
        else:
            table = adding("gradient", buffer, grad, keep or rows)
            if rows and not keep:
                self.zero()
            table.run()
        self.touch(0)
        self._written[0] = True

    def zero(self) -> None:
        """See :meth:`Gradient.zero`."""
        if self.row_sparse:
            self.buffers[0] = self._zeros()
        else:
            zero(self.buffers[0], 0)  # on the stream of all its work

    def _cast(self, array: Array, dtype: np.dtype[Any]) -> Any:
        return self._own(super()._cast(host(array), dtype))

    def _mapped(self, function: Callable[[Any], Any], buffer: Array | RowSparse) -> Any:
        """Apply a function to the arrays of a buffer."""
        if isinstance(buffer, RowSparse):
            return RowSparse(function(buffer.values), function(buffer.indices), buffer.shape)
        return function(buffer)

    def _own(self, array: Array) -> Any:
        """Copy a NumPy array to the device."""
        return owned(array, self.device)

    def _zeros(self) -> Any:
        return self._mapped(self._own, super()._zeros())

    def _admitted(self, gradient: object) -> Any:
        """Return the gradient on the device; rows are copied, as they are kept until the step."""
        if kind_of(self.dtype) is None:
            raise TypeError(f"{self.dtype} has no gradients on a CUDA device")
        if not isinstance(gradient, list) and is_row_sparse(gradient):
            rows = as_row_sparse(gradient, self.shape)
            if is_cuda(rows.values) and rows.dtype == self.dtype:
                parts = rows.values, rows.indices
                values, indices = (
                    snapshot(header(part)) if is_cuda(part) else part.copy() for part in parts
                )
                return RowSparse(values, indices, self.shape)
            values = _as(self.dtype, host(rows.values))
            return self._mapped(self._own, RowSparse(values, host(rows.indices), self.shape))
        array = header(gradient) if is_cuda(gradient) else as_array(gradient)
        if array.shape != self.shape:
            raise ValueError(f"gradient must have shape {self.shape}, got {array.shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(f"gradient must be of the kind of {self.dtype}, got {array.dtype}")
        if self.row_sparse:
            return self._admitted(RowSparse.from_dense(np.array(host(gradient), self.dtype)))
        if is_cuda(gradient) and kind_of(array.dtype):
            return gradient
        with np.errstate(over="ignore"):
            return self._own(np.array(host(gradient), self.dtype, order="C"))
