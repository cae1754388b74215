"""AdEMAMix: Adam with a second, slower moving average of the gradient."""

import math
from typing import Any

from fastopt.arguments import Integer, Real, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, StableFamily, over
from fastopt.optimizer.optimizer import corrected, register

FIELDS = ("mean_scale", "var_scale", "beta3", "one_minus_beta3", "mix")


@rule(state=("mean", "slow", "var"), signed=("mean",), hyper=(*MOMENTS, *FIELDS))
def ademamix(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Both means divided by the root of the second moment, with decoupled decay."""
    grad = rescaled(grad, h)
    mean, var = moments(grad, (state[0], state[2]), h)
    slow = h.beta3 * state[1] + h.one_minus_beta3 * grad
    step = (h.mean_scale * mean + h.mix * slow) / (math.sqrt(var * h.var_scale) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, slow, var)


@scalar
def ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants."""
    return over(grad * grad, state[2] * h.var_scale, h)


def scheduled(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bias corrections, and the factor and decay rate of the slow average."""
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.var_scale = 1 / (1 - h.beta2**t)
    if t < h.alpha_steps:
        h.mix = h.mix * (t / h.alpha_steps)
    if t < h.beta3_steps and h.beta1 > 0 and h.beta3 > 0:
        part = t / h.beta3_steps
        inverse = (1 - part) / math.log(h.beta1) + part / math.log(h.beta3)
        h.beta3 = math.exp(1 / inverse)
        h.one_minus_beta3 = -math.expm1(1 / inverse)


@register
class AdEMAMix(StableFamily):
    r"""AdEMAMix: Adam with a mixture of a fast and a slow moving average of the gradient.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        s \leftarrow b_t s + (1 - b_t) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( \left( \frac{m}{1 - \beta_1^t} + a_t s \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) + \lambda w \right)

    where :math:`a_t = \alpha \min(1, t / T_\alpha)`, and :math:`b_t` goes from :math:`\beta_1` to
    :math:`\beta_3` in :math:`T_\beta` steps such that :math:`1 / \ln b_t` is linear in :math:`t`.
    By default neither is warmed up, like in optax.contrib.ademamix; the paper sets both :math:`T`
    to the total number of steps. If :math:`\beta_1` is 0, :math:`b_t` is not warmed up.

    Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
    arXiv:2409.03137.

    State: the tuple :math:`(m, s, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2, beta3 : float
        Decay rates of :math:`m`, :math:`v` and :math:`s`, at least 0 and below 1. Defaults 0.9,
        0.999, 0.9999.
    alpha : float
        :math:`\alpha`, at least 0. Default 5.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    alpha_steps, beta3_steps : int
        :math:`T_\alpha` and :math:`T_\beta`, at least 0. Default 0: no warm-up.
    cautious, cautious_decay, stable : bool
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
    >>> updater = optimizer.get_updater(optimizer.AdEMAMix(learning_rate=0.1, beta3=0.99))
    >>> weight = np.ones(2, np.float32)
    >>> updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.895 1.105]
    """

    beta3: float = arg(default=0.9999, check=Real(least=0, below=1))
    alpha: float = arg(default=5.0, check=Real(least=0))
    alpha_steps: int = arg(default=0, check=Integer(least=0))
    beta3_steps: int = arg(default=0, check=Integer(least=0))
    betas: tuple[float, float, float] = alias(  # type: ignore[assignment]
        "beta1", "beta2", "beta3", default=(0.9, 0.999, 0.9999), kw_only=True
    )
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "alpha", "epsilon", "alpha_steps"),
        *("beta3_steps",),
    )

    plain = ademamix
    ratio = staticmethod(ratio)

    @corrected(scheduled, "alpha_steps", "beta3_steps")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "mean_scale": 1.0,
            "var_scale": 1.0,
            "beta3": self.beta3,
            "one_minus_beta3": 1 - self.beta3,
            "mix": self.alpha,
            "alpha_steps": float(self.alpha_steps),
            "beta3_steps": float(self.beta3_steps),
        }
