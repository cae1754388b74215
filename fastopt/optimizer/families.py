"""Abstract base classes of optimizers with common arguments."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from fastopt.arguments import FLAG, Choice, OrNone, Real, alias, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, decayed, moments, peak_moments
from fastopt.kernels.variants import (
    Traits,
    Variant,
    beside_decay,
    no_decay,
    rate_times_decay,
    varied,
)
from fastopt.optimizer.optimizer import Optimizer, bound, corrected
from fastopt.optimizer.rates import RateAttribute

Formula = Literal["mxnet", "torch"]

FORMULA = Choice("mxnet", "torch")
"""Argument of classes with two formulas: the library whose formula is computed."""

MOMENTS = (*COMMON, "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "epsilon")
"""Hyper-parameters set by :meth:`AdamFamily.hyper` and the base class."""

TRUST = (*MOMENTS, "mean_scale", "var_scale", "lower_bound", "upper_bound")
"""Hyper-parameters set by :meth:`TrustRatioFamily.hyper` and the base class."""


def mean_and_var(t: Scalar, h: Hyper, carried: Any) -> None:
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
    slots: Any = {"signed": ("mean",), "nonnegative": ("var",), "hyper": hyper}
    return (
        rule(state=("mean", "var"), **slots)(plain),
        rule(state=("mean", "var", "peak"), **slots)(amsgrad),
    )


VARIANTS = ("cautious", "cautious_decay", "stable")


class Varied(Optimizer):
    """Abstract base of optimizers whose rule may have cautious and stable variants.

    A class declares those that it has as arguments.

    Parameters
    ----------
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    stable : bool
        Bound the root mean square of the tensor's step. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    unlisted = Optimizer.unlisted | {
        *("decays", "plain", "ratio", "ratio_fields", "seen", "traits", "variant", "variants"),
    }
    variants: ClassVar[tuple[str, ...]] = ()
    """Those of the arguments that the class has."""
    ratio: ClassVar[Callable[..., Any] | None] = None
    """Scalar function for stable variants: squared gradient divided by its moving average."""
    ratio_fields: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that `ratio` reads in addition to those of the rule."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.variants = tuple(name for name in VARIANTS if cls.takes(name))

    @property
    def rule(self) -> Rule | None:
        """Rule of the selected variant; a class without variants sets ``rule = its_rule``."""
        plain, which = self.plain, self.variant
        return varied(plain, self.traits, which) if plain is not None and any(which) else plain

    @property
    def plain(self) -> Rule | None:
        """Rule without its variants."""
        return None

    @property
    def variant(self) -> Variant:
        """The selected variant."""
        own = vars(self)
        return Variant(*[own.get(name, False) for name in Variant._fields])

    @property
    def seen(self) -> Callable[..., Any]:
        """Scalar function ``(weight, grad, h)``: the gradient that moving averages average."""
        return beside_decay if self.decoupled else decayed

    @property
    def decays(self) -> Callable[..., Any]:
        """Scalar function ``(weight, h)``: what decoupled decay subtracts from a weight."""
        return rate_times_decay if self.decoupled else no_decay

    @property
    def traits(self) -> Traits:
        """How the plain rule uses gradient and weight decay, from which variants are derived."""
        return Traits(self.seen, self.decays, self.decoupled, self.ratio, self.ratio_fields)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.sparse_decay == "touched":
            return
        if self.variant.cautious_decay:
            raise ValueError(
                "cautious_decay=True decays by the gradient's sign, so it needs "
                f"sparse_decay='touched', got {self.sparse_decay!r}"
            )
        if self.variant.stable and self.sparse_decay == "catch_up":
            raise ValueError("stable=True decays at the tensor's rate: use sparse_decay='dense'")


class AdamFamily(Varied):
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


class CautiousFamily(AdamFamily):
    """Abstract base of optimizers with decoupled decay and cautious variants.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`AdamFamily`.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`, `cautious` and `cautious_decay`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    decoupled = True
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)


class StableFamily(CautiousFamily):
    """Abstract base of optimizers with decoupled decay and cautious and stable variants.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`AdamFamily`.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`, `cautious`, `cautious_decay`, `stable`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)


class MomentumFamily(Varied):
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
    def plain(self) -> Rule:
        """Rule with a momentum buffer, or without one if `momentum` is 0."""
        return self.forms[self.momentum != 0]

    @property
    def variant(self) -> Variant:
        """The selected variant; without momentum, steps have the sign of the gradient anyway."""
        return super().variant if self.momentum else Variant()


class TrustRatioFamily(AdamFamily):
    """Abstract base of optimizers with a trust ratio: norm of the weight over norm of the step.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`AdamFamily`; the default of `epsilon` is 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds of the weight norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the bias of the moving averages. Default True.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    epsilon: float = arg(default=1e-06)
    lower_bound: float | None = arg(default=None, check=OrNone(Real(least=0, infinite=True)))
    upper_bound: float | None = arg(default=None, check=OrNone(Real(least=0, infinite=True)))
    bias_correction: bool = arg(default=True, check=FLAG)

    @corrected(mean_and_var, when=lambda self: self.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "lower_bound": self.lower_bound or 0.0,
            "upper_bound": bound("upper_bound", self.upper_bound),
        }
