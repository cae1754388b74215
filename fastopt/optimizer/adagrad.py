"""AdaGrad."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from fastopt.arguments import Descriptions, Real, Renamed
from fastopt.engine.hyper import constant
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, rescaled
from fastopt.optimizer.optimizer import Optimizer, register

__all__ = ["AdaGrad", "adagrad"]


@rule(state=("history",), hyper=(*COMMON, "epsilon"))
def adagrad(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient over the root of its squares' sum, with decoupled decay."""
    grad = rescaled(grad, h)
    history = state[0] + grad * grad
    step = grad / math.sqrt(history + h.epsilon) + h.wd * weight
    return weight - h.lr * step, (history,)


@register
class AdaGrad(Optimizer):
    r"""AdaGrad, with decoupled decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        H &\leftarrow H + h^2 \\
        w &\leftarrow w - \eta \left( \frac{h}{\sqrt{H + \epsilon}} + \lambda w \right)

    With `eps` 0 an element whose gradient has always been 0 becomes NaN. Source: Duchi, Hazan
    and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization",
    JMLR 12 (2011).

    State of a parameter: the array :math:`H`, like the weight.

    Parameters
    ----------
    eps : float
        :math:`\epsilon`, at least 0. Default 1e-7.
    **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.AdaGrad(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = adagrad
    lazy_by_default = decoupled = True
    arguments: ClassVar[Descriptions] = {"float_stable_eps": Renamed("eps", Real(least=0))}

    def __init__(self, eps: float = 1e-7, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.float_stable_eps = eps

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"epsilon": self.float_stable_eps}
