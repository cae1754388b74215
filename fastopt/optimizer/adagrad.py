"""AdaGrad, for elements and rows, and AdaDelta."""

import math
from collections.abc import Mapping
from typing import ClassVar

from fastopt.arguments import Real, alias, arg
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, decayed, rescaled
from fastopt.optimizer.families import FORMULA, Formula
from fastopt.optimizer.optimizer import Optimizer, constant, corrected, register


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


def falling(t: Scalar, h: Hyper, carried: Carried) -> None:
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdaGrad(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])

    With the formula of torch, whose accumulator may start above zero:

    >>> updater = fastopt.Updater(
    ...     fastopt.AdaGrad(lr=0.1, formula="torch", initial_accumulator_value=3)
    ... )
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -1.0]), weight)
    >>> weight.round(6)
    array([0.95, 1.05])
    """

    lazy_by_default = True
    float_stable_eps: ClassVar[float]
    eps: float = arg(default=1e-07, check=Real(least=0), stored="float_stable_eps", torch=1e-10)
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    initial_accumulator_value: float = arg(default=0.0, check=Real(least=0), kw_only=True, new=True)
    lr_decay: float = arg(default=0.0, check=Real(least=0), kw_only=True, new=True)
    epsilon: float = alias("eps", default=1e-8, kw_only=True)

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

    hyper = corrected(falling, "lr_decay", when=lambda made: made.lr_decay != 0)(Optimizer.hyper)

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr / (1 + (t - 1) * self.lr_decay) * wd


def square(grad: Scalar, h: Hyper) -> Scalar:
    """Return the squared gradient."""
    grad = rescaled(grad, h)
    return grad * grad


@rule(state=("history",), hyper=("lr", "rescale_grad", "clip_gradient", "epsilon"), row=square)
def group_adagrad(weight: Scalar, grad: Scalar, state: State, h: Hyper, mean: Scalar) -> Step:
    """Gradient divided by the root of the row's sum of mean squares."""
    history = state[0] + mean
    rate = h.lr / math.sqrt(history + h.epsilon)  # the same for the whole row
    return weight - rate * rescaled(grad, h), (history,)


@register
class GroupAdaGrad(Optimizer):
    r"""AdaGrad with one accumulator for each row, for example for embeddings.

    .. math::
        h &= \mathrm{clip}(r g) \\
        H_i &\leftarrow H_i + \frac{1}{n} \sum_j h_{ij}^2 \\
        w_{ij} &\leftarrow w_{ij} - \eta \frac{h_{ij}}{\sqrt{H_i + \epsilon}}

    for two-dimensional weights without weight decay. Source: Duchi, Hazan and Singer, "Adaptive
    Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 12 (2011), with
    rows as the coordinates.

    State: the array :math:`H` of shape (rows, 1).

    Parameters
    ----------
    eps : float
        :math:`\epsilon`, at least 0. Default 1e-5.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or, at an update, the weight does not have two
        dimensions or its weight decay is not 0.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.GroupAdaGrad(lr=0.1))
    >>> weight = np.ones((2, 2))
    >>> updater.step(np.array([[1.0, -1.0], [3.0, 4.0]]), weight)
    >>> weight.round(3)
    array([[0.9  , 1.1  ],
           [0.915, 0.887]])
    """

    rule = group_adagrad
    lazy_by_default = True
    float_stable_eps: ClassVar[float]
    eps: float = arg(default=1e-05, check=Real(least=0), stored="float_stable_eps")
    epsilon: float = alias("eps", default=1e-8, kw_only=True)

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if wd != 0:
            raise ValueError(f"GroupAdaGrad has no weight decay, got {wd}")
        return {}


@scalar
def adapted(grad: Scalar, state: State, h: Hyper) -> tuple[Scalar, State]:
    """Return the gradient times the ratio of the root mean squares of steps and gradients."""
    acc_g, acc_delta = state
    acc_g = h.rho * acc_g + h.one_minus_rho * grad * grad
    delta = math.sqrt(acc_delta + h.epsilon) / math.sqrt(acc_g + h.epsilon) * grad
    acc_delta = h.rho * acc_delta + h.one_minus_rho * delta * delta
    return delta, (acc_g, acc_delta)


@rule(
    state=("acc_g", "acc_delta"),
    nonnegative=("acc_g", "acc_delta"),
    hyper=("wd", "rescale_grad", "clip_gradient", "rho", "one_minus_rho", "epsilon"),
)
def adadelta(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step without a learning rate, and decoupled decay."""
    delta, new = adapted(rescaled(grad, h), state, h)
    return weight - (delta + h.wd * weight), new


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
        Decay rate of :math:`G` and :math:`D`, at least 0 and at most 1. Default 0.9.
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdaDelta(rho=0.75, epsilon=1e-4))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.98, 1.02])
    """

    rule = adadelta
    decoupled = True
    corrects_decay = False
    rho: float = arg(default=0.9, check=Real(least=0, most=1))
    epsilon: float = arg(default=1e-05, check=Real(least=0))
    eps: float = alias("epsilon", default=1e-8, kw_only=True)

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return wd
