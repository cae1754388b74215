"""AdaBelief."""

import math

from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily, mean_and_var
from fastopt.optimizer.optimizer import corrected, register


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def adabelief(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean gradient divided by the root of the mean squared deviation from it."""
    mean, var = state
    grad = rescaled(grad, h)
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    surprise = grad - mean
    var = h.beta2 * var + h.one_minus_beta2 * surprise * surprise + h.epsilon
    step = mean * h.mean_scale / (math.sqrt(var * h.var_scale) + h.epsilon) + h.wd * weight
    return weight - h.lr * step, (mean, var)


@register
class AdaBelief(CautiousFamily):
    r"""AdaBelief: Adam that divides by the deviation of the gradient from its moving average.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        s &\leftarrow \beta_2 s + (1 - \beta_2) (h - m)^2 + \epsilon \\
        w &\leftarrow w - \eta \left( \frac{\hat m}{\sqrt{\hat s} + \epsilon} + \lambda w \right)

    with :math:`\hat m = m / (1 - \beta_1^t)` and :math:`\hat s = s / (1 - \beta_2^t)`. Weight decay
    is decoupled. Source: Zhuang et al., "AdaBelief Optimizer: Adapting Stepsizes by the Belief in
    Observed Gradients", arXiv:2010.07468.

    State: the tuple :math:`(m, s)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`s`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8; the authors have
        1e-16, which is another optimizer where gradients are small: :math:`\epsilon` is added to
        :math:`s` in every step.
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
    >>> updater = optimizer.get_updater(optimizer.AdaBelief(learning_rate=0.09))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.9, 1.1])
    """

    plain = adabelief

    @corrected(mean_and_var)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), "mean_scale": 1.0, "var_scale": 1.0}
