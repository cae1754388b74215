"""What has records, and the states and settings that they follow.

Tests: ``tests/engine/test_direct.py``, ``tests/engine/test_accumulate.py``.
"""

from collections.abc import Sequence
from typing import Any

from fastopt._engine.clip import squares
from fastopt._engine.parameters import Parameters
from fastopt._engine.per_index import Index
from fastopt._engine.settings import Settings
from fastopt._engine.validate import Array
from fastopt.arguments import as_float


class Owner:
    """Abstract base of what has records: an updater, and what updates or adds without one.

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
    """

    optimizer: Any
    parameters: Parameters
    settings: Settings = Settings()
    states: dict[Index, Any]
    states_synced: dict[Index, Any]
    _runs_updates: bool = False
    """Whether updates run the optimizer's ``update()``, which a class may override."""

    def _state(self, index: Index, weight: Any, sparse: bool = False) -> Any:
        """Return the state of an index in the present call."""
        return self.states.get(index)

    def _squares(self, grads: Sequence[Any], down: float) -> Array:
        """Return the sum of squares of each gradient times `down`."""
        return squares(grads, down)

    def _clipped_units(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
    ) -> list[Any]:
        """Return gradients with clipped units; the update multiplies them by `share`."""
        units = self.settings.clip_adaptive
        assert units is not None
        rescale_grad = as_float("rescale_grad", self.optimizer.rescale_grad)
        factor = rescale_grad * share * self.settings.scale
        return units.all(indices, weights, grads, factor, self.optimizer.idx2name)
