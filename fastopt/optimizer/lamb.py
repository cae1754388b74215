"""LAMB: Adam with a trust ratio for each layer."""

import math
from typing import Any

from fastopt.arguments import flag, number
from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.base import bound, register
from fastopt.optimizer.moments import MOMENTS, MomentOptimizer

__all__ = ["LAMB", "TRUST", "TrustOptimizer", "lamb", "trust_ratio"]

TRUST = (*MOMENTS, "mean_scale", "var_scale", "lower_bound", "upper_bound")
"""Fields that :meth:`TrustOptimizer.hyper` and the base class fill."""


@scalar
def trust_ratio(square_weight: Scalar, square_step: Scalar, h: Hyper) -> Scalar:
    """Bounded norm of the weight over the norm of the step, or 1 where either is 0."""
    norm = math.sqrt(square_weight)
    if norm > h.upper_bound:
        norm = h.upper_bound * 1.0
    if norm < h.lower_bound:
        norm = h.lower_bound * 1.0
    step = math.sqrt(square_step)
    return 1.0 if norm == 0 or step == 0 else norm / step


@scalar
def direction(
    weight: Scalar, grad: Scalar, state: State, h: Hyper
) -> tuple[Scalar, Scalar, Scalar]:
    """Adam's step with decay, before the trust ratio, and the new averages."""
    mean, var = moments(rescaled(grad, h), state, h)
    root = math.sqrt(var * h.var_scale) + h.epsilon
    return mean * h.mean_scale / root + h.wd * weight, mean, var


def lamb_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Squares of the weight and of the step."""
    step, _, _ = direction(weight, grad, state, h)
    return weight * weight, step * step


def lamb_finish(sums: Sums, h: Hyper) -> None:
    """Scale the rate by the trust ratio."""
    h.lr = h.lr * trust_ratio(sums[0], sums[1], h)


@rule(state=("mean", "var"), hyper=TRUST, passes=((lamb_sums, lamb_finish),))
def lamb(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step at the layer's own rate."""
    step, mean, var = direction(weight, grad, state, h)
    return weight - h.lr * step, (mean, var)


class TrustOptimizer(MomentOptimizer):
    """Abstract base of optimizers whose trust ratio compares the weight's and the step's norms.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`MomentOptimizer`; epsilon is 1e-6 by default.
    lower_bound, upper_bound : float, optional
        Bounds of the weight's norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the averages' bias towards 0. Default True.
    **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)
        for name, value in (("lower_bound", lower_bound), ("upper_bound", upper_bound)):
            if value is not None:
                number(name, value, least=0, infinite=True)
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound
        self.bias_correction = flag("bias_correction", bias_correction)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        mean, var = self.corrections(t) if self.bias_correction else (1.0, 1.0)
        return {
            **super().hyper(t, lr, wd),
            "mean_scale": 1 / mean,
            "var_scale": 1 / var,
            "lower_bound": self.lower_bound or 0.0,
            "upper_bound": bound("upper_bound", self.upper_bound),
        }


@register
class LAMB(TrustOptimizer):
    r"""LAMB: Adam at a rate of its own for each layer, for large batches.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        q &= \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \frac{\min(\max(\|w\|, l), u)}{\|q\|} q

    with :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`, and a ratio
    of 1 where either norm is 0. Norms are added up in float64 in an order that does not depend
    on the number of threads.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", arXiv:1904.00962.

    State of a parameter: the tuple :math:`(m, v)` of arrays like the weight.

    Parameters
    ----------
    learning_rate : float, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds :math:`l, u` of the weight's norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the averages' bias towards 0; if not, :math:`\hat m = m` and
        :math:`\hat v = v`. Default True.
    **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.LAMB(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = lamb
