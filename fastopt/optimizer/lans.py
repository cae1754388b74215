"""LANS: LAMB with normalized gradients and Nesterov momentum."""

import math

from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import TRUST, TrustRatioFamily
from fastopt.optimizer.lamb import trust_ratio
from fastopt.optimizer.optimizer import register


@scalar
def directions(
    weight: Scalar, grad: Scalar, state: State, h: Hyper
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Return the steps along the mean and the current gradient, and the new moments."""
    grad = rescaled(grad, h) * h.inverse_norm
    mean, var = moments(grad, state, h)
    root = math.sqrt(var * h.var_scale) + h.epsilon
    decay = h.wd * weight
    return mean * h.mean_scale / root + decay, grad / root + decay, mean, var


def norm_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squared gradient."""
    grad = rescaled(grad, h)
    return (grad * grad,)


def norm_finish(sums: Sums, h: Hyper) -> None:
    """Compute the inverse of the gradient norm, or 1 if the norm is 0."""
    h.inverse_norm = 1.0 / math.sqrt(sums[0]) if sums[0] != 0 else 1.0


def trust_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of both steps."""
    along_mean, along_grad, _, _ = directions(weight, grad, state, h)
    return weight * weight, along_mean * along_mean, along_grad * along_grad


def trust_finish(sums: Sums, h: Hyper) -> None:
    """Compute the learning rates of both steps."""
    h.mean_rate = h.lr * h.beta1 * trust_ratio(sums[0], sums[1], h)
    h.grad_rate = h.lr * h.one_minus_beta1 * trust_ratio(sums[0], sums[2], h)


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*TRUST, "inverse_norm", "mean_rate", "grad_rate"),
    passes=((norm_sums, norm_finish), (trust_sums, trust_finish)),
)
def lans(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Both steps, each with its own learning rate."""
    along_mean, along_grad, mean, var = directions(weight, grad, state, h)
    return weight - h.mean_rate * along_mean - h.grad_rate * along_grad, (mean, var)


@register
class LANS(TrustRatioFamily):
    r"""LANS: LAMB with normalized gradients and Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g), \qquad h \leftarrow h / \|h\| \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        q &= \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \qquad
        c = \frac{h}{\sqrt{\hat v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \left( \beta_1 \frac{\phi(\|w\|)}{\|q\|} q
            + (1 - \beta_1) \frac{\phi(\|w\|)}{\|c\|} c \right)

    with :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`,
    :math:`\phi(x) = \min(\max(x, l), u)`, and a ratio of 1 if either norm is 0.

    Source: Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54
    minutes", arXiv:2006.13484.

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
    >>> updater = optimizer.get_updater(optimizer.LANS(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([3.0, -3.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = lans
    measured = ("inverse_norm", "mean_rate", "grad_rate")
