"""Adaptive gradient clipping: limits each unit's gradient norm relative to its weight norm."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array, Grad, label, repeated
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.layout import kind_of, real_of
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt._kernels.units import clip_units
from fastopt.sparse import RowSparse


class UnitClip:
    """Unit-wise gradient clipping into reused arrays.

    Parameters
    ----------
    limit : float
        Maximum ratio of a unit's gradient norm to its weight norm.
    least : float
        Lower bound of a unit's weight norm.
    """

    def __init__(self, limit: float, least: float) -> None:
        self.limit, self.least = limit, least
        self._room: dict[Index, Array] = {}

    @staticmethod
    def check(
        indices: Sequence[Index],
        weights: Sequence[Any],
        grads: Sequence[Any],
        names: dict[Any, str],
    ) -> None:
        """Raise unless units of the gradients of a call can be clipped.

        Raises
        ------
        ValueError
            An index occurs twice.
        TypeError
            An array is on a CUDA device.
        """
        if (twice := repeated(indices)) is not None:
            raise ValueError(f"{label(twice, names)}: clip_adaptive updates an index once a call")
        for index, weight, grad in zip(indices, weights, grads, strict=True):
            if is_cuda(weight) or is_cuda(getattr(grad, "values", grad)):
                raise TypeError(
                    f"{label(index, names)}: clip_adaptive works on arrays on the host, not on a "
                    "CUDA device"
                )

    def all(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], factor: float,
        names: dict[Any, str],
    ) -> list[Any]:  # fmt: skip
        """Return the clipped gradients of a call; see :meth:`check` for errors.

        The caller multiplies them by `factor` later; only its magnitude matters here.
        """
        self.check(indices, weights, grads, names)
        return [
            self.clipped(index, weight, grad, abs(factor))
            for index, weight, grad in zip(indices, weights, grads, strict=True)
        ]

    def clipped(self, index: Index, weight: Array, grad: Grad, factor: float) -> Any:
        """Return the gradient of one parameter with clipped units."""
        real = real_of(weight.dtype)
        if isinstance(grad, RowSparse):
            grad = RowSparse(grad.values.astype(real), grad.indices, grad.shape).coalesce()
            if weight.ndim == 1:
                whole = np.empty(grad.shape, real)
                self._clip(weight, grad.to_dense(), whole, factor)
                return RowSparse(whole[grad.indices], grad.indices, grad.shape)
            values = np.empty(grad.values.shape, real)
            self._clip(weight[grad.indices], grad.values, values, factor)
            return RowSparse(values, grad.indices, grad.shape)
        out = self._room.get(index)
        if out is None or out.shape != grad.shape or out.dtype != real:
            out = self._room[index] = np.empty(grad.shape, real)
        self._clip(weight, grad, out, factor)
        return out

    def _clip(self, weight: Array, grad: Array, out: Array, factor: float) -> None:
        weight, grad = _contiguous(weight), _contiguous(grad)
        units = len(out) if out.ndim > 1 and out.size else 1  # 2**63 units may have no elements
        kinds = kind_of(weight.dtype), kind_of(grad.dtype), out.dtype.type
        table = np.array([[weight.ctypes.data, grad.ctypes.data, out.ctypes.data]], np.uint64)
        numbers = factor, self.limit, self.least
        width = out.size // max(units, 1)
        parallel = out.size >= PARALLEL_FROM and units > 1 and may_run_parallel()
        with turn() if parallel else nullcontext():
            clip_units(*kinds, parallel)(table, units, width, *numbers)


def _contiguous(array: Array) -> Array:
    """Return the array, or a contiguous and aligned copy."""
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, None, ["C", "A"])
