"""The gradient of a parameter on a CUDA device."""

from copy import copy
from typing import Any

import numpy as np

from fastopt.kernels.devices import assign, duplicate, header, host, is_cuda, like, placed
from fastopt.kernels.table import launch
from fastopt.optimizer.sums import adding
from fastopt.parameter.checks import as_array
from fastopt.parameter.gradient import Gradient
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse

__all__ = ["DeviceGradient"]


class DeviceGradient(Gradient):
    """A gradient whose one buffer is where the array of the parameter is."""

    def __init__(self, weight: Any, row_sparse: bool) -> None:
        self.of = header(weight)
        super().__init__(tuple(self.of.shape), self.of.dtype, 1, row_sparse)

    def set(self, i: int, given: Any) -> None:
        """See :meth:`Gradient.set`."""
        self._take(given, keep=False)

    def add(self, i: int, given: Any, *, always: bool) -> None:
        """See :meth:`Gradient.add`."""
        self._take(given, keep=always or self._written[i])

    def _take(self, given: Any, keep: bool) -> None:
        grad = self._admitted(given)
        buffer = self.touch(0)
        self._written[0] = True
        if self.row_sparse:
            self.buffers[0] = self._joined(buffer, grad) if keep else grad
            return
        if isinstance(grad, RowSparse) and not keep:
            self.zero()
            keep = True
        launch([adding("gradient", buffer, grad, keep)])

    def zero(self) -> None:
        """See :meth:`Gradient.zero`."""
        if self.row_sparse:
            self.buffers[0] = self._zeros()
        else:
            assign(header(self.buffers[0]), np.zeros(self.shape, self.dtype))

    def cast(self, dtype: np.dtype[Any]) -> "Gradient":
        """See :meth:`Gradient.cast`."""
        made = copy(self)
        made.dtype = dtype
        made.buffers = [self._cast(buffer, dtype) for buffer in self.buffers]
        return made

    def _cast(self, buffer: Any, dtype: np.dtype[Any]) -> Any:
        if isinstance(buffer, RowSparse):
            return RowSparse(self._cast(buffer.values, dtype), buffer.indices, buffer.shape)
        return placed(host(buffer).astype(dtype), self.of)

    def _zeros(self) -> Any:
        if not self.row_sparse:
            return like(self.of, self.shape, self.dtype)
        none = like(self.of, (0, *self.shape[1:]), self.dtype)
        return RowSparse(none, np.zeros(0, np.int64), self.shape)

    def _joined(self, *grads: RowSparse) -> RowSparse:
        """Gradient that lists the rows of several, by way of main memory."""
        values = np.concatenate([host(grad.values) for grad in grads])
        indices = np.concatenate([host(grad.indices).astype(np.int64) for grad in grads])
        return RowSparse(placed(values, self.of), placed(indices, self.of), self.shape)

    def _admitted(self, given: Any) -> Any:
        """The gradient on the device; listed rows are copied, as they are kept until the step."""
        if not isinstance(given, list) and is_row_sparse(given):
            rows = as_row_sparse(given, self.shape)
            if is_cuda(rows.values) and rows.dtype == self.dtype:
                values, indices = duplicate(header(rows.values)), duplicate(header(rows.indices))
                return RowSparse(values, indices, self.shape)
            values = host(rows.values).astype(self.dtype, casting="same_kind")
            indices = np.array(host(rows.indices))
            return RowSparse(placed(values, self.of), placed(indices, self.of), self.shape)
        array = header(given) if is_cuda(given) else as_array(given)
        if array.shape != self.shape:
            raise ValueError(f"gradient must have shape {self.shape}, got {array.shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(f"gradient must be of the kind of {self.dtype}, got {array.dtype}")
        if self.row_sparse:
            return self._admitted(RowSparse.from_dense(np.array(host(given), self.dtype)))
        if is_cuda(given) and array.dtype.kind != "i":
            return given
        with np.errstate(over="ignore"):
            return placed(np.array(host(given), self.dtype, order="C"), self.of)
