"""LAMB: Adam with a trust ratio for each layer."""

import math

from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import TRUST, TrustRatioFamily
from fastopt.optimizer.optimizer import register


@scalar
def trust_ratio(square_weight: Scalar, square_step: Scalar, h: Hyper) -> Scalar:
    """Return the bounded weight norm over the step norm, or 1 if either is 0."""
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
    """Return Adam's step with decay, before the trust ratio, and the new moments."""
    mean, var = moments(rescaled(grad, h), state, h)
    root = math.sqrt(var * h.var_scale) + h.epsilon
    return mean * h.mean_scale / root + h.wd * weight, mean, var


def lamb_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of the step."""
    step, _, _ = direction(weight, grad, state, h)
    return weight * weight, step * step


def lamb_finish(sums: Sums, h: Hyper) -> None:
    """Scale the learning rate by the trust ratio."""
    h.lr = h.lr * trust_ratio(sums[0], sums[1], h)


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=TRUST,
    passes=((lamb_sums, lamb_finish),),
)
def lamb(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step with the layer's learning rate."""
    step, mean, var = direction(weight, grad, state, h)
    return weight - h.lr * step, (mean, var)


@register
class LAMB(TrustRatioFamily):
    r"""LAMB: Adam with a layer-wise learning rate, for large batches.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        q &= \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \frac{\min(\max(\|w\|, l), u)}{\|q\|} q

    with :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`, and a ratio
    of 1 if either norm is 0. Norms are summed in float64, in an order that does not depend on the
    number of threads.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", arXiv:1904.00962.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds :math:`l, u` of the weight norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the bias of the moving averages; otherwise :math:`\hat m = m` and
        :math:`\hat v = v`. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.LAMB(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = lamb
