"""StableSPAM: Adam of gradients whose spikes and norms are limited by their history."""

import math
from typing import Any

from fastopt.arguments import Integer, Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily, mean_and_var
from fastopt.optimizer.optimizer import corrected, register

DECAYS = ("gamma1", "gamma2", "gamma3")
MEASURED = ("bound", "shorten", "norm_scale")
"""Hyper-parameters that the reductions compute."""


@scalar
def limited(grad: Scalar, h: Hyper) -> Scalar:
    """Return the gradient, scaled down if it is larger than the bound."""
    grad = rescaled(grad, h)
    return grad * h.shorten if abs(grad) > h.bound else grad


def size(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the size of the gradient."""
    return (abs(rescaled(grad, h)),)


def peak(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the average of the largest size, and compute the bound."""
    average = h.gamma3 * kept[0] + (1 - h.gamma3) * sums[0]
    h.bound = average * h.peak_scale
    h.shorten = h.bound / sums[0] if sums[0] > 0 else 1.0
    return average, kept[1], kept[2]


def square(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the square of the limited gradient."""
    grad = limited(grad, h)
    return (grad * grad,)


def norm(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the averages of norm and squared norm, and compute the scale of the gradient."""
    length = math.sqrt(sums[0])
    mean = h.gamma1 * kept[1] + (1 - h.gamma1) * length
    var = h.gamma2 * kept[2] + (1 - h.gamma2) * sums[0]
    target = mean * h.length_scale / (math.sqrt(var * h.square_scale) + h.epsilon)
    h.norm_scale = target / length if length > 0 else 1.0
    return kept[0], mean, var


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(
        *(*MOMENTS, "mean_scale", "var_scale", *DECAYS, *MEASURED),
        *("peak_scale", "length_scale", "square_scale"),
    ),
    passes=((size, peak, max), (square, norm)),
    kept=("peak", "length", "square"),
)
def stable_spam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdamW of the limited and normalized gradient."""
    mean, var = moments(h.norm_scale * limited(grad, h), state, h)
    step = h.mean_scale * mean / (math.sqrt(h.var_scale * var) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def restarted(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute all bias corrections; moments restart every ``every`` steps."""
    h.peak_scale = 1 / (1 - h.gamma3**t)
    h.length_scale = 1 / (1 - h.gamma1**t)
    h.square_scale = 1 / (1 - h.gamma2**t)
    since = t
    if h.every > 0 and t >= h.every:
        since = t % h.every + 1
    mean_and_var(since, h, carried)
    if since < t and since < 2:
        h.beta1, h.beta2 = 0.0, 0.0


@register
class StableSPAM(CautiousFamily):
    r"""StableSPAM: AdamW that is insensitive to spikes of the gradient.

    .. math::
        h &= \mathrm{clip}(r g), \qquad s = \max_i |h_i| \\
        \theta &\leftarrow \gamma_3 \theta + (1 - \gamma_3) s, \qquad
        \hat\theta = \frac{\theta}{1 - \gamma_3^t}, \qquad
        c_i = \begin{cases} h_i \hat\theta / s & |h_i| > \hat\theta \\ h_i \end{cases} \\
        a &\leftarrow \gamma_1 a + (1 - \gamma_1) \|c\|, \qquad
        b \leftarrow \gamma_2 b + (1 - \gamma_2) \|c\|^2 \\
        u &= \frac{c}{\|c\|} \cdot \frac{a}{1 - \gamma_1^t} \Big/
            \left( \sqrt{\frac{b}{1 - \gamma_2^t}} + \epsilon \right) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) u, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) u^2 \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^\tau} \Big/
            \left( \sqrt{\frac{v}{1 - \beta_2^\tau}} + \epsilon \right) + \lambda w \right)

    with three numbers :math:`\theta`, :math:`a` and :math:`b` for each tensor. Every
    `reset_interval` updates the moments restart: :math:`m` and :math:`v` are 0 before the update,
    and :math:`\tau` is 1; before the first restart :math:`\tau = t`. The maximum and the norm are
    those of the whole tensor, even in a lazy update.

    Source: Huang et al., "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam",
    arXiv:2502.17055. In the authors' code a restart also resets :math:`t` in the corrections of
    :math:`\theta`, :math:`a` and :math:`b`, although these do not restart; and the step of the
    restart itself still has the old :math:`m` and :math:`v`, with :math:`\tau = 1`, while the next
    one has :math:`m = v = 0` before it, with :math:`\tau = 2`.

    A gradient that is not finite makes the weight, its moments and these averages NaN, like the
    elements of Adam's. A loss scaler or `clip_global_norm` of the updater skips such steps.

    State: the tuple :math:`(m, v, \theta, a, b)` of two arrays in the weight's shape and three
    zero-dimensional arrays.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    gamma1, gamma2, gamma3 : float
        Decay rates of :math:`a`, :math:`b` and :math:`\theta`, at least 0 and below 1. Defaults
        0.7, 0.9, 0.999.
    reset_interval : int
        Updates from one restart of the moments to the next; 0 for none. Default 1000.
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
    >>> updater = optimizer.get_updater(optimizer.StableSPAM(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([1.0, -1.0], [1.0, -1000.0]):
    ...     updater(0, np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8328, 1.2001])
    """

    gamma1: float = arg(default=0.7, check=Real(least=0, below=1))
    gamma2: float = arg(default=0.9, check=Real(least=0, below=1))
    gamma3: float = arg(default=0.999, check=Real(least=0, below=1))
    reset_interval: int = arg(default=1000, check=Integer(least=0))

    plain = stable_spam

    @corrected(restarted, "every")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        scales = ("mean_scale", "var_scale", "peak_scale", "length_scale", "square_scale")
        return {
            **super().hyper(t, lr, wd),
            **{name: getattr(self, name) for name in DECAYS},
            **dict.fromkeys((*scales, *MEASURED), 1.0),
            "every": float(self.reset_interval),
        }
