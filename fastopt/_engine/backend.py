"""What the parts of a call are that depend on where the arrays of its tensors are whole.

Tests: ``tests/engine/test_records.py``, ``tests/distributed/test_together.py``.
"""

from collections.abc import Callable, Sequence

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.parameters import Call
from fastopt._engine.validate import Array


class Backend:
    """Tensors that are whole, in this process; a subclass has slices of tensors of several ranks.

    Between :meth:`receive` and the end of the call, gradients are those that update the weights.
    """

    def entry(self, records: object, front: Callable[..., int]) -> Callable[..., int]:
        """Return the function that enters calls on records, given the one of whole tensors."""
        return front

    def check(self, optimizers: Sequence[OptimizerLike]) -> None:
        """Raise TypeError unless the optimizers of groups can update these tensors."""

    def receive(self) -> None:
        """Wait for the gradients of a call, before Python reads them."""

    def added(self, sums: Array) -> Array:
        """Return the sums over whole tensors, given those over the arrays of a call."""
        return sums

    def owned(self, optimizer: OptimizerLike, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the calls of a user's ``update()`` that are made here."""
        return calls


WHOLE = Backend()
"""The backend of updaters in one process."""
