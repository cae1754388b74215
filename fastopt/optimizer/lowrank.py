"""GaLore and APOLLO: moments of projected gradients."""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fastopt.arguments import Choice, Integer, Real, alias, arg
from fastopt.optimizer.matrices import MatrixOptimizer, Shape
from fastopt.optimizer.optimizer import Array, RateAttribute, register


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

    def lifted(self, matrix: Array, low: Array, step: Array, state: dict[str, Array]) -> Array:
        """Return the step of a matrix with at least as many rows as columns.

        `low` is its projection, and `step` the step of that.
        """
        raise NotImplementedError

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        columns, rows = sorted((shape[0], math.prod(shape[1:])))
        rank = min(self.rank, columns)
        return {"mean": (rows, rank), "var": (rows, rank), "basis": (columns, rank)}

    def direction(self, t: int, grad: Array, state: dict[str, Array]) -> Array:
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


@register
class GaLore(LowRank):
    r"""GaLore: Adam in the space of the largest singular vectors of the gradient.

    .. math::
        h &= \mathrm{clip}(r g), \qquad y = h P \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) y, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) y^2 \\
        w &\leftarrow (1 - \eta \lambda) \left( w - \eta \alpha
            \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \,
            \frac{m}{\sqrt{v} + \epsilon} P^T \right)

    for a matrix with at least as many rows as columns; another one is transposed. Every
    `update_interval` updates, and in the first one, P becomes the `rank` right singular vectors of
    h with the largest singular values; m and v remain. The sign of a vector, which is arbitrary, is
    that of its product with the one before. Weights with more than two dimensions are
    reshaped to matrices of the first axis by all others.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
    arXiv:2403.03507, with the code of the authors.

    Weights with fewer dimensions need a `fallback`; without one they raise an error. The
    decomposition uses NumPy in the weight's precision. A gradient that is not finite makes the
    weight NaN.

    State: the tuple of the arrays m and v, of shape (longer side, rank), and P, of shape (shorter
    side, rank), where a rank above the shorter side becomes that.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    rank : int
        Rank of the projection, at least 1. Default 128.
    update_interval : int
        Updates from one projection to the next, at least 1. Default 200.
    scale : float
        :math:`\alpha`, at least 0. Default 0.25.
    beta1, beta2 : float
        Decay rates of m and v, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.GaLore(lr=0.1, rank=1, scale=1.0))
    >>> weight = np.zeros((3, 2))
    >>> updater.step({"w": np.array([[3.0, 0.0], [-1.0, 0.0], [0.0, 0.1]])}, {"w": weight})
    >>> weight.round(3) + 0
    array([[-0.1,  0. ],
           [ 0.1,  0. ],
           [ 0. ,  0. ]])
    >>> [array.shape for array in updater.states["w"]]
    [(3, 1), (3, 1), (2, 1)]
    """

    scale: float = arg(default=0.25)

    def basis(self, matrix: Array, before: Array, t: int) -> Array:
        """See :meth:`LowRank.basis`."""
        if not np.isfinite(matrix).all():
            return np.full_like(before, np.nan)
        basis = np.linalg.svd(matrix, full_matrices=False)[2][: before.shape[1]].T
        turned = np.einsum("ij,ij->j", basis, before) < 0
        return np.where(turned, -basis, basis)

    def lifted(self, matrix: Array, low: Array, step: Array, state: dict[str, Array]) -> Array:
        """See :meth:`LowRank.lifted`."""
        result: Array = step @ state["basis"].T
        result *= result.dtype.type(self.scale)
        return result


FLOOR = 1e-8
"""Number of the authors that is added to norms."""

GROWTH = 1.01
"""Largest ratio of the norms of two steps in a row."""


@register
class APOLLO(LowRank):
    r"""APOLLO: gradients scaled by the steps of Adam for their random projections.

    .. math::
        h &= \mathrm{clip}(r g), \qquad y = h P \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) y, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) y^2, \qquad
        s_i = \frac{\|u_i\|}{\|y_i\| + 10^{-8}}, \quad u = \frac{m}{\sqrt{v} + \epsilon} \\
        d_i &= s_i h_i, \qquad
        d \leftarrow d \min\left(1, 1.01 \frac{\ell}{\|d\|}\right), \qquad \ell \leftarrow \|d\| \\
        w &\leftarrow (1 - \eta \lambda) \left( w - \eta \sqrt{\alpha}
            \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \, d \right)

    for the rows i of a matrix with at least as many rows as columns; another one is transposed.
    With ``scale_by="tensor"`` there is one factor s for the whole matrix. Every `update_interval`
    updates, and in the first one, the elements of P are drawn from the normal distribution with the
    variance 1 / `rank`; m and v remain. The draw depends on `seed`, the shape and t alone. A first
    step, and one after a step of 0, is not limited. Weights with more than two dimensions are
    reshaped to matrices of the first axis by all others.

    APOLLO-Mini is ``APOLLO(rank=1, scale=128, scale_by="tensor")``.

    Source: Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv:2412.05270, with
    the code of the authors.

    Weights with fewer dimensions need a `fallback`; without one they raise an error. Products use
    NumPy in the weight's precision. A gradient that is not finite makes rows, or the weight, NaN.

    State: the tuple of the arrays m and v, of shape (longer side, rank), P, of shape (shorter side,
    rank), and :math:`\ell`, without dimensions, where a rank above the shorter side becomes that.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    rank : int
        Rank of the projection, at least 1. Default 256.
    update_interval : int
        Updates from one projection to the next, at least 1. Default 200.
    scale : float
        :math:`\alpha`, at least 0. Default 1.
    scale_by : str
        'channel' or 'tensor'. Default 'channel'.
    beta1, beta2 : float
        Decay rates of m and v, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        There is no `cautious`: the step has the signs of the gradient. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> apollo = fastopt.APOLLO(lr=0.1, rank=1, scale_by="tensor", epsilon=0.0)
    >>> updater = fastopt.Updater(apollo)
    >>> weight = np.zeros((2, 1))
    >>> updater.step({"w": np.array([[3.0], [-4.0]])}, {"w": weight})
    >>> (weight / weight[0]).round(3)
    array([[ 1.   ],
           [-1.333]])
    >>> [array.shape for array in updater.states["w"]]
    [(2, 1), (2, 1), (1, 1), ()]
    """

    learning_rate: RateAttribute = arg(default=0.01)
    rank: int = arg(default=256)
    scale_by: Literal["channel", "tensor"] = arg(
        default="channel", check=Choice("channel", "tensor")
    )
    cautious: bool = arg(default=False, init=False)
    positional = (
        *("learning_rate", "rank", "update_interval", "scale", "scale_by", "beta1", "beta2"),
        *("epsilon", "fallback", "fallback_for"),
    )

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        return {**super().slots(shape), "length": ()}

    def basis(self, matrix: Array, before: Array, t: int) -> Array:
        """See :meth:`LowRank.basis`."""
        source = np.random.Generator(np.random.Philox(key=[self.seed, t]))
        drawn: Array = np.asarray(source.standard_normal(before.shape))
        drawn /= math.sqrt(before.shape[1])
        return np.asarray(drawn, matrix.dtype)

    def lifted(self, matrix: Array, low: Array, step: Array, state: dict[str, Array]) -> Array:
        """See :meth:`LowRank.lifted`."""
        axis, real = 1 if self.scale_by == "channel" else None, matrix.dtype.type
        size, other = (np.linalg.norm(array, axis=axis, keepdims=True) for array in (step, low))
        result: Array = matrix * (size / (other + real(FLOOR)))
        length, before = float(np.linalg.norm(result)), float(state["length"])
        if before > 0:
            limit = max(length / (before + FLOOR), GROWTH) / GROWTH if length == length else length
            result /= real(limit)
            length /= limit
        state["length"] = real(length)
        result *= real(math.sqrt(self.scale))
        return result
