"""What has records, and the states and settings that they follow.

Tests: ``tests/engine/test_direct.py``, ``tests/engine/test_accumulate.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.averaging import Averages
from fastopt._engine.backend import Backend
from fastopt._engine.clip import STEPPED, Settings, measured, squares
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.mode import Mode
from fastopt._engine.parameters import Call, DeviceRecord, Parameter, Parameters, Record, Words
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array
from fastopt._kernels.layout import Layout
from fastopt.amp import StepInfo
from fastopt.arguments import as_float


class Owner(Protocol):
    """What records ask of their owner: an updater, or what updates or adds without one.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer of parameters that are in no group with another one.
    parameters : Parameters
        The parameters.
    settings : Settings
        What is done with gradients before an update.
    states, states_synced : dict
        State of each index, and whether it is on its weight's device.
    backend : Backend
        Where the tensors of calls are whole.
    runs_updates : bool
        Whether updates run the optimizer's ``update()``, which a class may override.
    """

    backend: Backend
    parameters: Parameters
    settings: Settings
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    runs_updates: bool

    @property
    def optimizer(self) -> OptimizerLike: ...

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """Return the state of an index in the present call."""


def clip(
    of: Owner, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
) -> Sequence[Any]:
    """Return gradients with clipped units; the update multiplies them by `share`."""
    settings, optimizer = of.settings, of.optimizer
    if settings.clip_adaptive is None:
        return grads
    of.backend.receive()
    factor = as_float("rescale_grad", optimizer.rescale_grad) * share * settings.scale
    return settings.clip_adaptive.all(indices, weights, grads, factor, optimizer.idx2name)


def measure(
    of: Owner, indices: Sequence[Index], grads: Sequence[Any], share: float, down: float = 1.0
) -> tuple[StepInfo, float]:
    """Return the outcome and the gradient factor that follow from the sums of squares.

    `share` is a further factor of the gradients; see :func:`~fastopt._engine.clip.measured`.
    """
    settings, optimizer, backend = of.settings, of.optimizer, of.backend
    if not settings.norms:
        return STEPPED, 1.0
    backend.receive()
    sums = lambda down: backend.added(squares(grads, down))  # noqa: E731
    rescale = as_float("rescale_grad", optimizer.rescale_grad) * share
    limits = settings.loss_scaler, settings.clip_global_norm
    return measured(sums, indices, optimizer.idx2name, rescale, *limits, down)


class RecordsLike(Protocol):
    """Records, :class:`~fastopt._engine.records.Records`, for what enters and enrolls calls."""

    parameters: Parameters
    averages: Averages | None
    version: int
    mode: Mode
    direct: bool
    freezes: bool
    incomplete: list[bool]
    prepared: bool
    quick: bool
    context: int
    words: Words
    view: Any
    norm: NDArray[np.float64]
    tensors: Words
    shared: dict[Any, Shared]
    rows: dict[Any, Shared]
    slots: dict[Any, int]
    widest: int
    enter: Callable[..., int]

    def admits(self, index: Any, grad: Any, weight: Any) -> int:
        """Return the status of a call, without an update."""

    def forget(self) -> None:
        """Drop all records."""

    def checked(self, index: Index, grad: Any, weight: Any) -> Any:
        """Return the checked gradient of one tensor, as numbers that the update can read."""

    def drop(self, index: Index) -> None:
        """Drop the record of a parameter."""

    def fill(
        self, updater: Owner, indices: Sequence[Index], scheduled: dict[tuple[Any, int], float]
    ) -> Any:
        """Compute the hyper-parameters of the admitted call."""

    def find_counts(self, optimizer: OptimizerLike) -> None:
        """Enter the positions of counts for the first records."""

    def key_of(self, index: Any) -> int | str:
        """Return what stands for an index in compiled code."""

    def layouts(self, indices: Iterable[Index]) -> list[Layout]:
        """Return the different layouts of parameters."""

    def moving(self, index: Any, *lists: Any) -> Sequence[Any]:
        """Return the items of the arguments of a call without frozen parameters."""

    def note(self, index: Any, weight: Any) -> None:
        """Keep the weights of a call in place of those of earlier calls."""

    def on_devices(self, updater: Owner) -> Any:
        """Return what enters calls with weights on devices."""

    def record_of(self, index: Index) -> Record | DeviceRecord | None:
        """Return the record of a parameter."""

    def refresh(self, updater: Owner) -> None:
        """Follow the changes of the attributes of optimizers."""

    def resolve(self, updater: Owner, status: int, index: Any, grad: Any, weight: Any) -> int:
        """Do what a status of a call asks for."""

    def shared_by(self, of: Parameter, layout: Layout) -> Shared:
        """Return the hyper-parameters that a parameter shares with others."""

    def with_room(self, status: int, arguments: tuple[Any, Any, Any]) -> int:
        """Enter a call again with more memory."""


class Updating(Owner, Protocol):
    """An updater.

    Attributes
    ----------
    records : RecordsLike
        Records of the parameters.
    takes_extra : bool
        Whether a call has extra arrays, which are in the states now.
    lock : threading.RLock
        Held during calls and changes of settings.
    """

    takes_extra: bool
    lock: Any
    _averages: Averages | None

    @property
    def records(self) -> RecordsLike: ...

    def forget(self) -> None:
        """Drop all records, between the calls of other threads."""

    def __call__(self, index: Any, grad: Any, weight: Any) -> None: ...

    def _is_frozen(self, index: Index) -> bool:
        """Whether the group of an index is frozen."""

    def _viewed(self, index: Index, weight: Any) -> Any:
        """Return a weight, or the NumPy view of one of another library."""

    def _views(self, index: Index, grad: Any, weight: Any) -> tuple[Any, Any]:
        """Return a gradient and its weight, or NumPy views of those of other libraries."""

    def _real_views(self, index: Index, grad: Any, weight: Any) -> tuple[Any, Any]:
        """Return a gradient and its weight, or the real views of complex ones."""

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Return checked calls with states."""

    def _stored(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Store states; return a function that puts back what was there before."""
