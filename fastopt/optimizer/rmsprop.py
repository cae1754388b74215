"""RMSProp, plain, with momentum, and centered."""

import math
from collections.abc import Mapping

from fastopt.arguments import FLAG, OrNone, Real, alias, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, clip, clipped_decayed, decayed
from fastopt.optimizer.families import FORMULA, Formula
from fastopt.optimizer.optimizer import (
    Array,
    Index,
    Optimizer,
    RateAttribute,
    bound,
    constant,
    register,
)

FIELDS = (*COMMON, "gamma1", "one_minus_gamma1", "epsilon", "clip_weights")


@rule(state=("n",), nonnegative=("n",), hyper=FIELDS)
def rmsprop(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient divided by the root of the moving average of its square."""
    grad = clipped_decayed(weight, grad, h)
    n = h.gamma1 * state[0] + h.one_minus_gamma1 * grad * grad
    return clip(weight - h.lr * grad / math.sqrt(n + h.epsilon), h.clip_weights), (n,)


@rule(state=("n", "delta"), nonnegative=("n",), hyper=(*FIELDS, "momentum"))
def rmsprop_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """RMSProp with momentum, which includes the learning rate."""
    n, delta = state
    grad = clipped_decayed(weight, grad, h)
    n = h.gamma1 * n + h.one_minus_gamma1 * grad * grad
    delta = h.momentum * delta - h.lr * grad / math.sqrt(n + h.epsilon)
    return clip(weight + delta, h.clip_weights), (n, delta)


@scalar
def variance(grad: Scalar, n: Scalar, mean: Scalar, h: Hyper) -> tuple[Scalar, Scalar, Scalar]:
    """Return the moving averages of the squared gradient and the gradient, and the variance."""
    n = h.gamma1 * n + h.one_minus_gamma1 * grad * grad
    mean = h.gamma1 * mean + h.one_minus_gamma1 * grad
    var = n - mean * mean
    if var < type(var)(0):  # by rounding, after many equal gradients
        var = type(var)(0)
    return n, mean, var


@rule(state=("n", "mean", "delta"), hyper=(*FIELDS, "gamma2"))
def rmsprop_centered(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient divided by its moving standard deviation, with momentum."""
    n, mean, delta = state
    grad = clipped_decayed(weight, grad, h)
    n, mean, var = variance(grad, n, mean, h)
    delta = h.gamma2 * delta - h.lr * grad / math.sqrt(var + h.epsilon)
    return clip(weight + delta, h.clip_weights), (n, mean, delta)


@rule(state=("n",), nonnegative=("n",), hyper=FIELDS)
def rmsprop_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient divided by the root of the moving average of its square; epsilon is outside it."""
    grad = decayed(weight, grad, h)
    n = h.gamma1 * state[0] + h.one_minus_gamma1 * grad * grad
    return clip(weight - h.lr * grad / (math.sqrt(n) + h.epsilon), h.clip_weights), (n,)


@rule(state=("n", "buffer"), nonnegative=("n",), hyper=(*FIELDS, "momentum"))
def rmsprop_momentum_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """RMSProp with momentum, which excludes the learning rate; epsilon is outside the root."""
    n, buffer = state
    grad = decayed(weight, grad, h)
    n = h.gamma1 * n + h.one_minus_gamma1 * grad * grad
    buffer = h.momentum * buffer + grad / (math.sqrt(n) + h.epsilon)
    return clip(weight - h.lr * buffer, h.clip_weights), (n, buffer)


@rule(state=("n", "mean", "buffer"), hyper=(*FIELDS, "gamma2"))
def rmsprop_centered_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient divided by its moving standard deviation; momentum excludes the learning rate."""
    n, mean, buffer = state
    grad = decayed(weight, grad, h)
    n, mean, var = variance(grad, n, mean, h)
    buffer = h.gamma2 * buffer + grad / (math.sqrt(var) + h.epsilon)
    return clip(weight - h.lr * buffer, h.clip_weights), (n, mean, buffer)


FORMS = {
    ("mxnet", "plain"): rmsprop,
    ("mxnet", "momentum"): rmsprop_momentum,
    ("mxnet", "centered"): rmsprop_centered,
    ("torch", "plain"): rmsprop_of_torch,
    ("torch", "momentum"): rmsprop_momentum_of_torch,
    ("torch", "centered"): rmsprop_centered_of_torch,
}
"""Rules of each formula."""


@register
class RMSProp(Optimizer):
    r"""RMSProp, plain, with momentum, or centered.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        n &\leftarrow \gamma_1 n + (1 - \gamma_1) h^2 \\
        w &\leftarrow w - \eta \frac{h}{\sqrt{n + \epsilon}}

    with `momentum` :math:`\mu`, as in TensorFlow,

    .. math::
        \Delta \leftarrow \mu \Delta - \eta \frac{h}{\sqrt{n + \epsilon}}, \qquad
        w \leftarrow w + \Delta

    or, with `centered`,

    .. math::
        m &\leftarrow \gamma_1 m + (1 - \gamma_1) h \\
        \Delta &\leftarrow \gamma_2 \Delta
            - \eta \frac{h}{\sqrt{\max(n - m^2, 0) + \epsilon}} \\
        w &\leftarrow w + \Delta

    Then the weight is clipped to ``[-clip_weights, clip_weights]``.

    ``formula="torch"`` uses the formula of torch.optim.RMSprop, where the clip does not include the
    weight decay, :math:`\epsilon` is added to the root, and the momentum buffer does not include
    the learning rate:

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        w &\leftarrow w - \eta \frac{h}{\sqrt{n} + \epsilon}

    with `momentum`,

    .. math::
        b \leftarrow \mu b + \frac{h}{\sqrt{n} + \epsilon}, \qquad w \leftarrow w - \eta b

    or, with `centered`,

    .. math::
        b \leftarrow \gamma_2 b + \frac{h}{\sqrt{\max(n - m^2, 0)} + \epsilon}, \qquad
        w \leftarrow w - \eta b

    Sources: Tieleman and Hinton, "Lecture 6.5 - RMSProp" (2012); centered: Graves, "Generating
    Sequences With Recurrent Neural Networks", arXiv:1308.0850, equations 38 to 45.

    :math:`n` starts at 0, as in torch, optax and TensorFlow 2. MobileNet and EfficientNet were
    trained with TensorFlow 1, which starts it at 1, so that the first steps are small, with
    momentum, and with a large :math:`\epsilon`: see the last example.

    State: the tuple :math:`(n,)`, with momentum :math:`(n, \Delta)` or :math:`(n, b)`, centered
    :math:`(n, m, \Delta)` or :math:`(n, m, b)`, of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001, with torch's formula 0.01; None uses the scheduler's ``base_lr``.
    gamma1 : float
        Decay rate of :math:`n` and :math:`m`, at least 0 and below 1. Default 0.9,
        with torch's formula 0.99.
    gamma2 : float
        Momentum of the centered variant. Default 0.9, with torch's formula 0.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    centered : bool
        Use the centered variant. Default False.
    clip_weights : float, optional
        Maximum magnitude of a weight. None, 0 and negative values mean no limit.
    momentum : float
        Momentum :math:`\mu` of the variant that is not centered, at least 0 and below 1. Default
        0.
    initial_accumulator_value : float
        Initial value of :math:`n`, at least 0. Default 0; TensorFlow 1 and timm have 1.
    formula : str
        'mxnet' or 'torch', whose ``alpha`` is `gamma1`; its ``momentum`` with `centered` is
        `gamma2`. The defaults are then those of torch: `learning_rate` 0.01, `gamma1` 0.99,
        `gamma2` 0. Default 'mxnet'.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or `centered` and `momentum` are given together.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.RMSProp(lr=0.1, gamma1=0.75))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.8, 1.2])

    Centered, with a momentum:

    >>> updater = fastopt.Updater(
    ...     fastopt.RMSProp(lr=0.1, gamma1=0.75, centered=True)
    ... )
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.76906, 1.23094])

    As for MobileNet:

    >>> rmsprop = fastopt.RMSProp(
    ...     lr=0.01, momentum=0.9, epsilon=0.001, initial_accumulator_value=1.0
    ... )
    >>> updater, weight = fastopt.Updater(rmsprop), np.ones(2)
    >>> updater.step(np.array([0.1, -0.5]), weight)
    >>> weight.round(6)
    array([0.998947, 1.005196])
    """

    learning_rate: RateAttribute = arg(default=0.001, torch=0.01)
    gamma1: float = arg(default=0.9, check=Real(least=0, below=1), torch=0.99)
    gamma2: float = arg(default=0.9, check=Real(), torch=0.0)
    epsilon: float = arg(default=1e-08, check=Real(least=0))
    centered: bool = arg(default=False, check=FLAG)
    clip_weights: float | None = arg(default=None, check=OrNone(Real(infinite=True)))
    momentum: float = arg(default=0.0, check=Real(least=0, below=1), kw_only=True, new=True)
    initial_accumulator_value: float = arg(default=0.0, check=Real(least=0), kw_only=True, new=True)
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    eps: float = alias("epsilon", default=1e-8, kw_only=True)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.centered and self.momentum:
            raise ValueError(
                f"centered=True has the momentum gamma2={self.gamma2}: momentum must be 0, got "
                f"{self.momentum}"
            )

    @property
    def rule(self) -> Rule:
        """Rule of the selected formula and variant."""
        form = "centered" if self.centered else "momentum" if self.momentum else "plain"
        return FORMS[self.formula, form]

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"clip_weights": bound("clip_weights", self.clip_weights)}

    def initial_of(self, slot: str) -> float:
        """See :meth:`Optimizer.initial_of <fastopt.optimizer.Optimizer.initial_of>`."""
        return self.initial_accumulator_value if slot == "n" else 0.0

    def create_state(self, index: Index, weight: Array) -> tuple[Array, ...]:
        """Create an array for each slot, always as a tuple."""
        state = super().create_state(index, weight)
        return state if isinstance(state, tuple) else (state,)
