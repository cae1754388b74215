"""Keyword arguments that constructors of optimizers pass on, for type checkers and editors."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from fastopt.engine.per_index import Index
from fastopt.lr_scheduler.base import Schedule

__all__ = [
    "AdamArguments",
    "BetaArguments",
    "CautiousArguments",
    "CautiousBetaArguments",
    "CautiousTripleArguments",
    "CommonArguments",
    "Correction",
    "EpsArguments",
    "EpsilonArguments",
    "Formula",
    "LayerArguments",
    "MatrixArguments",
    "MomentArguments",
    "MomentumArguments",
    "Names",
    "Rate",
    "RatedArguments",
    "RatedEpsArguments",
    "ScaledArguments",
    "TripleArguments",
]

Rate = float | Schedule | None
"""A learning rate, or a schedule of it."""

Formula = Literal["mxnet", "torch"]
Correction = Literal["next", "present"]


class Betas(TypedDict, total=False):
    """Both decay rates at once."""

    betas: tuple[float, float]


class Eps(TypedDict, total=False):
    """Another name of `epsilon`."""

    eps: float


class Epsilon(TypedDict, total=False):
    """Another name of `eps`."""

    epsilon: float


class CommonNames(TypedDict, total=False):
    """Other names of arguments that every optimizer has."""

    lr: Rate
    weight_decay: float


class Names(CommonNames, Betas, Eps, Epsilon, total=False):
    """Other names of arguments."""


class Shared(CommonNames, total=False):
    """Arguments of every optimizer that no class has among its own."""

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
    maximize: bool


class Precise(Shared, total=False):
    """And `multi_precision`."""

    multi_precision: bool


class RatedArguments(Precise, total=False):
    """Arguments of every optimizer but `learning_rate`."""

    lazy_update: bool | None


class MomentumArguments(Precise, total=False):
    """Arguments of every optimizer but `lazy_update`."""

    learning_rate: Rate


class ScaledArguments(Shared, total=False):
    """Arguments of every optimizer but `multi_precision`."""

    learning_rate: Rate
    lazy_update: bool | None


class CommonArguments(ScaledArguments, total=False):
    """Arguments of every optimizer."""

    multi_precision: bool


class BetaArguments(RatedArguments, Betas, total=False):
    """Besides `learning_rate`, `beta1` and `beta2`."""


class MomentArguments(BetaArguments, Eps, total=False):
    """Besides `learning_rate`, `beta1`, `beta2` and `epsilon`."""


class Cautious(TypedDict, total=False):
    """Forms of rules with decoupled decay."""

    cautious: bool
    cautious_decay: bool


class CautiousArguments(MomentArguments, Cautious, total=False):
    """Besides `learning_rate`, `beta1`, `beta2` and `epsilon`, where there are cautious forms."""


class CautiousBetaArguments(BetaArguments, Cautious, total=False):
    """Besides `learning_rate`, `beta1` and `beta2`, where there are cautious forms."""


class TripleArguments(RatedArguments, Eps, total=False):
    """Besides `learning_rate`, `beta1`, `beta2`, `beta3` and `epsilon`."""

    betas: tuple[float, float, float]


class CautiousTripleArguments(TripleArguments, Cautious, total=False):
    """The same, where there are cautious forms."""


class AdamArguments(Precise, Betas, Eps, total=False):
    """Besides those and `lazy_update`."""


class RatedEpsArguments(RatedArguments, Eps, total=False):
    """Besides `learning_rate` and `epsilon`."""


class EpsArguments(CommonArguments, Eps, total=False):
    """Besides `epsilon`."""


class EpsilonArguments(CommonArguments, Epsilon, total=False):
    """Besides `eps`."""


class LayerArguments(MomentumArguments, Epsilon, total=False):
    """Besides `eps` and `lazy_update`."""


class MatrixFamilyArguments(RatedArguments, Betas, Eps, Epsilon, total=False):
    """Besides `learning_rate`, and other names of what a class of matrices may take."""


class MatrixArguments(RatedArguments, Epsilon, total=False):
    """Besides `learning_rate` and `eps`."""
