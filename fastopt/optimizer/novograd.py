"""NovoGrad: momentum of gradients that are normalized per tensor."""

import math
from collections.abc import Callable
from typing import Any

from fastopt.arguments import FLAG, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


def square(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squared gradient."""
    grad = rescaled(grad, h)
    return (grad * grad,)


def norm(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the average of squared norms, and compute the inverse of its root."""
    var = h.beta2 * kept[0] + h.one_minus_beta2 * sums[0]
    h.inverse = 1 / (math.sqrt(var) + h.epsilon)
    return (var,)


@scalar
def normalized(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the gradient divided by the root of the second moment, plus decay."""
    return h.inverse * rescaled(grad, h) + h.wd * weight


@rule(
    state=("mom",),
    signed=("mom",),
    hyper=(*MOMENTS, "inverse"),
    passes=((square, norm),),
    kept=("var",),
)
def novograd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Momentum of normalized gradients plus decay."""
    mom = h.beta1 * state[0] + normalized(weight, grad, h)
    return weight - h.lr * mom, (mom,)


def started(t: Scalar, h: Hyper, carried: Any) -> None:
    """Initialize the average with the first squared norm."""
    if t - h.begun < 2:
        h.beta2, h.one_minus_beta2 = 0.0, 1.0


@register
class NovoGrad(AdamFamily):
    r"""NovoGrad: momentum of gradients that are normalized per tensor.

    .. math::
        h &= \mathrm{clip}(r g) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) \|h\|^2 \\
        m &\leftarrow \beta_1 m + \frac{h}{\sqrt{v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta m

    with one number :math:`v` for each tensor, which the first update sets to :math:`\|h\|^2`. The
    norm is that of the whole gradient, even in a lazy update. It is summed in float64, in an order
    that does not depend on the number of threads.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", arXiv:1905.11286.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and a zero-dimensional array.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.95, 0.98.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.NovoGrad(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([3.0, -4.0]), weight)
    >>> print(weight.round(4), updater.states[0][1])
    [0.94 1.08] 25.0
    """

    plain = novograd

    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=0.01)
    beta1: float = arg(default=0.95)
    beta2: float = arg(default=0.98)

    @property
    def seen(self) -> Callable[..., Any]:
        """See :attr:`~fastopt.optimizer.families.Varied.seen`."""
        return normalized

    @corrected(started, "begun")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), "inverse": 1.0, "begun": float(self.begin_num_update)}
