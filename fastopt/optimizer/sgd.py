"""Stochastic gradient descent, with and without momentum."""

import warnings
from collections.abc import Mapping
from typing import Any

from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, rescaled
from fastopt.optimizer.families import FORMULA, Formula, MomentumFamily
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(hyper=COMMON)
def sgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent."""
    return weight - h.lr * decayed(weight, grad, h), ()


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def sgd_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which includes the learning rate."""
    mom = h.momentum * state[0] - h.lr * decayed(weight, grad, h)
    return weight + mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum", "share"))
def sgd_momentum_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which excludes the learning rate."""
    mom = h.momentum * state[0] + h.share * decayed(weight, grad, h)
    return weight - h.lr * mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def sgdw_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which includes the learning rate, and decoupled decay."""
    mom = h.momentum * state[0] - h.lr * rescaled(grad, h)
    return weight - h.lr * h.wd * weight + mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum", "share"))
def sgdw_momentum_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which excludes the learning rate, and decoupled decay."""
    mom = h.momentum * state[0] + h.share * rescaled(grad, h)
    return weight - h.lr * h.wd * weight - h.lr * mom, (mom,)


FORMS = {
    ("mxnet", False): sgd_momentum,
    ("mxnet", True): sgdw_momentum,
    ("torch", False): sgd_momentum_of_torch,
    ("torch", True): sgdw_momentum_of_torch,
}
"""Rule with momentum of each formula, with coupled and decoupled decay."""


def first_undamped(t: Scalar, h: Hyper, carried: Any) -> None:
    """Start the buffer with the whole gradient."""
    if t == 1:
        h.share = 1.0


@register
class SGD(MomentumFamily):
    r"""Stochastic gradient descent with momentum.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \mu m - \eta h \\
        w &\leftarrow w + m

    with rescale factor :math:`r`, learning rate :math:`\eta`, weight decay :math:`\lambda` and
    momentum :math:`\mu`; without momentum :math:`w \leftarrow w - \eta h`.

    ``formula="torch"`` uses the formula of torch.optim.SGD, whose buffer does not include the
    learning rate. The two differ after a change of the learning rate: here the steps of the past
    keep the rate that they were taken with, in torch they take the new one.

    .. math::
        m \leftarrow \mu m + (1 - \tau) h, \qquad w \leftarrow w - \eta m

    with :math:`\tau` = `dampening`, which the first update of a parameter does not apply:
    :math:`m = h`. With `decouple` (SGDW), decay is decoupled from the momentum:
    :math:`h = \mathrm{clip}(r g)`, and :math:`\eta \lambda w` is subtracted from the weight.

    Sources: Polyak, "Some methods of speeding up the convergence of iteration methods" (1964);
    `decouple`: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101,
    algorithm 1.

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
    formula : str
        'mxnet' or 'torch', where `learning_rate` is by default 0.001 instead of 0.01. Default
        'mxnet'.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    dampening : float
        :math:`\tau`, from 0 to 1; needs ``formula="torch"``. Default 0.
    decouple : bool
        Use decoupled weight decay. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or `dampening` is given without torch's formula.

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

    With the buffer of torch, which dampening keeps smaller:

    >>> updater = optimizer.get_updater(
    ...     optimizer.SGD(learning_rate=0.1, momentum=0.9, formula="torch", dampening=0.5)
    ... )
    >>> weight = np.ones(2)
    >>> for _ in range(2):
    ...     updater(0, np.ones(2), weight)
    >>> weight.round(6)
    array([0.76, 0.76])
    """

    lazy_by_default = master_last = True
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    dampening: float = arg(default=0.0, check=Real(least=0, most=1), kw_only=True, new=True)
    decouple: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=None, kw_only=True, torch=0.001)
    positional = ("momentum", "lazy_update")

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.dampening and self.formula != "torch":
            raise ValueError(f"dampening={self.dampening} needs formula='torch'")

    @property
    def forms(self) -> tuple[Rule, Rule]:  # type: ignore[override]
        """Rules without and with momentum; without it both kinds of decay are the same."""
        return sgd, FORMS[self.formula, self.decouple]

    @property
    def decoupled(self) -> bool:  # type: ignore[override]
        """Whether weight decay is decoupled from the gradient."""
        return self.decouple

    @corrected(first_undamped, "share", when=lambda made: made.dampening != 0)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"momentum": self.momentum, "share": 1 - self.dampening}


@register
class ccSGD(SGD):
    """Deprecated alias of :class:`SGD`.

    Parameters
    ----------
    momentum, lazy_update, formula, cautious, dampening, decouple
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

    def _initialize(self, values: dict[str, Any]) -> None:
        warnings.warn("ccSGD is deprecated, use SGD", DeprecationWarning, stacklevel=4)
        super()._initialize(values)
