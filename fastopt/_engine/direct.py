"""Updates without an updater: ``Optimizer.update``, with states that the caller keeps.

Tests: ``tests/engine/test_direct.py``.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

from fastopt._engine.backend import WHOLE, Backend
from fastopt._engine.clip import Settings
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.device_tables import table_of_parameter
from fastopt._engine.parameters import Call, Given, Parameters
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records
from fastopt._engine.validate import Array, Grad
from fastopt._interrupts import uninterrupted
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.record_words import OK

NOTHING = object()
"""The state of an index that has not been updated."""


class Unmeasured:
    """Abstract base of owners that are no updater: they have no settings."""

    backend: Backend = WHOLE
    settings: Settings = Settings()
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    runs_updates: bool = False

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """See :class:`~fastopt._engine.owner.Owner`."""
        return self.states.get(index)


class Direct(Unmeasured):
    """Records of the parameters that an optimizer updates without an updater.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    masters : bool
        Whether states hold the masters of half-precision weights.

    Attributes
    ----------
    states : dict
        State of each index in its last call, whose arrays its record has the addresses of.
    """

    def __init__(self, optimizer: OptimizerLike, masters: bool) -> None:
        self.optimizer, self.parameters = optimizer, Parameters(optimizer, masters)
        self.records = Records(self.parameters)
        self.states, self.states_synced = {}, {}

    def update(self, index: Index, weight: Array, grad: Grad, state: object) -> None:
        """Update one tensor; see :meth:`Optimizer.update <fastopt.optimizer.Optimizer.update>`."""
        if self._enter(index, grad, weight, (index,), (state,)):
            return
        with uninterrupted:
            self._update([(index, weight, grad, state)], single=True)

    def update_all(self, calls: Sequence[Call]) -> None:
        """Update several tensors; all of them are checked before any changes."""
        indices, weights, grads, states = ([call[k] for call in calls] for k in range(4))
        if self._enter(indices, grads, weights, indices, states):
            return
        with uninterrupted:
            if len(set(indices)) == len(indices):
                self._update(calls)
                return
            self.check(calls)  # an index may have several states
            for call in calls:
                self._update([call])

    def check(self, calls: Sequence[Call]) -> None:
        """Raise unless the arrays and learning rates of each update are valid."""
        for call in calls:
            self._follow([call])
            self.optimizer._get_lr(call[0])
            self.optimizer._get_wd(call[0])
            index, weight, grad, state = call
            if is_cuda(weight):
                of = self.parameters.of(index)
                grad = self.parameters.check(of.context, weight, grad, of.copy)
                table_of_parameter(of, weight, of.indexed(grad), state)
            else:
                self.records.check(self, index, grad, weight)

    def refill(self) -> None:
        """Compute all hyper-parameters again, since those that ``hyper()`` returns are others."""
        for shared in self.records.shared.values():
            shared.fill(self.optimizer.lr)

    def _keeps(self, index: Index, state: Any) -> bool:
        """Whether a state is that of the last call, or a tuple of its arrays."""
        known = self.states.get(index, NOTHING)
        if known is state:
            return True
        pair = type(known) is tuple and type(state) is tuple and len(known) == len(state)
        return pair and all(map(is_, known, state))

    def _enter(
        self, index: Any, grad: Any, weight: Any, indices: Sequence[Index], states: Sequence[Any]
    ) -> bool:
        """Update tensors that have records; if the result is False, nothing has changed."""
        records = self.records
        if records.version != self.optimizer.version:
            records.refresh(self)
        known = records.mode.usable and not records.prepared
        if not (known and all(map(self._keeps, indices, states))):
            return False
        if records.mode.live and not records.ask(index):
            return False
        if records.version != self.optimizer.version:
            return False  # the multipliers of the user's objects have changed attributes
        status: int = records.enter(records.context, index, grad, weight)
        if status != OK:
            status = records.resolve(self, status, index, grad, weight)
        return status >= 0

    def _follow(self, calls: Sequence[Call]) -> None:
        """Keep the states of calls, and drop the records of others."""
        for index, _, _, state in calls:
            if not self._keeps(index, state):
                self.records.drop(index)
                self.states[index] = state

    def _update(self, calls: Sequence[Call], single: bool = False) -> None:
        """Update tensors that may have no records yet."""
        self._follow(calls)
        indices, weights, grads, _ = map(list, zip(*calls, strict=True))
        self.records.take(self, Given(indices, grads, weights, single))
