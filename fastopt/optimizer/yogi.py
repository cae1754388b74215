"""Yogi: Adam with an additive update of the second moment."""

import math

from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import decayed, sign
from fastopt.optimizer.families import (
    MOMENTS,
    AdamFamily,
    mean_and_var,
    scaled_ratio,
)
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(state=("mean", "var"), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def yogi(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam whose second moment changes by at most a fraction of the squared gradient."""
    mean, var = state
    grad = decayed(weight, grad, h)
    square = grad * grad
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    var = var - h.one_minus_beta2 * sign(var - square) * square
    root = math.sqrt(var * h.var_scale) + h.epsilon
    return weight - h.lr * (mean * h.mean_scale) / root, (mean, var)


@register
class Yogi(AdamFamily):
    r"""Yogi: Adam with an additive update of the second moment, which limits how fast it changes.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow v - (1 - \beta_2)\, \mathrm{sign}(v - h^2)\, h^2 \\
        w &\leftarrow w - \eta \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    Source: Zaheer et al., "Adaptive Methods for Nonconvex Optimization", NeurIPS 2018, with the
    bias correction and the initial values of optax.yogi.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape, filled with `initial_value`
    initially.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``. The paper has 0.01.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 0.001.
    initial_value : float
        Initial value of :math:`m` and :math:`v`, at least 0. Default 1e-6.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    stable : bool
        Bound the root mean square of the tensor's step, see :class:`~fastopt.optimizer.AdamW`.
        Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Yogi(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9001 1.1   ]
    """

    plain = yogi
    learning_rate: RateAttribute = arg(default=0.001)
    epsilon: float = arg(default=0.001)
    initial_value: float = arg(default=1e-06, check=Real(least=0))
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    ratio = staticmethod(scaled_ratio)

    @corrected(mean_and_var)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), "mean_scale": 1.0, "var_scale": 1.0}

    @property
    def initial_state(self) -> float:
        """See :attr:`Optimizer.initial_state <fastopt.optimizer.Optimizer.initial_state>`."""
        return self.initial_value
