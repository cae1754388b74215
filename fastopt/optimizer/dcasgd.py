"""DCASGD: asynchronous gradient descent with delay compensation."""

from typing import Any

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, rescaled
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.optimizer import Array, Index, register


@scalar
def compensated(weight: Scalar, grad: Scalar, previous: Scalar, h: Hyper) -> Scalar:
    """Return the gradient with decay and the compensation for the change since `previous`."""
    grad = rescaled(grad, h)
    return grad + h.wd * weight + h.lamda * grad * grad * (weight - previous)


@rule(state=("previous",), hyper=(*COMMON, "lamda"))
def dcasgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Delay-compensated gradient descent."""
    return weight - h.lr * compensated(weight, grad, state[0], h), (weight,)


@rule(state=("mom", "previous"), hyper=(*COMMON, "lamda", "momentum"))
def dcasgd_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Delay-compensated gradient descent with momentum."""
    mom, previous = state
    mom = h.momentum * mom - h.lr * compensated(weight, grad, previous, h)
    return weight + mom, (mom, weight)


@register
class DCASGD(MomentumFamily):
    r"""DCASGD: gradient descent with compensation for the delay of asynchronous gradients.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \mu m - \eta (h + \lambda w + \lambda_c h^2 (w - p)) \\
        p &\leftarrow w, \qquad w \leftarrow w + m

    with :math:`\lambda_c` = `lamda` and :math:`p` the weight before the previous step.

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation",
    arXiv:1609.08326.

    State: the tuple :math:`(m, p)` of arrays in the weight's shape; :math:`m` is None
    without momentum, and :math:`p` starts as a copy of the weight.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lamda : float
        Strength of the compensation. Default 0.04.
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
    >>> updater = optimizer.get_updater(optimizer.DCASGD(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.ones(2), weight)
    >>> weight
    array([0.9, 0.9])
    """

    forms = (dcasgd, dcasgd_momentum)
    lamda: float = arg(default=0.04, check=Real())

    copied = ("previous",)

    def create_state(self, index: Index, weight: Array) -> Any:
        """Create the momentum buffer (None without momentum) and a copy of the weight."""
        state = super().create_state(index, weight)
        return state if self.momentum else (None, state)
