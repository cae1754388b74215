"""Base class of optimizers whose moments are those of projected gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from fastopt.arguments import Descriptions, Integer, Real
from fastopt.optimizer.keywords import CautiousArguments, Rate
from fastopt.optimizer.matrices import Shape
from fastopt.optimizer.matrixoptimizer import MatrixOptimizer
from fastopt.optimizer.optimizer import Array, Optimizer

__all__ = ["LowRank"]


class LowRank(MatrixOptimizer):
    """Abstract base of optimizers with Adam's moments of projected gradients.

    Parameters
    ----------
    learning_rate : float or callable, optional
        None uses the scheduler's ``base_lr``.
    rank : int
        Rank of the projection, at least 1.
    update_interval : int
        Updates from one projection to the next, at least 1.
    scale : float
        Factor of the step, at least 0.
    beta1, beta2, epsilon : float
        See :class:`~fastopt.optimizer.Adam`.
    fallback, fallback_for, **common
        See :class:`~fastopt.optimizer.MatrixOptimizer`.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.
    """

    decays_last = True
    arguments: ClassVar[Descriptions] = {
        "rank": Integer(least=1),
        "update_interval": Integer(least=1),
        "scale": Real(least=0),
        "beta1": Real(least=0, below=1),
        "beta2": Real(least=0, below=1),
        "epsilon": Real(least=0),
    }

    def __init__(
        self,
        learning_rate: Rate,
        rank: int,
        update_interval: int,
        scale: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        fallback: Optimizer | str | None,
        fallback_for: str | Sequence[str] | None,
        **common: Unpack[CautiousArguments],
    ) -> None:
        self.rank = rank
        self.update_interval = update_interval
        self.scale = scale
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        super().__init__(learning_rate, fallback, fallback_for, **common)  # type: ignore[misc]

    def basis(self, matrix: Array, before: Array, t: int) -> Array:
        """Return a projection in place of `before`, for a matrix like that of `lifted`."""
        raise NotImplementedError

    def lifted(self, matrix: Array, low: Array, step: Array, state: Any) -> Array:
        """Return the step of a matrix with at least as many rows as columns.

        `low` is its projection, and `step` the step of that.
        """
        raise NotImplementedError

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        columns, rows = sorted((shape[0], math.prod(shape[1:])))
        rank = min(self.rank, columns)
        return {"mean": (rows, rank), "var": (rows, rank), "basis": (columns, rank)}

    def direction(self, t: int, grad: Array, state: Any) -> Array:
        """See :meth:`MatrixOptimizer.direction`."""
        if not grad.size:
            return grad
        flat = grad.reshape(grad.shape[0], math.prod(grad.shape[1:]))
        tall, basis, real = flat.shape[0] >= flat.shape[1], state["basis"], grad.dtype.type
        matrix = flat if tall else flat.T
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            if (t - 1) % self.update_interval == 0 or not basis.any():
                basis = self.basis(matrix, basis, t)
            low = matrix @ basis
            mean = state["mean"] + real(1 - self.beta1) * (low - state["mean"])
            var = state["var"] + real(1 - self.beta2) * (low * low - state["var"])
            step = mean / (np.sqrt(var) + real(self.epsilon))
            state.update(mean=mean, var=var, basis=basis)
            lifted = self.lifted(matrix, low, step, state)
            lifted *= real(math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t))
        return np.asarray(lifted if tall else lifted.T).reshape(grad.shape)
