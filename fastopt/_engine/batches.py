"""What the engine asks of optimizers that sum the gradients of several calls for each update.

Tests: ``tests/optimizer/test_lbsgd.py``.
"""

from typing import Any, Protocol

from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array


class Batches(Protocol):
    """The sums of gradients of an optimizer, see :attr:`Optimizer.batches`."""

    @property
    def active(self) -> bool:
        """Whether an update takes several calls, or a sum is left from such calls."""

    def add(self, context: str, index: Index, grad: Any, weight: Array) -> tuple[Any, list[Any]]:
        """Return the gradient to update with, or None for no update, and the kernels to launch."""

    def completes(self, index: Index) -> bool:
        """Whether the last call of :meth:`add` for a parameter has returned a gradient."""


def sums_batches(optimizer: Any) -> bool:
    """Whether an optimizer sums the gradients of several calls now."""
    batches: Batches | None = optimizer.batches
    return batches is not None and batches.active
