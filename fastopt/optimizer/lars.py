"""LARS: layer-wise adaptive learning rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.arguments import FLAG, Real, TableOf, alias, arg, kept
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Sums
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.optimizer import Index, PerIndex, corrected, endings, register
from fastopt.optimizer.sgd import sgd, sgd_momentum


def lars_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of the raw gradient."""
    return weight * weight, grad * grad


def lars_finish(sums: Sums, h: Hyper) -> None:
    """Scale the learning rate of the layer, unless one of the norms is 0."""
    weight, grad = math.sqrt(sums[0]), math.sqrt(sums[1])
    if weight == 0 or grad == 0:
        return
    grad = grad * (h.rescale_grad * h.direction)
    h.lr = h.lr * h.eta * weight / (grad + h.wd * weight + h.epsilon)


PASSES, FIELDS = ((lars_sums, lars_finish),), ("eta", "epsilon", "direction")
lars = sgd.with_passes("lars", PASSES, *FIELDS)
lars_momentum = sgd_momentum.with_passes("lars_momentum", PASSES, *FIELDS)


def corrected_momentum(t: Scalar, h: Hyper, carried: Any) -> None:
    """Scale the momentum by the change of the learning rate since the last update."""
    if h.corrects != 0 and carried[0] != 0:
        h.momentum = h.momentum * (h.rate / carried[0])
    carried[0] = h.rate


@register
class LARS(MomentumFamily):
    r"""LARS: gradient descent with a layer-wise learning rate.

    .. math::
        \eta' &= \eta \frac{\eta_0 \|w\|}{r \|g\| + \lambda \|w\| + \epsilon} \\
        m &\leftarrow \mu m - \eta' (\mathrm{clip}(r g) + \lambda w) \\
        w &\leftarrow w + m

    with :math:`\eta_0` = `eta`. Parameters whose name ends in ``gamma``, ``beta`` or ``bias``,
    and layers with a norm of 0, use :math:`\eta' = \eta`. Norms are summed in float64, in an order
    that does not depend on the number of threads. By default weight decay applies only to names
    whose last part, after ``_``, ``.`` or ``/``, is ``weight`` or ``kernel``.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv:1708.03888.

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
    eta : float
        Trust coefficient :math:`\eta_0`. Default 0.001.
    eps : float
        :math:`\epsilon`, at least 0. Default 0.
    momentum_correction : bool
        After a change of the learning rate, multiply the momentum by the ratio of the new to the
        old learning rate in the next update of the parameter. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.LARS(learning_rate=1.0, eta=0.1))
    >>> weight = np.array([3.0, 4.0])
    >>> updater(0, np.array([0.0, 10.0]), weight)
    >>> weight
    array([3. , 3.5])
    """

    forms = (lars, lars_momentum)
    lazy_by_default = master_last = rounded_sums = True
    _decayed = endings("weight", "kernel")
    eta: float = arg(default=0.001, check=Real())
    eps: float = arg(default=0.0, check=Real(least=0))
    momentum_correction: bool = arg(default=True, check=FLAG)
    epsilon: float = alias("eps", default=1e-8, kw_only=True)
    positional = ("momentum", "lazy_update", "eta", "eps", "momentum_correction")
    _last_rates: PerIndex = kept(factory=PerIndex, check=TableOf(Real(least=0)))

    def rule_for(self, index: Index) -> Rule:
        """See :meth:`Optimizer.rule_for <fastopt.optimizer.Optimizer.rule_for>`."""
        plain = self.idx2name.get(index, "").endswith(("gamma", "beta", "bias"))
        return ((sgd, sgd_momentum) if plain else self.forms)[self.momentum != 0]

    @property
    def carried(self) -> PerIndex:
        """Learning rates of the last updates."""
        return self._last_rates

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """See :meth:`Optimizer.carried_slots`; 0 before the first update."""
        return self._last_rates.slots(indices, 0.0)

    @corrected(corrected_momentum, "momentum", "rate", "corrects", carries=True)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "eta": self.eta,
            "epsilon": self.eps,
            "corrects": float(self.momentum_correction),
        }
