"""Steps that kernels over the rows of a matrix compute, without an array for their direction."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.hyper import values_of
from fastopt._engine.validate import leaves
from fastopt._kernels.compiling import bind
from fastopt._kernels.factored import SCALED
from fastopt.optimizer.matrices import InPlace, Rescaled, descent
from fastopt.optimizer.optimizer import Array, Index

SCALE = SCALED[:2]
"""Fields that scale and clip the gradient."""

UNSCALED = (1.0, math.inf)


class RowSteps(InPlace):
    """Abstract base of directions that kernels compute, which can also step along them.

    A step is in place if gradient, weight and state are in C order and the weight's precision, and
    no form of the optimizer needs the whole direction.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the kernels' record besides :data:`SCALED`."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.rescaled = Rescaled()
        self._records: dict[Any, Array] = {}
        self._scale: tuple[float, ...] = UNSCALED
        self._version = -1
        self._bound: dict[Any, Callable[..., Any]] = {}

    # Methods for subclasses

    def run(
        self,
        main: Any,
        index: Index,
        target: Array,
        weight: Array,
        grad: Array,
        state: tuple[Array, ...],
        record: Array,
    ) -> None:
        """Subtract ``lr`` times a step from ``shrink`` times `target`, and write the state.

        Buffers are allocated before anything changes.
        """
        raise NotImplementedError

    def call(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Call a kernel with arrays of the same kinds in each precision."""
        key = kernel, arguments[0].dtype
        bound = self._bound.get(key)
        if bound is None:
            bound = bind(kernel, *arguments)
            if bound is kernel:  # it is not compiled, and would warn of what it propagates
                bound = np.errstate(all="ignore")(kernel)
            self._bound[key] = bound
        return bound(*arguments)

    # Steps

    def fits(self, main: Any, weight: Array, grad: Any, state: Any) -> bool:
        """Whether :meth:`step` can update a weight in place."""
        kind = weight.dtype
        return (
            type(grad) is np.ndarray
            and not any(main.variant)
            and grad.shape == weight.shape
            and grad.dtype == kind
            and grad.flags.c_contiguous
            and weight.flags.carray
            and (kind == np.float32 or kind == np.float64)
            and weight.size > 0
            and all(array.flags.carray and array.dtype == kind for array in leaves(state))
            and not np.may_share_memory(grad, weight)
        )

    def step(
        self,
        main: Any,
        index: Index,
        weight: Array,
        grad: Array,
        state: Any,
        rates: tuple[float, float],
    ) -> None:
        """Update a weight in place, with the factors ``shrink`` and ``lr`` in `rates`."""
        if self._version != main.version:
            self._scale = tuple(values_of(main, descent, SCALE, {}, {}))
            self._version = main.version
        record = self._record(main, weight.dtype, self._scale, rates)
        self.run(main, index, weight, weight, grad, leaves(state), record)

    def reserve(self, main: Any, index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        self.rescaled.reserve(direction)

    def write(
        self, main: Any, index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if not direction.size:
            return False
        gradient = self.rescaled(main, index, direction, grad)
        target, exact = (
            self.buffers(name, direction.shape, direction.dtype) for name in ("direction", "weight")
        )
        target.fill(0)
        exact[...] = weight
        arrays = leaves(state)
        ordered = tuple(np.ascontiguousarray(array) for array in arrays)
        record = self._record(main, direction.dtype, UNSCALED, (0.0, -1.0))
        self.run(main, index, target, exact, gradient, ordered, record)
        for array, values in zip(arrays, ordered, strict=True):
            if values is not array:
                array[...] = values
        direction[...] = target
        return True

    def _record(
        self, main: Any, dtype: Any, scale: tuple[float, ...], rates: tuple[float, float]
    ) -> Array:
        """Return the kernels' record, which is reused."""
        record = self._records.get(dtype)
        if record is None:
            fields = [(name, dtype) for name in (*SCALED, *self.fields)]
            record = self._records[dtype] = np.zeros(1, np.dtype((np.record, fields)))
        record[0] = (*scale, *rates, *self.values(main))
        return record

    def values(self, main: Any) -> tuple[float, ...]:
        """Return the values of :attr:`fields`."""
        return ()
