"""MARS: Adam of gradients with reduced variance."""

import math
from typing import Any

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily, mean_and_var
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@scalar
def ahead(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the gradient plus a multiple of its change since the last step."""
    grad = rescaled(grad, h)
    return grad + h.gain * (grad - state[2])


def square(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the square of the corrected gradient."""
    grad = ahead(grad, state, h)
    return (grad * grad,)


def norm(sums: Sums, h: Hyper) -> None:
    """Compute the factor that limits the norm of the corrected gradient to 1."""
    h.shorten = 1.0 / math.sqrt(sums[0]) if sums[0] > 1.0 else 1.0


@rule(
    state=("mean", "var", "previous"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*MOMENTS, "mean_scale", "var_scale", "gain", "shorten"),
    passes=((square, norm),),
)
def mars(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdamW of the corrected gradient, whose norm is at most 1."""
    mean, var = moments(h.shorten * ahead(grad, state, h), (state[0], state[1]), h)
    step = h.mean_scale * mean / (math.sqrt(h.var_scale * var) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, var, rescaled(grad, h))


def started(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bias corrections; in the first step the change of the gradient is 0."""
    mean_and_var(t, h, carried)
    if t - h.begun < 2:
        h.gain = 0.0


@register
class MARS(CautiousFamily):
    r"""MARS: AdamW of gradients whose variance is reduced by the gradient of the last step.

    .. math::
        h &= \mathrm{clip}(r g) \\
        c &= h + \gamma \frac{\beta_1}{1 - \beta_1} (h - p), \qquad p \leftarrow h \\
        c &\leftarrow c / \max(1, \|c\|) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) c, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) c^2 \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} \Big/
            \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) + \lambda w \right)

    with :math:`c = h` in the first update of a parameter. This is the approximate form of
    MARS-AdamW: :math:`p` is the gradient of the last batch at the last weights, so one gradient per
    step is enough. The norm is that of the whole tensor, even in a lazy update.

    Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
    Models", arXiv:2411.10438. The authors' code has :math:`p = 0` in the first update, and by
    default updates vectors with AdamW instead: use a :doc:`group </structures>` for these.

    State: the tuple :math:`(m, v, p)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.003; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.95, 0.99.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    gamma : float
        Strength of the correction :math:`\gamma`, at least 0; with 0 it is AdamW with a clip of
        the norm of each tensor. Default 0.025.
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
    >>> updater = optimizer.get_updater(optimizer.MARS(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([0.3, -0.4], [0.1, -0.4]):
    ...     updater(0, np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8297, 1.2   ])
    """

    learning_rate: RateAttribute = arg(default=0.003)
    beta1: float = arg(default=0.95)
    beta2: float = arg(default=0.99)
    gamma: float = arg(default=0.025, check=Real(least=0))

    plain = mars

    @corrected(started, "begun")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "mean_scale": 1.0,
            "var_scale": 1.0,
            "gain": self.gamma * self.beta1 / (1 - self.beta1),
            "shorten": 1.0,
            "begun": float(self.begin_num_update),
        }
