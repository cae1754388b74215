"""ADOPT: Adam that normalizes the gradient by the previous second moment."""

import math
from typing import Any

from fastopt.arguments import FLAG, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import clip, rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily
from fastopt.optimizer.optimizer import corrected, register


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "largest"))
def adopt(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean of normalized, clipped gradients; the second moment is updated last."""
    mean, var = state
    grad, root = rescaled(grad, h), math.sqrt(var)
    if root < h.epsilon:
        root = h.epsilon
    mean = h.beta1 * mean + h.one_minus_beta1 * clip(grad / root, h.largest)
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    return weight - h.lr * (mean + h.wd * weight), (mean, var)


def scheduled(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bound of this step; the first step only initializes the second moment."""
    past = t - 1 - h.begun
    if past < 1:
        h.lr, h.largest = 0.0, 0.0
        h.beta2, h.one_minus_beta2 = 0.0, 1.0
    elif h.clips != 0:
        h.largest = past**0.25


@register
class ADOPT(CautiousFamily):
    r"""ADOPT: Adam that converges with any :math:`\beta_2`.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \max \left( -c_t, \min \left( c_t,
            \frac{h}{\max(\sqrt{v}, \epsilon)} \right) \right) \\
        w &\leftarrow w - \eta (m + \lambda w) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2

    with :math:`c_t = (t - 1)^{1/4}`. The first update only sets :math:`v = h^2`. Rows that a lazy
    update first touches in a later step have :math:`v = 0` there, so the bound applies.

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any :math:`\beta_2` with the
    Optimal Rate", arXiv:2411.02853, with the bound from the authors' code.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.9999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    clips : bool
        Bound normalized gradients by :math:`c_t`. Default True.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.ADOPT(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(2):
    ...     updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.99 1.01]
    """

    beta2: float = arg(default=0.9999)
    epsilon: float = arg(default=1e-06)
    clips: bool = arg(default=True, check=FLAG)

    plain = adopt

    @corrected(scheduled, "clips", "begun")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "largest": math.inf,
            "clips": float(self.clips),
            "begun": float(self.begin_num_update),
        }

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * wd if t > self.begin_num_update + 1 else 0.0
