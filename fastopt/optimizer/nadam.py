"""Nadam: Adam with Nesterov momentum."""

import math
from collections.abc import Mapping
from typing import Any

from fastopt.arguments import flag, number
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import clipped_decayed, moments
from fastopt.optimizer.base import Index, register
from fastopt.optimizer.moments import MOMENTS, MomentOptimizer

__all__ = ["Nadam", "nadam"]


@rule(state=("mean", "var"), hyper=(*MOMENTS, "grad_scale", "mean_scale", "var_scale"))
def nadam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Present gradient and looked-ahead average over the root of the square's average."""
    grad = clipped_decayed(weight, grad, h)
    mean, var = moments(grad, state, h)
    ahead = h.grad_scale * grad + h.mean_scale * mean
    return weight - h.lr * ahead / (math.sqrt(var * h.var_scale) + h.epsilon), (mean, var)


@register
class Nadam(MomentOptimizer):
    r"""Adam with Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        a_t &= \beta_1 (1 - 0.96^{t s} / 2), \qquad P \leftarrow P a_t \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( \frac{(1 - a_t) h}{1 - P}
            + \frac{a_{t+1} m}{1 - P a_{t+1}} \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    with :math:`s` = `schedule_decay`. By default one product :math:`P` (``m_schedule``) serves
    all parameters and advances with every update of any of them, so that results depend on
    their number and order; `per_parameter` keeps one for each.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop.

    State of a parameter: the tuple :math:`(m, v)` of arrays like the weight.

    Parameters
    ----------
    learning_rate : float, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    schedule_decay : float
        :math:`s`, at least 0. Default 0.004.
    per_parameter : bool
        Keep a product :math:`P` for each parameter. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Nadam(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.8944, 1.1056])
    """

    rule = nadam

    carried = ("m_schedule", "_m_schedules")

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        schedule_decay: float = 0.004,
        per_parameter: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)
        self.schedule_decay = number("schedule_decay", schedule_decay, least=0)
        self.per_parameter = flag("per_parameter", per_parameter)
        self.m_schedule = 1.0
        self._m_schedules: dict[Index, float] = {}

    def _hyper_of(self, index: Index, lr: float, wd: float) -> Mapping[str, float]:
        t = self._index_update_count[index]
        now, ahead = self._momentum(t), self._momentum(t + 1)
        if self.per_parameter:
            product = self._m_schedules.get(index, 1.0) * now
            self._m_schedules[index] = product
        else:
            product = self.m_schedule = self.m_schedule * now
        return {
            **self.hyper(t, lr, wd),
            "grad_scale": (1 - now) / (1 - product),
            "mean_scale": ahead / (1 - product * ahead),
            "var_scale": 1 / self.corrections(t)[1],
        }

    def _momentum(self, t: int) -> float:
        return self.beta1 * (1 - 0.5 * math.pow(0.96, t * self.schedule_decay))
