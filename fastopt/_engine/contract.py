"""What the engine asks of an optimizer; :class:`~fastopt.optimizer.Optimizer` documents it.

Tests: ``tests/optimizer/test_optimizer.py``, ``tests/optimizer/test_lbsgd.py``,
``tests/optimizer/test_prodigy.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from numpy.typing import NDArray

from fastopt._engine.per_index import Counts, Index, PerIndex
from fastopt._engine.validate import Array, Grad, label, repeated
from fastopt.kernels.rule import Rule


class StepSums(Protocol):
    """Sums, over the tensors of a step, of the numbers that a rule keeps for each tensor."""

    @property
    def d(self) -> float | None:
        """Estimate for the current step, None without one."""

    def begin(self, indices: Sequence[Index]) -> Any:
        """Start a new step if the current one has one of the indices; return the old values."""

    def put_back(self, before: tuple[Any, ...] | None) -> None:
        """Undo :meth:`begin`, given its result."""

    def add(self, indices: Sequence[Index], numbers: Sequence[Sequence[float]]) -> None:
        """Add the numbers that the tensors kept in their update."""


class Batches(Protocol):
    """Sums of gradients of several calls for each update."""

    @property
    def active(self) -> bool:
        """Whether an update takes several calls, or a sum is left from such calls."""

    def add(self, context: str, index: Index, grad: Grad, weight: Array) -> tuple[Any, list[Any]]:
        """Return the gradient to update with, or None for no update, and the kernels to launch."""

    def arrays(self, index: Index) -> tuple[Array, ...]:
        """Return the arrays of a parameter's sum."""

    def completes(self, index: Index) -> bool:
        """Whether the last call of :meth:`add` for a parameter has returned a gradient."""


class OptimizerLike(Protocol):
    """An optimizer: settings, numbers of the parameters, and functions of both."""

    version: int
    mode_version: int
    multipliers_version: int
    unchecked: bool

    native: ClassVar[bool]
    evaluates: ClassVar[bool]
    per_index: ClassVar[bool]
    rule_by_index: ClassVar[bool]
    rates_before_count: ClassVar[bool]
    least_rate: ClassVar[float]
    master_last: ClassVar[bool]

    lr_scheduler: Any
    lr_mult: dict[Any, float]
    wd_mult: dict[Any, float]
    param_dict: Any
    idx2name: dict[Any, str]
    rescale_grad: float
    clip_gradient: float | None
    corrected_decay: float | None
    maximize: bool
    begin_num_update: int
    multi_precision: bool
    rounding: Literal["nearest", "stochastic"]
    master: Literal["float32", "split"]
    seed: int
    lazy_update: Any
    sparse_decay: Literal["touched", "catch_up", "dense"]
    state_dtype: Literal["bfloat16", "int8"] | None
    state_min_size: int | None

    row_decay: dict[Index, tuple[Array, float]]
    masters_given: dict[Index, Array]
    whole_shapes: dict[Index, tuple[int, ...]]
    _index_update_count: Counts

    @property
    def lr(self) -> float: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def rule(self) -> Rule | None: ...

    @property
    def folds(self) -> bool: ...

    @property
    def starts_at_zero(self) -> bool: ...

    @property
    def carried(self) -> PerIndex | None: ...

    @property
    def batches(self) -> Batches | None: ...

    @property
    def step_sums(self) -> StepSums | None: ...

    @property
    def call_lock(self) -> Any: ...

    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """Return the hyper-parameters of the rule."""

    def fields_of(self, index: Index) -> Mapping[str, float]:
        """Return fields of the rule that depend on the parameter alone."""

    def decay(self, t: int, lr: float, wd: float) -> float:
        """Return the fraction by which decay shrinks a weight in a step."""

    def skips(self) -> bool:
        """Whether updates are only counted now."""

    def rule_for(self, index: Index) -> Rule | None:
        """Return the rule of a parameter."""

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[Any]:
        """Return the positions of the numbers that parameters carry."""

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """Return a multiplier of a parameter."""

    def rates_at(self, rate: float, multipliers: tuple[Any, ...] = ...) -> dict[str, float]:
        """Return learning rate and weight decay of a parameter."""

    def check_rates(self, index: Index, rate: float, decay: float) -> None:
        """Raise ValueError for invalid rates."""

    def scheduled(self, rate: float) -> float:
        """Return what a schedule has returned as a float."""

    def key(self, index: Index) -> int:
        """Return the key of a parameter's random numbers."""

    def create_state(self, index: Index, weight: Array) -> Any:
        """Create the state of a parameter."""

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """Create the state of a parameter, with a master if it has one."""

    def codes_of(self, rule: Rule | None, weight: Array, index: Index) -> dict[str, str]:
        """Return the dtypes of slots with 8-bit codes."""

    def snapshot(self) -> Any:
        """Return what an update changes."""

    def put_back(self, saved: dict[str, Any]) -> None:
        """Undo what has changed since a snapshot."""

    def _update_count(self, index: Index) -> None: ...

    def _get_lr(self, index: Index) -> float: ...

    def _get_wd(self, index: Index) -> float: ...


def batches_of(optimizer: OptimizerLike) -> Batches | None:
    """Return the sums of gradients of an optimizer if it has some now."""
    batches = optimizer.batches
    return batches if batches is not None and batches.active else None


def check_once(optimizer: OptimizerLike, indices: Sequence[Index]) -> None:
    """Raise ValueError if an index occurs twice in a list, which is one step."""
    if (twice := repeated(indices)) is not None:
        raise ValueError(
            f"{label(twice, optimizer.idx2name)}: {type(optimizer).__name__} updates an index "
            "once in each list, which is one step"
        )
