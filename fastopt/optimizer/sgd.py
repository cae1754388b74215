"""Stochastic gradient descent, with and without momentum."""

import warnings
from typing import Unpack

from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed
from fastopt.optimizer.families import CautiousMomentumFamily
from fastopt.optimizer.keywords import CautiousMomentumArguments
from fastopt.optimizer.optimizer import register

__all__ = ["SGD", "ccSGD", "sgd", "sgd_momentum"]


@rule(hyper=COMMON)
def sgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent."""
    return weight - h.lr * decayed(weight, grad, h), ()


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def sgd_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which includes the learning rate."""
    mom = h.momentum * state[0] - h.lr * decayed(weight, grad, h)
    return weight + mom, (mom,)


@register
class SGD(CautiousMomentumFamily):
    r"""Stochastic gradient descent with momentum.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \mu m - \eta h \\
        w &\leftarrow w + m

    with rescale factor :math:`r`, learning rate :math:`\eta`, weight decay :math:`\lambda` and
    momentum :math:`\mu`; without momentum :math:`w \leftarrow w - \eta h`. Source: Polyak, "Some
    methods of speeding up the convergence of iteration methods" (1964).

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.1, momentum=0.9))
    >>> weight = np.ones(2)
    >>> for _ in range(2):
    ...     updater(0, np.ones(2), weight)
    >>> weight
    array([0.71, 0.71])
    """

    forms = (sgd, sgd_momentum)
    lazy_by_default = master_last = True

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool | None = None,
        **common: Unpack[CautiousMomentumArguments],
    ) -> None:
        super().__init__(momentum=momentum, lazy_update=lazy_update, **common)


@register
class ccSGD(SGD):
    """Deprecated alias of :class:`SGD`.

    Parameters
    ----------
    momentum, lazy_update, cautious
        See :class:`SGD`.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Examples
    --------
    >>> import pytest
    >>> from fastopt import optimizer
    >>> with pytest.warns(DeprecationWarning, match="use SGD"):
    ...     _ = optimizer.create("ccsgd", momentum=0.9)
    """

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool | None = None,
        **common: Unpack[CautiousMomentumArguments],
    ) -> None:
        warnings.warn("ccSGD is deprecated, use SGD", DeprecationWarning, stacklevel=3)
        super().__init__(momentum, lazy_update, **common)
