"""The plan of a call whose rule needs sums over all tensors of a step.

Tests: ``tests/optimizer/test_prodigy.py``.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from fastopt._engine.per_index import Index
from fastopt._engine.plan import Plan
from fastopt._engine.validate import label, leaves
from fastopt._interrupts import uninterrupted

__all__ = ["StepSums", "SummedPlan", "check_once"]


class StepSums(Protocol):
    """Sums, over the tensors of a step, of the numbers that a rule keeps for each tensor."""

    @property
    def d(self) -> float:
        """Estimate for the current step."""

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


class SummedPlan(Plan):
    """Plan of an optimizer with :attr:`~fastopt.optimizer.Optimizer.step_sums`.

    Its hyper-parameters are computed in every step.
    """

    @cached_property
    def numbers(self) -> list[tuple[Any, ...]]:
        """Arrays of the numbers that the rule keeps for each tensor."""
        count = len(self.tables[0].layout.rule.kept)
        return [leaves(state)[-count:] for state in self.states]

    @property
    def settled(self) -> bool:
        """Always False, as the hyper-parameters depend on the sums."""
        return False

    def begin(self, indices: Sequence[Index]) -> Any:
        """Start a step with these tensors of all plans of a call; return the old values.

        Raises
        ------
        ValueError
            An index occurs twice. Nothing has changed.
        """
        check_once(self.optimizer, indices)
        self.filled = ()
        return self.optimizer.step_sums.begin(indices)

    def collect(self) -> None:
        """Add the numbers that the tensors kept in the completed step."""
        numbers = [[array.item() for array in own] for own in self.numbers]
        self.optimizer.step_sums.add(self.indices, numbers)

    def step(self, factor: float = 1.0, shielded: bool = False) -> None:
        """See :meth:`Plan.step <fastopt._engine.plan.Plan.step>`."""
        with uninterrupted:
            before = self.begin(self.indices)
            self.done = False
            try:
                super().step(factor, shielded=True)
                self.collect()
            except BaseException:
                if self.done:
                    self.collect()
                else:
                    self.optimizer.step_sums.put_back(before)
                raise
