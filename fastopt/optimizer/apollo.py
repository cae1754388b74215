"""APOLLO: gradients scaled by the steps of Adam for their random projections."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fastopt.arguments import Choice, arg
from fastopt.optimizer.lowrank import LowRank
from fastopt.optimizer.matrices import Shape
from fastopt.optimizer.optimizer import Array, register
from fastopt.optimizer.rates import RateAttribute

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
    >>> from fastopt import optimizer
    >>> made = optimizer.APOLLO(learning_rate=0.1, rank=1, scale_by="tensor", epsilon=0.0)
    >>> updater = optimizer.get_updater(made)
    >>> weight = np.zeros((2, 1))
    >>> updater(0, np.array([[3.0], [-4.0]]), weight)
    >>> (weight / weight[0]).round(3)
    array([[ 1.   ],
           [-1.333]])
    >>> [array.shape for array in updater.states[0]]
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
        """See :meth:`MatrixFamily.slots`."""
        return {**super().slots(shape), "length": ()}

    def basis(self, matrix: Array, before: Array, t: int) -> Array:
        """See :meth:`LowRank.basis`."""
        source = np.random.Generator(np.random.Philox(key=[self.seed, t]))
        drawn: Array = np.asarray(source.standard_normal(before.shape))
        drawn /= math.sqrt(before.shape[1])
        return np.asarray(drawn, matrix.dtype)

    def lifted(self, matrix: Array, low: Array, step: Array, state: Any) -> Array:
        """See :meth:`LowRank.lifted`."""
        axis, real = 1 if self.scale_by == "channel" else None, matrix.dtype.type
        own, other = (np.linalg.norm(each, axis=axis, keepdims=True) for each in (step, low))
        result: Array = matrix * (own / (other + real(FLOOR)))
        length, before = float(np.linalg.norm(result)), float(state["length"])
        if before > 0:
            limit = max(length / (before + FLOOR), GROWTH) / GROWTH if length == length else length
            result /= real(limit)
            length /= limit
        state["length"] = real(length)
        result *= real(math.sqrt(self.scale))
        return result
