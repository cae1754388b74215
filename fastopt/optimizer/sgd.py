"""Stochastic gradient descent, with and without momentum."""

from collections.abc import Mapping
from typing import Any

from fastopt.kernels.rule import Rule, rule, scalar
from fastopt.kernels.scalars import clip
from fastopt.optimizer.base import Optimizer, number, register

__all__ = ["SGD", "sgd", "sgd_momentum"]

FIELDS = ("lr", "wd", "rescale_grad", "clip_gradient")


@scalar
def decayed(weight, grad, h):
    """Clipped gradient plus the decay, which the clip does not cover."""
    return clip(h.rescale_grad * grad, h.clip_gradient) + h.wd * weight


@rule(hyper=FIELDS)
def sgd(weight, grad, state, h):
    return weight - h.lr * decayed(weight, grad, h), ()


@rule(state=("mom",), hyper=(*FIELDS, "momentum"))
def sgd_momentum(weight, grad, state, h):
    (mom,) = state
    mom = h.momentum * mom - h.lr * decayed(weight, grad, h)
    return weight + mom, (mom,)


@register
class SGD(Optimizer):
    r"""Stochastic gradient descent with momentum.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \mu m - \eta h \\
        w &\leftarrow w + m

    with rescale factor :math:`r`, rate :math:`\eta`, weight decay :math:`\lambda` and momentum
    :math:`\mu`; without momentum :math:`w \leftarrow w - \eta h`. The rate is inside the buffer.
    Momentum is that of Polyak, "Some methods of speeding up the convergence of iteration
    methods" (1964).

    State: None, or with momentum one array like the weight.

    Parameters
    ----------
    momentum : float
        Momentum, default 0. The form with a buffer is used unless it is 0.
    lazy_update : bool
        Under row-sparse gradients touch only the rows they list. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.1, momentum=0.9))
    >>> weight = np.ones(2)
    >>> for _ in range(2):
    ...     updater(0, np.ones(2), weight)
    >>> weight
    array([0.71, 0.71])
    """

    def __init__(self, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = number("momentum", momentum)
        self.lazy_update = lazy_update

    @property
    def rule(self) -> Rule:
        """The form with a buffer unless momentum is 0."""
        return sgd if self.momentum == 0 else sgd_momentum

    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper`."""
        return {"momentum": self.momentum}
