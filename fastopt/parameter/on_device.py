"""The gradient of a parameter on a CUDA device."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fastopt._engine.accumulate import adding, joined_rows
from fastopt._kernels.device_memory import host, owned, snapshot, zero
from fastopt._kernels.devices import device_of, header, is_cuda
from fastopt._kernels.layout import kind_of
from fastopt.parameter.checks import Array, as_array
from fastopt.parameter.gradient import Gradient
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse


class DeviceGradient(Gradient):
    """Gradient with one buffer, on the CUDA device of the parameter."""

    def __init__(self, weight: Array, row_sparse: bool) -> None:
        of = header(weight)
        self.device: Any = device_of(of)
        super().__init__(tuple(of.shape), of.dtype, 1, row_sparse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with the buffers copied to the host."""
        return {**vars(self), "buffers": [self._mapped(host, each) for each in self.buffers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.buffers = [self._mapped(self._own, each) for each in self.buffers]

    def set(self, i: int, given: object) -> None:
        """See :meth:`Gradient.set`."""
        self._take(given, keep=False)

    def add(self, i: int, given: object, *, always: bool) -> None:
        """See :meth:`Gradient.add`."""
        self._take(given, keep=always or self._written[i])

    def _take(self, given: object, keep: bool) -> None:
        grad = self._admitted(given)
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

    def _admitted(self, given: object) -> Any:
        """Return the gradient on the device; rows are copied, as they are kept until the step."""
        if kind_of(self.dtype) is None:
            raise TypeError(f"{self.dtype} has no gradients on a CUDA device")
        if not isinstance(given, list) and is_row_sparse(given):
            rows = as_row_sparse(given, self.shape)
            if is_cuda(rows.values) and rows.dtype == self.dtype:
                parts = rows.values, rows.indices
                values, indices = (
                    snapshot(header(part)) if is_cuda(part) else part.copy() for part in parts
                )
                return RowSparse(values, indices, self.shape)
            with np.errstate(over="ignore"):
                values = host(rows.values).astype(self.dtype, casting="same_kind")
            return self._mapped(self._own, RowSparse(values, host(rows.indices), self.shape))
        array = header(given) if is_cuda(given) else as_array(given)
        if array.shape != self.shape:
            raise ValueError(f"gradient must have shape {self.shape}, got {array.shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(f"gradient must be of the kind of {self.dtype}, got {array.dtype}")
        if self.row_sparse:
            return self._admitted(RowSparse.from_dense(np.array(host(given), self.dtype)))
        if is_cuda(given) and kind_of(array.dtype):
            return given
        with np.errstate(over="ignore"):
            return self._own(np.array(host(given), self.dtype, order="C"))
