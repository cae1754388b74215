"""Sums over all tensors of a step, which a rule may need.

Tests: ``tests/optimizer/test_prodigy.py``.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from fastopt._engine.per_index import Index
from fastopt._engine.validate import label


class StepSums(Protocol):
    """Sums, over the tensors of a step, of the numbers that a rule keeps for each tensor."""

    @property
    def d(self) -> float | None:
        """Estimate for the current step, None without one."""

    def begin(self, indices: Sequence[Index]) -> Any:
        """Start a new step if the current one has one of the indices; return the old values."""

    def put_back(self, before: Any) -> None:
        """Undo :meth:`begin`, given its result."""

    def add(self, indices: Sequence[Index], numbers: Sequence[Sequence[float]]) -> None:
        """Add the numbers that the tensors kept in their update."""


def check_once(optimizer: Any, indices: Sequence[Index]) -> None:
    """Raise ValueError if an index occurs twice in a list, which is one step."""
    if len(set(indices)) < len(indices):
        twice = next(index for k, index in enumerate(indices) if index in indices[:k])
        raise ValueError(
            f"{label(twice, optimizer.idx2name)}: {type(optimizer).__name__} updates an index "
            "once in each list, which is one step"
        )
