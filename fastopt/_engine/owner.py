"""What has records: the settings that they follow, and the states of the parameters.

Tests: ``tests/engine/test_direct.py``, ``tests/engine/test_accumulate.py``.
"""

from typing import Any

from fastopt._engine.per_index import Index
from fastopt._engine.records import front_of


class Owner:
    """Settings and states of what updates without an updater, which has attributes of these names.

    Parameters
    ----------
    planner : Planner
        The planner, with the optimizer and the records.
    """

    loss_scaler = clip_global_norm = _windows = _units = _averages = None
    _runs_updates = False
    """Whether updates run the optimizer's ``update()``, which a class may override."""
    _entry = staticmethod(front_of)

    def __init__(self, planner: Any) -> None:
        self.planner, self.optimizer = planner, planner.optimizer
        self.records = planner.records
        self.states: dict[Index, Any] = {}
        self.states_synced: dict[Index, Any] = {}

    def _state(self, index: Index, weight: Any, sparse: bool = False) -> Any:
        """Return the state of an index in the present call."""
        return self.states.get(index)
