"""Adam."""

import math
from typing import Any

from fastopt.engine.hyper import corrected
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import clipped_decayed, moments
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import register

__all__ = ["Adam", "adam"]


@rule(state=("mean", "var"), hyper=MOMENTS)
def adam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam with decay inside the clipped gradient; ``lr`` holds the bias correction."""
    mean, var = moments(clipped_decayed(weight, grad, h), state, h)
    return weight - h.lr * mean / (math.sqrt(var) + h.epsilon), (mean, var)


def corrected_rate(t: Scalar, h: Hyper, carried: Any) -> None:
    """Put the correction of both moving averages' bias towards 0 into the learning rate."""
    h.lr = h.lr * math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)


@register
class Adam(AdamFamily):
    r"""Adam, with decay as a part of the gradient (L2, not AdamW).

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} + \epsilon}

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980, with
    the bias correction outside of :math:`\epsilon`, as at the end of its section 2.

    State of a parameter: the tuple :math:`(m, v)` of arrays like the weight.

    Parameters
    ----------
    learning_rate : float, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    lazy_update : bool, optional
        Under row-sparse gradients touch only the rows they list. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.Adam(learning_rate=0.1))
    >>> weight = np.zeros(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([-0.1,  0.1])
    """

    rule = adam
    lazy_by_default = True

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, lazy_update=lazy_update, **kwargs)

    hyper = corrected(corrected_rate)(AdamFamily.hyper)
