"""RAdam: Adam with a rectified adaptive learning rate."""

import math
from typing import Any

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, StableFamily, scaled_ratio
from fastopt.optimizer.optimizer import corrected, register


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*MOMENTS, "mean_scale", "rectified"),
)
def radam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step times ``rectified``, or the mean gradient while ``rectified`` is 0."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = mean * h.mean_scale
    if h.rectified:
        step = step * (h.rectified / (math.sqrt(var) + h.epsilon))
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def rectified(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bias correction, and the rectification if it is defined."""
    var = 1 - h.beta2**t
    limit = 2 / (1 - h.beta2) - 1
    length = limit - 2 * t * (1 - var) / var
    h.rectified = 0.0
    if length > h.threshold:
        grown = (length - 4) * (length - 2) / length
        h.rectified = math.sqrt(grown * limit / ((limit - 4) * (limit - 2)) * var)
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.var_scale = 1 / var


@scalar
def rectified_ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants, 1 while the step is not divided by the root."""
    return scaled_ratio(grad, state, h) if h.rectified else type(grad)(1)


@register
class RAdam(StableFamily):
    r"""RAdam: Adam that uses its second moment only once its variance is tractable.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        \rho_\infty &= \frac{2}{1 - \beta_2} - 1, \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t} \\
        l_t &= \begin{cases}
            \sqrt{\dfrac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}
                        {(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}}
            \dfrac{\sqrt{1 - \beta_2^t}}{\sqrt{v} + \epsilon} & \rho_t > \rho_0 \\
            1 & \text{otherwise}
        \end{cases} \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} l_t + \lambda w \right)

    with :math:`\rho_0` = `threshold`. Weight decay is decoupled. The
    paper has a threshold of 4, torch.optim.RAdam and optax.radam of 5.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate
    and Beyond", arXiv:1908.03265.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    threshold : float
        :math:`\rho_0`, at least 4. Default 4.
    cautious, cautious_decay, stable : bool
        See :class:`~fastopt.optimizer.AdamW`; `stable` has no effect while :math:`l_t = 1`. Default
        False.
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
    >>> updater = optimizer.get_updater(optimizer.RAdam(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.5])

    With torch's threshold, from which on steps are divided by the root:

    >>> updater = optimizer.get_updater(optimizer.RAdam(learning_rate=0.1, threshold=5.0))
    >>> weight = np.ones(2)
    >>> for _ in range(6):
    ...     updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.4974, 3.5026])
    """

    threshold: float = arg(default=4.0, check=Real(least=4), kw_only=True, new=True)

    plain = radam
    ratio = staticmethod(rectified_ratio)
    ratio_fields = ("var_scale",)

    @corrected(rectified, "var_scale", "threshold")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = {"mean_scale": 1.0, "rectified": 0.0, "var_scale": 1.0}
        return {**super().hyper(t, lr, wd), **fields, "threshold": self.threshold}
