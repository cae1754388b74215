"""AdaGrad."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from fastopt.arguments import Descriptions, Real, Renamed
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, rescaled
from fastopt.optimizer.families import FORMULA
from fastopt.optimizer.keywords import EpsilonArguments, Formula
from fastopt.optimizer.optimizer import Optimizer, corrected, register

__all__ = ["AdaGrad", "adagrad", "adagrad_of_torch"]


@rule(state=("history",), hyper=(*COMMON, "epsilon"))
def adagrad(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient divided by the root of the sum of its squares, with decoupled decay."""
    grad = rescaled(grad, h)
    history = state[0] + grad * grad
    step = grad / math.sqrt(history + h.epsilon) + h.wd * weight
    return weight - h.lr * step, (history,)


@rule(state=("history",), hyper=(*COMMON, "epsilon"))
def adagrad_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient with decay; epsilon is added to the root of the sum of its squares."""
    grad = decayed(weight, grad, h)
    history = state[0] + grad * grad
    return weight - h.lr * grad / (math.sqrt(history) + h.epsilon), (history,)


def falling(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the learning rate of this step."""
    h.lr = h.lr / (1 + (t - 1) * h.lr_decay)


@register
class AdaGrad(Optimizer):
    r"""AdaGrad, with decoupled weight decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        H &\leftarrow H + h^2 \\
        w &\leftarrow w - \eta \left( \frac{h}{\sqrt{H + \epsilon}} + \lambda w \right)

    ``formula="torch"`` uses the formula of torch.optim.Adagrad, where weight decay is added to the
    gradient and :math:`\epsilon` is added to the square root:

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        H &\leftarrow H + h^2, \qquad w \leftarrow w - \eta \frac{h}{\sqrt{H} + \epsilon}

    With `lr_decay` :math:`\delta`, the learning rate is :math:`\eta / (1 + (t - 1) \delta)`. If
    `eps` and `initial_accumulator_value` are 0, an element whose gradient has always been 0 becomes
    NaN. Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 12 (2011).

    State: the array :math:`H`, in the weight's shape, filled with `initial_accumulator_value`
    initially.

    Parameters
    ----------
    eps : float
        :math:`\epsilon`, at least 0. Default 1e-7, with torch's formula 1e-10.
    formula : str
        'mxnet' or 'torch', which most NumPy code by hand has too; `eps` is then by default 1e-10.
        Default 'mxnet'.
    initial_accumulator_value : float
        Initial value of :math:`H`, at least 0. Default 0; optax and TensorFlow have 0.1.
    lr_decay : float
        :math:`\delta`, at least 0. Default 0.
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
    >>> updater = optimizer.get_updater(optimizer.AdaGrad(learning_rate=0.1))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])

    With the formula of torch, whose accumulator may start above zero:

    >>> updater = optimizer.get_updater(
    ...     optimizer.AdaGrad(learning_rate=0.1, formula="torch", initial_accumulator_value=3)
    ... )
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -1.0]), weight)
    >>> weight.round(6)
    array([0.95, 1.05])
    """

    lazy_by_default = True
    arguments: ClassVar[Descriptions] = {
        "float_stable_eps": Renamed("eps", Real(least=0)),
        "formula": FORMULA,
        "initial_accumulator_value": Real(least=0),
        "lr_decay": Real(least=0),
    }
    torch_defaults: ClassVar[Mapping[str, Any]] = {"eps": 1e-10}
    added: ClassVar[Mapping[str, Any]] = {
        "formula": "mxnet",
        "initial_accumulator_value": 0.0,
        "lr_decay": 0.0,
    }

    def __init__(
        self,
        eps: float = 1e-7,
        *,
        formula: Formula = "mxnet",
        initial_accumulator_value: float = 0.0,
        lr_decay: float = 0.0,
        **common: Unpack[EpsilonArguments],
    ) -> None:
        self.float_stable_eps = eps
        self.formula = formula
        self.initial_accumulator_value = initial_accumulator_value
        self.lr_decay = lr_decay
        super().__init__(**common)

    @property
    def rule(self) -> Rule:
        """Rule of the selected formula."""
        return adagrad_of_torch if self.formula == "torch" else adagrad

    @property
    def decoupled(self) -> bool:  # type: ignore[override]
        """Whether weight decay is decoupled from the gradient."""
        return self.formula == "mxnet"

    @property
    def initial_state(self) -> float:
        """See :attr:`Optimizer.initial_state <fastopt.optimizer.Optimizer.initial_state>`."""
        return self.initial_accumulator_value

    @corrected(falling, "lr_decay", when=lambda made: made.lr_decay != 0)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"epsilon": self.float_stable_eps, "lr_decay": self.lr_decay}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr / (1 + (t - 1) * self.lr_decay) * wd
