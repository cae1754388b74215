"""Steps of optimizers whose second moments are those of rows and columns."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastopt._kernels.factored import factored
from fastopt.optimizer.optimizer import Array, Index
from fastopt.optimizer.rowsteps import RowSteps


class Measured(NamedTuple):
    """Gradients, and the inverse roots of their second moments."""

    source: Array
    """Gradients, as a batch of matrices."""
    scales: Array
    """Inverse roots of rows and columns, which the gradients are multiplied by."""
    sums: Array
    """Scratch memory for sums of columns in float64."""
    size: float
    """Root mean square of the products."""
    weight_size: float
    """Root mean square of the weight."""


class FactoredSteps(RowSteps):
    """Abstract base of directions with the second moments of rows and columns."""

    def fits(self, main: Any, weight: Array, grad: Array, state: Any) -> bool:
        """See :meth:`InPlace.fits <fastopt.optimizer.matrices.InPlace.fits>`."""
        return weight.ndim > 1 and super().fits(main, weight, grad, state)

    def measured(
        self,
        grad: Array,
        weight: Array,
        moments: Sequence[Array],
        share: float,
        floor: float,
        record: Array,
    ) -> Measured:
        """Move the moments of rows and columns by `share` towards those of squared gradients."""
        height, width = grad.shape[-2:]
        flat, (rows, columns) = (grad.size // (height * width), height, width), moments
        scales = self.buffers("scales", (flat[0], height + width), grad.dtype)
        sums, source = self.buffers("sums", (width,), np.float64), grad.reshape(flat)
        squares, sizes = self.call(
            factored(grad.dtype.type),
            *(source, weight.reshape(flat), rows.reshape(flat[:2]), columns.reshape(-1, width)),
            *(scales, sums, share, floor, record),
        )
        roots = (math.sqrt(each / grad.size) for each in (squares, sizes))
        return Measured(source, scales, sums, *roots)

    def write(
        self, main: Any, index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if direction.ndim > 1:
            return super().write(main, index, weight, direction, grad, state)
        if not direction.size:
            return False
        gradient = self.rescaled(main, index, direction, grad)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            self.write_vector(main, index, weight, direction, gradient, state)
        return True

    def write_vector(
        self, main: Any, index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> None:
        """Write direction and state of a weight with fewer than two dimensions."""
        raise NotImplementedError

    def divided(self, main: Any, grad: Array, var: Array, share: float) -> tuple[Array, float]:
        """Move `var` towards the squared gradient; return a quotient and its root mean square."""
        var += (grad * grad + grad.dtype.type(main.eps1) - var) * share
        step = np.asarray(grad / np.sqrt(var))
        return step, root_mean_square(step)


def root_mean_square(array: Array) -> float:
    """Return the root mean square, with the squares summed in float64."""
    return math.sqrt(np.square(array, dtype=np.float64).sum() / array.size)


def clipped_factor(size: float, threshold: float | None) -> float:
    """Return the factor of a direction of root mean square `size` that bounds it."""
    return 1.0 if threshold is None or size <= threshold else threshold / size
