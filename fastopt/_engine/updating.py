"""What the engine asks of an updater: what it asks of the owner of records, and checked calls.

Tests: ``tests/engine/test_slow_calls.py``, ``tests/optimizer/test_extra.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastopt._engine.owner import Owner
from fastopt._engine.parameters import Call
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records


class Updating(Owner, Protocol):
    """An updater.

    Attributes
    ----------
    records : Records
        Records of the parameters.
    takes_extra : bool
        Whether a call has extra arrays, which are in the states now.
    """

    records: Records
    takes_extra: bool

    def __call__(self, index: Any, grad: Any, weight: Any) -> None: ...

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Return checked calls with states."""

    def _stored(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Store states; return a function that puts back what was there before."""
