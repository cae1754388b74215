"""What has records, and the states and settings that they follow.

Tests: ``tests/engine/test_direct.py``, ``tests/engine/test_accumulate.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.parameters import Parameters
from fastopt._engine.per_index import Index
from fastopt._engine.reader import Recorded, front_of
from fastopt._engine.settings import Settings
from fastopt._engine.validate import Array


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
    runs_updates : bool
        Whether updates run the optimizer's ``update()``, which a class may override.
    """

    parameters: Parameters
    settings: Settings
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    runs_updates: bool

    @property
    def optimizer(self) -> OptimizerLike: ...

    def _entry(self, records: Any) -> Callable[..., int]:
        """Return the function that enters calls on records."""

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """Return the state of an index in the present call."""

    def _squares(self, grads: Sequence[Any], down: float) -> Array:
        """Return the sum of squares of each gradient times `down`."""

    def _clipped_units(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
    ) -> list[Any]:
        """Return gradients with clipped units; the update multiplies them by `share`."""


class Unmeasured:
    """Abstract base of owners that are no updater: they have no settings."""

    settings: Settings = Settings()
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    runs_updates: bool = False

    def _entry(self, records: Recorded) -> Callable[..., int]:
        """See :class:`Owner`."""
        return front_of(records)

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """See :class:`Owner`."""
        return self.states.get(index)

    def _squares(self, grads: Sequence[Any], down: float) -> Array:
        """See :class:`Owner`."""
        raise NotImplementedError

    def _clipped_units(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
    ) -> list[Any]:
        """See :class:`Owner`."""
        raise NotImplementedError
