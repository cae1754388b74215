"""Abstract base classes of optimizers with common arguments."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from fastopt.arguments import FLAG, Choice, Real, alias, arg
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, moments, peak_moments, rescaled
from fastopt.kernels.variants import Variant
from fastopt.optimizer.optimizer import Optimizer, RateAttribute

Formula = Literal["mxnet", "torch"]

FORMULA = Choice("mxnet", "torch")
"""Argument of classes with two formulas: the library whose formula is computed."""

MEAN_AND_VAR: Any = {"state": ("mean", "var"), "signed": ("mean",), "nonnegative": ("var",)}
"""Options of rules whose state is moving averages of the gradient and of its square."""

MOMENTS = (*COMMON, "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "epsilon")
"""Hyper-parameters set by :meth:`AdamFamily.hyper` and the base class."""


def squared(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the square of the rescaled and clipped gradient, for reductions."""
    grad = rescaled(grad, h)
    return (grad * grad,)


def mean_and_var(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias corrections of both moving averages."""
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.var_scale = 1 / (1 - h.beta2**t)


def moment_rules(
    name: str,
    gradient: Callable[..., Scalar],
    step: Callable[..., Scalar],
    hyper: tuple[str, ...] = MOMENTS,
) -> tuple[Rule, Rule]:
    """Return the rule of a step by moving averages of a gradient and of its square, and AMSGrad's.

    Parameters
    ----------
    name : str
        Name of the rule.
    gradient : callable
        Scalar function ``(weight, grad, h)``: the gradient to average.
    step : callable
        Scalar function ``(weight, grad, mean, var, h)`` of this gradient and the averages, which
        returns the new weight. AMSGrad has the maximum of the second average so far as `var`.
    hyper : tuple of str
        Hyper-parameters of the rule.
    """

    def plain(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
        grad = gradient(weight, grad, h)
        mean, var = moments(grad, state, h)
        return step(weight, grad, mean, var, h), (mean, var)

    def amsgrad(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
        grad = gradient(weight, grad, h)
        mean, var, peak = peak_moments(grad, state, h)
        return step(weight, grad, mean, peak, h), (mean, var, peak)

    plain.__name__ = plain.__qualname__ = name
    amsgrad.__name__ = amsgrad.__qualname__ = f"{name}_amsgrad"
    with_peak = {**MEAN_AND_VAR, "state": ("mean", "var", "peak")}
    return rule(**MEAN_AND_VAR, hyper=hyper)(plain), rule(**with_peak, hyper=hyper)(amsgrad)


class AdamFamily(Optimizer):
    """Abstract base of optimizers with the arguments `beta1`, `beta2` and `epsilon`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of the moving averages, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        Small constant that avoids division by zero, at least 0. Default 1e-8.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    learning_rate: RateAttribute = arg(default=0.001)
    beta1: float = arg(default=0.9, check=Real(least=0, below=1))
    beta2: float = arg(default=0.999, check=Real(least=0, below=1))
    epsilon: float = arg(default=1e-08, check=Real(least=0))
    betas: tuple[float, float] = alias("beta1", "beta2", default=(0.9, 0.999), kw_only=True)
    eps: float = alias("epsilon", default=1e-8, kw_only=True)


class DecoupledFamily(AdamFamily):
    """Abstract base of optimizers like Adam whose weight decay is decoupled.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`AdamFamily`.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    decoupled = True
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)


@scalar
def over(square: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Return a squared gradient over its average, at least ``epsilon**2``; 0 where both are 0."""
    floor = h.epsilon * h.epsilon
    if not var > floor:
        var = floor
    return square / var if var != type(var)(0) else var


@scalar
def biased_ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants, with the bias correction ``var_bias``."""
    return over(grad * grad * h.var_bias, state[1], h)


@scalar
def scaled_ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants, with the inverse bias correction ``var_scale``."""
    return over(grad * grad, state[1] * h.var_scale, h)


class MomentumFamily(Optimizer):
    """Abstract base of optimizers with optional momentum.

    Parameters
    ----------
    momentum : float
        Momentum; 0 selects the rule without a momentum buffer.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        `momentum` is NaN or infinite.
    """

    forms: ClassVar[tuple[Rule, Rule]]
    """Rules without and with momentum."""

    momentum: float = arg(default=0.0, check=Real())

    @property
    def base_rule(self) -> Rule:
        """Rule with a momentum buffer, or without one if `momentum` is 0."""
        return self.forms[self.momentum != 0]

    @property
    def rule_variant(self) -> Variant:
        """The selected variant; without momentum, steps have the sign of the gradient anyway."""
        return super().rule_variant if self.momentum else Variant()
