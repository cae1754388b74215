"""Placement of tensors on ranks: which slice of a tensor belongs to which rank."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fastopt.optimizer.optimizer import Array, Index

LINE = 1 << 22
"""Bytes of gradients in a line, which are sent together."""

LINE_OF_RANK = 1 << 18
"""Bytes of a line for each rank: with smaller shares, latency dominates the transfer time."""

MOST = 1 << 30
"""Limit on the bytes of a line, for any number of ranks."""

Form = Literal["flat", "rows", "whole"]
"""How a tensor can be split: between elements, between rows, or not at all, with one owner."""


@dataclass(frozen=True)
class Placement:
    """Position of a tensor in a line of elements that is split into equal shares, one per rank.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor.
    dtype : str
        Dtype of the tensor.
    form : {'flat', 'rows', 'whole'}
        How the tensor can be split.
    position : int
        Position of its first element in the line.
    share : int
        Number of elements in a share.

    Examples
    --------
    >>> from fastopt.checkpoint.restore.placement import Placement
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
        """Number of elements in an indivisible unit."""
        lengths = {"flat": (), "rows": self.shape[1:], "whole": self.shape}[self.form]
        return max(math.prod(lengths), 1)

    def cut(self, rank: int) -> int:
        """Number of elements on the ranks before `rank`."""
        before = min(max(rank * self.share - self.position, 0), self.size)
        return before // self.unit * self.unit

    def part(self, rank: int) -> tuple[int, int]:
        """Start and stop of a rank's slice."""
        return self.cut(rank), self.cut(rank + 1)

    def has_state(self, rank: int) -> bool:
        """Whether a rank has state of the tensor; that of an unsplit tensor is on its owner."""
        first, last = self.part(rank)
        return self.form != "whole" or first < last

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's slice."""
        return self._shape_of(*self.part(rank))

    def _shape_of(self, first: int, last: int) -> tuple[int, ...]:
        if self.form == "whole" and first < last:
            return self.shape
        if self.form == "flat":
            return (last - first,)
        inner = self.shape[1:]
        return ((last - first) // max(math.prod(inner), 1), *inner)

    def slice_of(self, elements: Array, rank: int) -> Array:
        """A rank's slice, from the flat elements in C order."""
        first, last = self.part(rank)
        cut: Array = elements[first:last].reshape(self._shape_of(first, last))
        return cut

    def owners(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of every slice that is not empty."""
        position, size, unit, share = self.position, self.size, self.unit, max(self.share, 1)
        first = 0
        for rank in range(position // share, min(ranks, -(-(position + size) // share))):
            last = min((rank + 1) * share - position, size) // unit * unit  # cut(rank + 1), faster
            if first < last:
                yield rank, first, last
            first = last


def line_bytes(ranks: int) -> int:
    """Bytes of gradients in a line: 4 MiB, or 256 KiB per rank if that is more, at most 1 GiB.

    Examples
    --------
    >>> from fastopt.checkpoint.restore.placement import line_bytes
    >>> line_bytes(4) >> 20, line_bytes(1024) >> 20, line_bytes(10_000) >> 20
    (4, 256, 1024)
    """
    return min(max(LINE, LINE_OF_RANK * ranks), MOST)


def placed(
    tensors: Iterable[tuple[Index, tuple[int, ...], str, Form]], ranks: int
) -> dict[Index, Placement]:
    """Lay out the tensors of each dtype in lines, in order.

    Consecutive tensors share a line of at most :func:`line_bytes`, which can be sent once their
    gradients are ready; a larger tensor has its own line. Tensors that cannot be split never start
    a new line, so that the ranks have equal shares of them.

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
