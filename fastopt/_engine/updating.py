"""What the engine asks of an updater: what it asks of the owner of records, and its steps.

Tests: ``tests/engine/test_slow_calls.py``, ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastopt._engine.device_records import DeviceRecords
from fastopt._engine.owner import Owner
from fastopt._engine.parameters import Call
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records
from fastopt.amp import StepInfo


class Updating(Owner, Protocol):
    """An updater.

    Attributes
    ----------
    records, devices : Records, DeviceRecords
        Records of the parameters on the host, and on devices.
    takes_extra : bool
        Whether a call has extra arrays, which are in the states now.
    """

    records: Records
    devices: DeviceRecords
    takes_extra: bool
    _info: StepInfo
    _windows: Any

    def __call__(self, index: Any, grad: Any, weight: Any) -> None: ...

    def _check_names(self, indices: Sequence[Index]) -> None:
        """Warn of names that no parameter has."""

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Return checked calls with states."""

    def _with_states(self, checked: Sequence[tuple[Index, Any, Any]]) -> list[Call]:
        """Return calls with states, which may be new."""

    def _keep(self, calls: Sequence[Call]) -> None:
        """Store the states of updated weights."""

    def _stored(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Store states; return a function that puts back what was there before."""

    def _commit(
        self,
        call: object,
        calls: Sequence[Call],
        step: Callable[[], None],
        finish: Callable[[], None],
        last: Callable[[], None] | None = None,
    ) -> None:
        """Make a step that is stored and finished if it launches."""

    def _report(self, info: StepInfo) -> None:
        """Record the outcome of a call."""
