"""AdaDelta."""

import math
from collections.abc import Mapping

from fastopt.arguments import Real, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.optimizer import Optimizer, constant, register


@rule(
    state=("acc_g", "acc_delta"),
    nonnegative=("acc_g", "acc_delta"),
    hyper=("wd", "rescale_grad", "clip_gradient", "rho", "one_minus_rho", "epsilon"),
)
def adadelta(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient times the ratio of the root mean squares of steps and gradients."""
    acc_g, acc_delta = state
    grad = rescaled(grad, h)
    acc_g = h.rho * acc_g + h.one_minus_rho * grad * grad
    delta = math.sqrt(acc_delta + h.epsilon) / math.sqrt(acc_g + h.epsilon) * grad
    acc_delta = h.rho * acc_delta + h.one_minus_rho * delta * delta
    return weight - (delta + h.wd * weight), (acc_g, acc_delta)


@register
class AdaDelta(Optimizer):
    r"""AdaDelta, with decoupled weight decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        G &\leftarrow \rho G + (1 - \rho) h^2 \\
        u &= \frac{\sqrt{D + \epsilon}}{\sqrt{G + \epsilon}} h \\
        D &\leftarrow \rho D + (1 - \rho) u^2 \\
        w &\leftarrow w - (u + \lambda w)

    There is no learning rate: learning rates, schedules and their multipliers have no effect, and
    the weight decay is not multiplied by a learning rate. Source: Zeiler, "ADADELTA: An Adaptive
    Learning Rate Method", arXiv:1212.5701.

    State: the tuple :math:`(G, D)` of arrays in the weight's shape.

    Parameters
    ----------
    rho : float
        Decay rate of :math:`G` and :math:`D`, at least 0 and below 1. Default 0.9.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-5; torch has 1e-6.
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
    >>> updater = optimizer.get_updater(optimizer.AdaDelta(rho=0.75, epsilon=1e-4))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.98, 1.02])
    """

    rule = adadelta
    decoupled = True
    corrects_decay = False
    rho: float = arg(default=0.9, check=Real(least=0, below=1))
    epsilon: float = arg(default=1e-05, check=Real(least=0))
    eps: float = alias("epsilon", default=1e-8, kw_only=True)

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"rho": self.rho, "one_minus_rho": 1 - self.rho, "epsilon": self.epsilon}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return wd
