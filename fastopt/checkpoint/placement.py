"""Where the elements of a tensor are: which slice of it belongs to which rank."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fastopt.optimizer.optimizer import Array, Index

__all__ = ["Form", "Placement", "placed"]

Form = Literal["flat", "rows", "whole"]
"""What a tensor may be cut into: single elements, rows, or nothing: then one rank has it whole."""


@dataclass(frozen=True)
class Placement:
    """Place of a tensor in a line of elements that is cut into equal shares, one for each rank.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor.
    dtype : str
        Its dtype.
    form : {'flat', 'rows', 'whole'}
        Where it may be cut.
    position : int
        Place of its first element in the line.
    share : int
        Number of elements in a share.

    Examples
    --------
    >>> from fastopt.checkpoint.placement import Placement
    >>> placement = Placement((4, 3), "float32", "flat", position=5, share=10)
    >>> [placement.part(rank) for rank in range(3)]
    [(0, 5), (5, 12), (12, 12)]
    """

    shape: tuple[int, ...]
    dtype: str
    form: Form
    position: int
    share: int

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def unit(self) -> int:
        """Number of elements that are not cut."""
        lengths = {"flat": (), "rows": self.shape[1:], "whole": self.shape}[self.form]
        return max(math.prod(lengths), 1)

    def cut(self, rank: int) -> int:
        """Number of elements that the ranks before `rank` have."""
        before = min(max(rank * self.share - self.position, 0), self.size)
        return before // self.unit * self.unit

    def part(self, rank: int) -> tuple[int, int]:
        """First element of a rank's slice, and the one after its last."""
        return self.cut(rank), self.cut(rank + 1)

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's slice."""
        first, last = self.part(rank)
        if self.form == "whole" and first < last:
            return self.shape
        inner = () if self.form == "flat" else self.shape[1:]
        return ((last - first) // max(math.prod(inner), 1), *inner)

    def slice_of(self, elements: Any, rank: int) -> Array:
        """A rank's slice, of the elements in C order."""
        first, last = self.part(rank)
        cut: Array = elements[first:last].reshape(self.slice_shape(rank))
        return cut

    def owners(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Rank, first and last element of every slice that is not empty."""
        share = max(self.share, 1)
        end = min(ranks, -(-(self.position + self.size) // share))
        for rank in range(self.position // share, end):
            first, last = self.part(rank)
            if first < last:
                yield rank, first, last


def placed(
    tensors: Iterable[tuple[Index, tuple[int, ...], str, Form]], ranks: int
) -> dict[Index, Placement]:
    """Lay tensors of each dtype out in a line of their own, in order.

    Parameters
    ----------
    tensors : iterable of (index, shape, dtype, form)
        The tensors.
    ranks : int
        Number of shares.
    """
    rows = list(tensors)
    totals: dict[str, int] = {}
    for _, shape, dtype, _ in rows:
        totals[dtype] = totals.get(dtype, 0) + math.prod(shape)
    positions = dict.fromkeys(totals, 0)
    made: dict[Index, Placement] = {}
    for index, shape, dtype, form in rows:
        share = -(-totals[dtype] // ranks)
        made[index] = Placement(shape, dtype, form, positions[dtype], share)
        positions[dtype] += made[index].size
    return made
