"""Abstract base classes of optimizers with common arguments."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

from fastopt.arguments import Choice, Descriptions, Flag, OrNone, Real
from fastopt.engine.hyper import constant, corrected
from fastopt.kernels.rule import Hyper, Rule, Scalar, scalar
from fastopt.kernels.scalars import COMMON
from fastopt.kernels.variants import FIRST, varied
from fastopt.optimizer.keywords import EpsilonArguments, MomentArguments, Rate
from fastopt.optimizer.optimizer import Optimizer, bound

__all__ = [
    "FORMULA",
    "MOMENTS",
    "TRUST",
    "AdamFamily",
    "CautiousFamily",
    "MomentumFamily",
    "TrustRatioFamily",
    "mean_and_var",
]

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
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

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
def rate_times_decay(h: Hyper) -> Scalar:
    """Return the fraction by which decoupled weight decay shrinks a weight."""
    return h.lr * h.wd


class CautiousFamily(AdamFamily):
    """Abstract base of optimizers with decoupled decay and cautious and stable variants.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`AdamFamily`.
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    decoupled = True
    ratio: ClassVar[Callable[..., Any] | None] = None
    """Scalar function for stable variants: squared gradient divided by its moving average."""
    ratio_fields: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that `ratio` reads in addition to those of the rule."""
    arguments: ClassVar[Descriptions] = {"cautious": Flag(), "cautious_decay": Flag()}
    added: ClassVar[Mapping[str, Any]] = {"cautious": False, "cautious_decay": False}

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        cautious: bool = False,
        cautious_decay: bool = False,
        **common: Unpack[MomentArguments],
    ) -> None:
        self.cautious = cautious
        self.cautious_decay = cautious_decay
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)

    @property
    def plain(self) -> Rule:
        """Rule without the cautious and stable variants."""
        raise NotImplementedError

    @property
    def bounded(self) -> bool:
        """Whether the variant is stable: divides the rate by the root of the mean ratio."""
        return False

    @property
    def share(self) -> Callable[[Any], Any]:
        """Scalar function that returns the fraction by which decay shrinks a weight."""
        return rate_times_decay

    @property
    def rule(self) -> Rule:
        """Rule of the selected variant."""
        flags = self.cautious, self.cautious_decay, self.bounded
        return varied(self.plain, self.share, self.ratio, self.ratio_fields, *flags)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.cautious_decay and self.sparse_decay != "touched":
            raise ValueError(
                "cautious_decay=True decays by the gradient's sign, so it needs "
                f"sparse_decay='touched', got {self.sparse_decay!r}"
            )
        if self.bounded and self.sparse_decay == "catch_up":
            raise ValueError("stable=True decays at the tensor's rate: use sparse_decay='dense'")

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {**super().hyper(t, lr, wd), **FIRST}  # plain variants do not read FIRST


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
    def rule(self) -> Rule:
        """Rule with a momentum buffer, or without one if `momentum` is 0."""
        return self.forms[self.momentum != 0]

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"momentum": self.momentum}


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
