"""Adan: Adam with Nesterov momentum from differences of gradients."""

import math
from collections.abc import Callable
from typing import Any

from fastopt.arguments import FLAG, Real, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import rescaled
from fastopt.kernels.variants import Traits
from fastopt.optimizer.families import CautiousFamily
from fastopt.optimizer.optimizer import corrected, register

FIELDS = (
    *("lr", "rescale_grad", "clip_gradient", "epsilon"),
    *("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "beta3", "one_minus_beta3"),
    *("differs", "mean_scale", "diff_scale", "var_scale", "shrink", "shrink_after"),
)


@scalar
def undecayed(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Means of the gradient and of its change divided by the root of the second moment."""
    mean, diff, var, previous = state
    grad = rescaled(grad, h)
    change = h.differs * (grad - previous)
    ahead = grad + h.beta2 * change
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    diff = h.beta2 * diff + h.one_minus_beta2 * change
    var = h.beta3 * var + h.one_minus_beta3 * ahead * ahead
    step = h.mean_scale * mean + h.diff_scale * diff
    step = h.lr * step / (math.sqrt(var * h.var_scale) + h.epsilon)
    return weight - step, (mean, diff, var, grad)


@rule(state=("mean", "diff", "var", "previous"), hyper=FIELDS)
def adan(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step from the weight after decay, or with decay after it."""
    weight, new = undecayed(h.shrink * weight, grad, state, h)
    return h.shrink_after * weight, new


@scalar
def proximal_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decay subtracts from a weight, before or after the step."""
    return (type(weight)(1) - h.shrink * h.shrink_after) * weight


def corrected_scales(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bias corrections; in the first step the gradient difference is 0."""
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.diff_scale = h.beta2 / (1 - h.beta2**t)
    h.var_scale = 1 / (1 - h.beta3**t)
    if t - h.begun < 2:
        h.differs = 0.0


@register
class Adan(CautiousFamily):
    r"""Adan: adaptive Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g), \qquad d = h - p, \qquad p \leftarrow h \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        n \leftarrow \beta_2 n + (1 - \beta_2) d, \qquad
        v \leftarrow \beta_3 v + (1 - \beta_3) (h + \beta_2 d)^2 \\
        w &\leftarrow \frac{1}{1 + \eta \lambda} \left( w - \eta
            \left( \frac{m}{1 - \beta_1^t} + \beta_2 \frac{n}{1 - \beta_2^t} \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_3^t}} + \epsilon \right) \right)

    with :math:`d = 0` in the first update. Without `proximal`, weight decay is applied as in AdamW:
    the weight is multiplied by :math:`1 - \eta \lambda` before the step.

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
    Models", arXiv:2208.06677, following the authors' code; each :math:`\beta` is one minus that of
    the paper. optax.adan has :math:`1 - \beta_2` instead of both factors :math:`\beta_2`.

    State: the tuple :math:`(m, n, v, p)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2, beta3 : float
        Decay rates of :math:`m`, :math:`n` and :math:`v`, at least 0 and below 1. Defaults 0.98,
        0.92, 0.99.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    proximal : bool
        Apply weight decay by a division after the step. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.Adan(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9 1.1]
    """

    beta1: float = arg(default=0.98)
    beta2: float = arg(default=0.92)
    beta3: float = arg(default=0.99, check=Real(least=0, below=1))
    proximal: bool = arg(default=True, check=FLAG)
    betas: tuple[float, float, float] = alias(  # type: ignore[assignment]
        "beta1", "beta2", "beta3", default=(0.98, 0.92, 0.99), kw_only=True
    )
    positional = ("learning_rate", "beta1", "beta2", "beta3", "epsilon", "proximal")

    plain = adan

    @corrected(corrected_scales, "begun")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        share = self.decay(t, lr, wd)
        return {
            **super().hyper(t, lr, wd),
            "beta3": self.beta3,
            "one_minus_beta3": 1 - self.beta3,
            "differs": 1.0,
            **dict.fromkeys(("mean_scale", "diff_scale", "var_scale"), 1.0),
            "shrink": 1.0 if self.proximal else 1 - share,
            "shrink_after": 1 - share if self.proximal else 1.0,
            "begun": float(self.begin_num_update),
        }

    @property
    def decays(self) -> Callable[..., Any]:
        """See :class:`~fastopt.optimizer.families.Varied`."""
        return proximal_decay

    @property
    def traits(self) -> Traits:
        """See :class:`~fastopt.optimizer.families.Varied`."""
        return super().traits._replace(step=undecayed if self.proximal else None)

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * wd / (1 + lr * wd) if self.proximal else lr * wd
