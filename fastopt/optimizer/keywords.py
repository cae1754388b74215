"""Types of the keyword arguments that optimizer constructors pass on to their base class."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from fastopt._engine.per_index import Index
from fastopt.lr_scheduler.base import Schedule

__all__ = [
    "AdamArguments",
    "BetaArguments",
    "CautiousArguments",
    "CautiousBetaArguments",
    "CommonArguments",
    "Correction",
    "CoupledArguments",
    "EpsArguments",
    "EpsilonArguments",
    "Formula",
    "LayerArguments",
    "MatrixArguments",
    "MomentArguments",
    "MomentumArguments",
    "MuonArguments",
    "Names",
    "Rate",
    "RatedArguments",
    "RatedEpsArguments",
    "ScaledArguments",
    "StableArguments",
    "TripleArguments",
]

Rate = float | Schedule | None
"""A learning rate or a schedule."""

Formula = Literal["mxnet", "torch"]
Correction = Literal["next", "present"]


class Betas(TypedDict, total=False):
    """`beta1` and `beta2` as a pair."""

    betas: tuple[float, float]


class Eps(TypedDict, total=False):
    """Another name of `epsilon`."""

    eps: float


class Epsilon(TypedDict, total=False):
    """Another name of `eps`."""

    epsilon: float


class CommonNames(TypedDict, total=False):
    """Aliases of arguments of every optimizer."""

    lr: Rate
    weight_decay: float


class Names(CommonNames, Betas, Eps, Epsilon, total=False):
    """Aliases of arguments."""


class Shared(CommonNames, total=False):
    """Arguments of every optimizer that no class declares itself."""

    rescale_grad: float
    param_idx2name: Mapping[Index, str] | None
    wd: float
    clip_gradient: float | None
    lr_scheduler: Schedule | None
    sym: Any
    begin_num_update: int
    param_dict: Mapping[Index, Any] | None
    seed: int
    sparse_decay: Literal["touched", "catch_up", "dense"]
    rounding: Literal["nearest", "stochastic"]
    master: Literal["float32", "split"]
    state_dtype: Literal["bfloat16", "int8"] | None
    state_min_size: int | None
    corrected_decay: float | None
    maximize: bool


class Precise(Shared, total=False):
    """`Shared` and `multi_precision`."""

    multi_precision: bool


class RatedArguments(Precise, total=False):
    """Arguments of every optimizer except `learning_rate`."""

    lazy_update: bool | None


class MomentumArguments(Precise, total=False):
    """Arguments of every optimizer except `lazy_update`."""

    learning_rate: Rate


class ScaledArguments(Shared, total=False):
    """Arguments of every optimizer except `multi_precision`."""

    learning_rate: Rate
    lazy_update: bool | None


class CommonArguments(ScaledArguments, total=False):
    """Arguments of every optimizer."""

    multi_precision: bool


class BetaArguments(RatedArguments, Betas, total=False):
    """Arguments besides `learning_rate`, `beta1` and `beta2`."""


class MomentArguments(BetaArguments, Eps, total=False):
    """Arguments besides `learning_rate`, `beta1`, `beta2` and `epsilon`."""


class Masked(TypedDict, total=False):
    """Cautious variants of rules with momentum."""

    cautious: bool


class Cautious(Masked, total=False):
    """Cautious variants of rules with decoupled weight decay."""

    cautious_decay: bool


class Stable(TypedDict, total=False):
    """Stable variants of rules that divide by the root of a second moment."""

    stable: bool


class CautiousArguments(MomentArguments, Cautious, total=False):
    """`MomentArguments` of optimizers with cautious variants."""


class StableArguments(CautiousArguments, Stable, total=False):
    """`CautiousArguments` of optimizers with stable variants."""


class CoupledArguments(MomentArguments, Masked, Stable, total=False):
    """`MomentArguments` of optimizers with cautious and stable variants and coupled decay."""


class CautiousBetaArguments(BetaArguments, Cautious, total=False):
    """`BetaArguments` of optimizers with cautious variants."""


class TripleArguments(RatedArguments, Eps, total=False):
    """Arguments besides `learning_rate`, `beta1`, `beta2`, `beta3` and `epsilon`."""

    betas: tuple[float, float, float]


class AdamArguments(Precise, Betas, Eps, Masked, Stable, total=False):
    """Arguments besides those that :class:`~fastopt.optimizer.Adam` declares itself."""


class RatedEpsArguments(RatedArguments, Eps, total=False):
    """Arguments besides `learning_rate` and `epsilon`."""


class EpsArguments(CommonArguments, Eps, total=False):
    """Arguments besides `epsilon`."""


class EpsilonArguments(CommonArguments, Epsilon, total=False):
    """Arguments besides `eps`."""


class LayerArguments(MomentumArguments, Epsilon, total=False):
    """Arguments besides `eps` and `lazy_update`."""


class MatrixFamilyArguments(RatedArguments, Betas, Eps, Epsilon, Cautious, Stable, total=False):
    """Arguments besides `learning_rate`, with the aliases and variants of all matrix optimizers."""


class MatrixArguments(RatedArguments, Epsilon, Cautious, total=False):
    """Arguments besides `learning_rate` and `eps` of optimizers with cautious variants."""


class CautiousFactoredArguments(RatedArguments, Cautious, total=False):
    """Arguments besides those that :class:`~fastopt.optimizer.CAME` declares itself."""

    betas: tuple[float, float, float]


class OrthogonalArguments(MatrixArguments, Eps, total=False):
    """Arguments of every optimizer that orthogonalizes directions like Muon."""

    coefficients: Literal["polar", "polar_express", "quintic"]
    steps: int
    split: Mapping[str, int | Sequence[int]] | None
    fallback: Any
    fallback_for: str | Sequence[str] | None


class MuonArguments(OrthogonalArguments, total=False):
    """Arguments besides `learning_rate` and `momentum` of relatives of Muon."""

    nesterov: bool
    adjust: Literal["rms", "original", "spectral"]
