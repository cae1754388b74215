"""Where the elements of a tensor are: which slice of it belongs to which rank."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fastopt.optimizer.optimizer import Array, Index

__all__ = ["Form", "Placement", "line_bytes", "placed"]

LINE = 1 << 22
"""Bytes of gradients that are sent together."""

LINE_OF_RANK = 1 << 18
"""The same for each rank: with smaller shares, more time goes to messages than to bytes."""

MOST = 1 << 30
"""The most that is sent together, on any number of ranks."""

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


def line_bytes(ranks: int) -> int:
    """Bytes of gradients in a line of several tensors: 4 MiB, or 256 KiB a rank if that is more.

    Examples
    --------
    >>> from fastopt.checkpoint.placement import line_bytes
    >>> line_bytes(4) >> 20, line_bytes(1024) >> 20, line_bytes(10_000) >> 20
    (4, 256, 1024)
    """
    return min(max(LINE, LINE_OF_RANK * ranks), MOST)


def placed(
    tensors: Iterable[tuple[Index, tuple[int, ...], str, Form]], ranks: int
) -> dict[Index, Placement]:
    """Lay tensors of each dtype out in lines, in order.

    Neighbours share a line of at most :func:`line_bytes`, so that it can be sent when their
    gradients are ready; a larger tensor has one of its own. Tensors that are not cut are all in
    one line, for the ranks to have equal shares.

    Parameters
    ----------
    tensors : iterable of (index, shape, dtype, form)
        The tensors.
    ranks : int
        Number of shares.
    """
    limit = line_bytes(ranks)
    lines: list[int] = []
    last: dict[str, int] = {}
    rows: list[tuple[Index, tuple[int, ...], str, Form, int, int]] = []
    for index, shape, dtype, form in tensors:
        size, line = math.prod(shape), last.get(dtype)
        most = limit // (8 if dtype == "float64" else 4)
        if line is None or (form != "whole" and lines[line] > 0 and lines[line] + size > most):
            line = last[dtype] = len(lines)
            lines.append(0)
        rows.append((index, shape, dtype, form, lines[line], line))
        lines[line] += size
    return {
        index: Placement(shape, dtype, form, position, -(-lines[line] // ranks))
        for index, shape, dtype, form, position, line in rows
    }
