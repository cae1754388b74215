"""LARS: a learning rate for each layer."""

import math
from collections.abc import Mapping
from typing import Any

from fastopt.arguments import flag, number
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, Sums, rule
from fastopt.kernels.scalars import COMMON
from fastopt.optimizer.base import Index, register
from fastopt.optimizer.sgd import SGD, MomentumOptimizer, descend, roll

__all__ = ["LARS", "lars", "lars_momentum", "lars_sums"]

FIELDS = (*COMMON, "eta", "epsilon")


def lars_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Squares of the weight and of the raw gradient."""
    return weight * weight, grad * grad


def lars_finish(sums: Sums, h: Hyper) -> None:
    """Scale the rate to the layer, unless one of the norms is 0."""
    weight, grad = math.sqrt(sums[0]), math.sqrt(sums[1])
    if weight == 0 or grad == 0:
        return
    h.lr = h.lr * h.eta * weight / (grad * h.rescale_grad + h.wd * weight + h.epsilon)


@rule(hyper=FIELDS, passes=((lars_sums, lars_finish),))
def lars(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent at the layer's rate."""
    return descend(weight, grad, h), ()


@rule(
    state=("mom",),
    hyper=(*FIELDS, "momentum"),
    passes=((lars_sums, lars_finish),),
)
def lars_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum at the layer's rate."""
    weight, mom = roll(weight, grad, state[0], h)
    return weight, (mom,)


@register
class LARS(MomentumOptimizer):
    r"""LARS: gradient descent at a rate of its own for each layer.

    .. math::
        \eta' &= \eta \frac{\eta_0 \|w\|}{r \|g\| + \lambda \|w\| + \epsilon} \\
        m &\leftarrow \mu m - \eta' (\mathrm{clip}(r g) + \lambda w) \\
        w &\leftarrow w + m

    with :math:`\eta_0` = `eta`. Parameters whose name ends in ``gamma``, ``beta`` or ``bias``,
    and layers where a norm is 0, keep :math:`\eta' = \eta`. Norms are added up in float64 in an
    order that does not depend on the number of threads. Weight decay reaches only names that
    end in ``_weight``.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv:1708.03888.

    State of a parameter: None, or with momentum the array :math:`m`, like the weight.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Under row-sparse gradients touch only the rows they list. Default True.
    eta : float
        Trust coefficient :math:`\eta_0`. Default 0.001.
    eps : float
        :math:`\epsilon`, at least 0. Default 0.
    momentum_correction : bool
        After a change of the rate, scale the momentum by new rate over old rate in this
        parameter's next update. Default True.
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
    >>> updater = optimizer.get_updater(optimizer.LARS(learning_rate=1.0, eta=0.1))
    >>> weight = np.array([3.0, 4.0])
    >>> updater(0, np.array([0.0, 10.0]), weight)
    >>> weight
    array([3. , 3.5])
    """

    forms = (lars, lars_momentum)
    _lazy, _master_last, _rounded_sums = True, True, True
    _decayed = ("_weight",)
    carried = ("_last_rates",)

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool | None = None,
        eta: float = 0.001,
        eps: float = 0.0,
        momentum_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(momentum=momentum, lazy_update=lazy_update, **kwargs)
        self.eta = number("eta", eta)
        self.eps = number("eps", eps, least=0)
        self.momentum_correction = flag("momentum_correction", momentum_correction)
        self._last_rates: dict[Index, float] = {}

    def _rule_of(self, index: Index) -> Rule:
        plain = self.idx2name.get(index, "").endswith(("gamma", "beta", "bias"))
        return (SGD if plain else self).forms[self.momentum != 0]

    def _hyper_of(self, index: Index, lr: float, wd: float) -> Mapping[str, float]:
        momentum, rate = self.momentum, self.learning_rate
        last = self._last_rates.get(index)
        if self.momentum_correction and last:
            momentum *= rate / last
        self._last_rates[index] = rate
        return {"momentum": momentum, "eta": self.eta, "epsilon": self.eps}
