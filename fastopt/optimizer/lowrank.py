"""Base class of optimizers whose moments are those of projected gradients."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt.arguments import Integer, Real, alias, arg
from fastopt.optimizer.matrices import Shape
from fastopt.optimizer.matrixoptimizer import MatrixOptimizer
from fastopt.optimizer.optimizer import Array


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
    rank: int = arg(default=128, check=Integer(least=1))
    update_interval: int = arg(default=200, check=Integer(least=1))
    scale: float = arg(default=1.0, check=Real(least=0))
    beta1: float = arg(default=0.9, check=Real(least=0, below=1))
    beta2: float = arg(default=0.999, check=Real(least=0, below=1))
    epsilon: float = arg(default=1e-6, check=Real(least=0))
    betas: tuple[float, float] = alias("beta1", "beta2", default=(0.9, 0.999), kw_only=True)
    eps: float = alias("epsilon", default=1e-8, kw_only=True)

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
