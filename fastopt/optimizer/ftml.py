"""FTML: follow the moving leader."""

import math
from typing import Any

from fastopt.arguments import arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import clipped_decayed
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(state=("d", "v", "z"), hyper=(*MOMENTS, "inverse_lr", "var_scale"))
def ftml(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Weight that minimizes the sum of the regularized linear models so far."""
    if not h.lr:
        return weight, state
    d, v, z = state
    grad = clipped_decayed(weight, grad, h)
    v = h.beta2 * v + h.one_minus_beta2 * grad * grad
    leader = h.inverse_lr * (math.sqrt(v * h.var_scale) + h.epsilon)
    z = h.beta1 * z + h.one_minus_beta1 * grad - (leader - h.beta1 * d) * weight
    return -z / leader, (leader, v, z)


def corrected_scales(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the scales of this step, including the bias corrections."""
    h.inverse_lr = (1 - h.beta1**t) / h.lr if h.lr != 0 else 0.0
    h.var_scale = 1 / (1 - h.beta2**t)


@register
class FTML(AdamFamily):
    r"""FTML: follow the moving leader.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        D &= \frac{1 - \beta_1^t}{\eta}
            \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) \\
        z &\leftarrow \beta_1 z + (1 - \beta_1) h - (D - \beta_1 d) w \\
        d &\leftarrow D, \qquad w \leftarrow -z / D

    A learning rate of 0 changes nothing. Source: Zheng and Kwok, "Follow the Moving Leader in Deep
    Learning", ICML 2017.

    State: the tuple :math:`(d, v, z)` of arrays in the weight's shape.

    Parameters
    ----------
    beta1, beta2 : float
        Decay rates, at least 0 and below 1. Defaults 0.6, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    learning_rate : float or callable, optional
        See :class:`~fastopt.optimizer.Optimizer`. Default 0.01.
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
    >>> updater = optimizer.get_updater(optimizer.FTML(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = ftml

    beta1: float = arg(default=0.6)
    learning_rate: RateAttribute = arg(default=None)
    positional = ("beta1", "beta2", "epsilon", "learning_rate")

    @corrected(corrected_scales, "lr")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), "inverse_lr": 0.0, "var_scale": 1.0}
