"""LaProp: momentum of gradients that are normalized first."""

import math

from fastopt.arguments import arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily, mean_and_var
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def laprop(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean of gradients divided by the root of the second moment, with decoupled decay."""
    mean, var = state
    grad = rescaled(grad, h)
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    mean = h.beta1 * mean + h.one_minus_beta1 * (grad / (math.sqrt(var * h.var_scale) + h.epsilon))
    return weight - h.lr * (h.mean_scale * mean + h.wd * weight), (mean, var)


@register
class LaProp(CautiousFamily):
    r"""LaProp: Adam that normalizes gradients before it averages them.

    .. math::
        h &= \mathrm{clip}(r g) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        m &\leftarrow \beta_1 m + (1 - \beta_1)\, h
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} + \lambda w \right)

    A large gradient cannot enlarge later steps, so that the step stays bounded for any
    :math:`\beta_1` and :math:`\beta_2`. Weight decay is decoupled.

    Source: Ziyin, Wang and Ueda, "LaProp: Separating Momentum and Adaptivity in Adam",
    arXiv:2002.04839. The authors' code agrees for a constant learning rate; under a schedule it
    averages :math:`\eta` with the gradients, and it subtracts :math:`\lambda w` after the step.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0004; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-15.
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
    >>> updater = optimizer.get_updater(optimizer.LaProp(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([1.0, -5.0], [0.0, 5.0]):
    ...     updater(0, np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8526, 1.0947])
    """

    plain = laprop

    learning_rate: RateAttribute = arg(default=0.0004)
    epsilon: float = arg(default=1e-15)

    @corrected(mean_and_var)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), "mean_scale": 1.0, "var_scale": 1.0}
