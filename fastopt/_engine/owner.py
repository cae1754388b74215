"""What has records: the settings that they follow, and the states of the parameters.

Tests: ``tests/engine/test_direct.py``, ``tests/engine/test_accumulate.py``.
"""

from typing import Any

from fastopt._engine.device_records import DeviceRecords
from fastopt._engine.parameters import Parameters
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records


class Owner:
    """Settings and states of what updates without an updater, which has attributes of these names.

    Parameters
    ----------
    parameters : Parameters
        The parameters, with the optimizer.
    """

    loss_scaler = clip_global_norm = _windows = _units = _averages = None
    _runs_updates = False
    """Whether updates run the optimizer's ``update()``, which a class may override."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters, self.optimizer = parameters, parameters.optimizer
        self.records, self.devices = Records(parameters), DeviceRecords(parameters)
        self.states: dict[Index, Any] = {}
        self.states_synced: dict[Index, Any] = {}

    def _state(self, index: Index, weight: Any, sparse: bool = False) -> Any:
        """Return the state of an index in the present call."""
        return self.states.get(index)
