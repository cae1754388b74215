"""Abstract base classes of optimizers with common arguments."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

from fastopt.arguments import Choice, Descriptions, Flag, OrNone, Real
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, scalar
from fastopt.kernels.scalars import COMMON, decayed
from fastopt.kernels.variants import Traits, Variant, beside_decay, no_decay, varied
from fastopt.optimizer.keywords import (
    CautiousArguments,
    EpsilonArguments,
    MomentArguments,
    Rate,
    StableArguments,
)
from fastopt.optimizer.optimizer import Optimizer, bound, constant, corrected

__all__ = [
    "FORMULA",
    "MOMENTS",
    "TRUST",
    "AdamFamily",
    "CautiousFamily",
    "CautiousMomentumFamily",
    "CoupledVariants",
    "MomentumFamily",
    "StableFamily",
    "TrustRatioFamily",
    "VariantFlags",
    "Varied",
    "biased_ratio",
    "mean_and_var",
    "over",
    "rate_times_decay",
    "scaled_ratio",
    "shrunk_by",
]

FLAG = Flag()

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

    arguments: ClassVar[Descriptions] = {
        "beta1": Real(least=0, below=1),
        "beta2": Real(least=0, below=1),
        "epsilon": Real(least=0),
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **common: Unpack[MomentArguments],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self._assign(beta1=beta1, beta2=beta2, epsilon=epsilon)

    beta1: float
    beta2: float
    epsilon: float

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "beta1": self.beta1,
            "one_minus_beta1": 1 - self.beta1,
            "beta2": self.beta2,
            "one_minus_beta2": 1 - self.beta2,
            "epsilon": self.epsilon,
        }


@scalar
def rate_times_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decoupled decay with the learning rate subtracts from a weight."""
    return h.lr * h.wd * weight


@scalar
def shrunk_by(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decoupled decay subtracts from a weight, with the factor ``shrink``."""
    return (type(weight)(1) - h.shrink) * weight


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


class VariantFlags(Optimizer):
    """Abstract base of optimizers with cautious and stable variants.

    Parameters
    ----------
    *args
        Arguments of the next base class.
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    stable : bool
        Bound the root mean square of the tensor's step. Default False.
    **common
        Arguments of the next base class.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    unlisted = Optimizer.unlisted | {
        *("decays", "plain", "ratio", "ratio_fields", "seen", "traits", "variant", "variants"),
    }
    variants: ClassVar[tuple[str, ...]] = ()
    """Arguments above that the class has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = vars(cls)
        cls.arguments = {**own.get("arguments", {}), **dict.fromkeys(cls.variants, FLAG)}
        cls.added = {**own.get("added", {}), **dict.fromkeys(cls.variants, False)}
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        *args: Any,
        cautious: bool = False,
        cautious_decay: bool = False,
        stable: bool = False,
        **common: Any,
    ) -> None:
        given = {"cautious": cautious, "cautious_decay": cautious_decay, "stable": stable}
        self._assign(**{name: given[name] for name in self.variants})
        super().__init__(*args, **common)

    @property
    def variant(self) -> Variant:
        """The selected variant."""
        own = vars(self)
        return Variant(*[own.get(name, False) for name in Variant._fields])

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


class Varied(VariantFlags):
    """Abstract base of optimizers whose cautious and stable variants are derived from their rule.

    Parameters
    ----------
    *args, cautious, cautious_decay, stable, **common
        See :class:`VariantFlags`.
    """

    ratio: ClassVar[Callable[..., Any] | None] = None
    """Scalar function for stable variants: squared gradient divided by its moving average."""
    ratio_fields: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that `ratio` reads in addition to those of the rule."""

    @property
    def plain(self) -> Rule:
        """Rule without the cautious and stable variants."""
        raise NotImplementedError

    @property
    def decays(self) -> Callable[..., Any]:
        """Scalar function ``(weight, h)``: what decoupled decay subtracts from a weight."""
        return rate_times_decay

    @property
    def seen(self) -> Callable[..., Any]:
        """Scalar function ``(weight, grad, h)``: the gradient that moving averages average."""
        return beside_decay

    @property
    def traits(self) -> Traits:
        """How the rule uses gradient and weight decay; by default the decay is decoupled."""
        return Traits(self.seen, self.decays, True, self.ratio, self.ratio_fields)

    @property
    def rule(self) -> Rule:
        """Rule of the selected variant."""
        which = self.variant
        return varied(self.plain, self.traits, which) if any(which) else self.plain


class CoupledVariants(Varied):
    """Abstract base of optimizers with variants whose decay is part of the gradient.

    Parameters
    ----------
    *args, cautious, stable, **common
        See :class:`VariantFlags`. The sign of the gradient is that of the gradient with decay.
    """

    variants: ClassVar[tuple[str, ...]] = ("cautious",)

    @property
    def seen(self) -> Callable[..., Any]:
        """See :attr:`Varied.seen`."""
        return decayed

    @property
    def traits(self) -> Traits:
        """See :attr:`Varied.traits`."""
        return Traits(self.seen, no_decay, False, self.ratio, self.ratio_fields)


class CautiousFamily(Varied, AdamFamily):
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
    variants: ClassVar[tuple[str, ...]] = ("cautious", "cautious_decay")

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **common: Unpack[CautiousArguments],
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)


class StableFamily(Varied, AdamFamily):
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

    decoupled = True
    variants: ClassVar[tuple[str, ...]] = ("cautious", "cautious_decay", "stable")

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **common: Unpack[StableArguments],
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)


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

    forms: tuple[Rule, Rule]
    """Rules without and with momentum."""

    arguments: ClassVar[Descriptions] = {"momentum": Real()}

    def __init__(self, momentum: float = 0.0, **common: Unpack[EpsilonArguments]) -> None:
        self.momentum = momentum
        super().__init__(**common)

    @property
    def plain(self) -> Rule:
        """Rule with a momentum buffer, or without one if `momentum` is 0."""
        return self.forms[self.momentum != 0]

    @property
    def rule(self) -> Rule:
        """Rule of the optimizer."""
        return self.plain

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"momentum": self.momentum}


class CautiousMomentumFamily(CoupledVariants, MomentumFamily):
    """Abstract base of optimizers with optional momentum and cautious variants.

    Parameters
    ----------
    momentum : float
        Momentum; 0 selects the rule without a momentum buffer, whose steps always have the sign of
        the gradient, so that `cautious` has no effect.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`, and `cautious` of
        :class:`VariantFlags`.

    Raises
    ------
    ValueError
        `momentum` is NaN or infinite.
    """

    plain = MomentumFamily.plain

    def __init__(
        self, momentum: float = 0.0, *, cautious: bool = False, **common: Unpack[EpsilonArguments]
    ) -> None:
        super().__init__(momentum=momentum, cautious=cautious, **common)

    @property
    def variant(self) -> Variant:
        """See :attr:`Varied.variant`."""
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

    measured: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that the rule's reductions compute."""

    arguments: ClassVar[Descriptions] = {
        "lower_bound": OrNone(Real(least=0, infinite=True)),
        "upper_bound": OrNone(Real(least=0, infinite=True)),
        "bias_correction": Flag(),
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        **common: Unpack[MomentArguments],
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound
        self.bias_correction = bias_correction

    @corrected(mean_and_var, when=lambda self: self.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "mean_scale": 1.0,
            "var_scale": 1.0,
            "lower_bound": self.lower_bound or 0.0,
            "upper_bound": bound("upper_bound", self.upper_bound),
            **dict.fromkeys(self.measured, 1.0),
        }
