"""Tables of tensors: the kernel arguments that describe the arrays of a launch.

Tests: ``tests/engine/test_plan_stale.py``.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._interrupts import uninterrupted
from fastopt._kernels.chunks import Chunks, chunks_of
from fastopt._kernels.codes import scales_shape
from fastopt._kernels.devices import header
from fastopt._kernels.layout import (
    ADDRESS,
    DONE,
    PITCH,
    WIDTH,
    Layout,
    kind_of,
)
from fastopt._kernels.numpy_abi import C_ORDER, NBYTES, guard
from fastopt._kernels.threads import turn

if TYPE_CHECKING:
    from fastopt.sparse import RowSparse

__all__ = ["Array", "Combine", "Table", "address_of", "items_of", "joined_ranges", "launch"]

Array = np.ndarray[Any, Any]
Combine = Callable[[Chunks, Array, int, bool], tuple[Chunks, Array]]
"""Takes chunks, their sums, the number of tensors, and whether the sums are maxima; returns chunks
and sums of whole tensors."""


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    found: int = array.__array_interface__["data"][0]
    return found


class Table(ABC):
    """Kernel arguments for the arrays of one tensor, or of several tensors with one layout.

    The attributes ``chunks``, ``table`` and ``hyper`` are the arguments of that name of a kernel.

    A table is reused by later calls, as most of it does not change. Addresses may change, since an
    array can be resized in place: they are compared or entered again in each call.

    Parameters
    ----------
    layout : Layout
        The layout for which the kernels are compiled.
    weight : tuple of numpy.ndarray
        The exact weight, and its rounded copy or low 16 bits if it has one.
    state : tuple of numpy.ndarray
        One array for each slot of the rule, and for each number that the rule keeps for a tensor.
    grad : numpy.ndarray
        The gradient, or the values of a row-sparse gradient.

    Attributes
    ----------
    direct : bool
        Whether weight and state are the arrays of the caller, not views or copies of them.
    launch : callable, optional
        The whole update, if it is one launch without other work.
    """

    indices: Sequence[int | str] = ()
    """Indices of the tensors' parameters, if a plan holds the table."""
    move: Callable[[Any, Any], None] = staticmethod(np.copyto)
    """``move(target, source)`` copies the elements of an array."""

    listed: tuple[Array, ...]

    def __init__(
        self,
        layout: Layout,
        weight: tuple[Array, ...],
        state: tuple[Array, ...],
        grad: Array,
        order: int = C_ORDER,
    ) -> None:
        self.layout = layout
        self.arrays: Sequence[Array] = (*weight, *state)  # kept alive
        self.sizes: tuple[int, ...] = (weight[0].size,)
        self.width, item = items_of(layout, weight[0])
        self.items: tuple[tuple[int, int], ...] = (item,)
        self.table = np.zeros((1, ADDRESS + len(self.arrays) + 1), np.uint64)
        self.table[0, WIDTH] = self.width
        if layout.pitched:
            self.table[0, PITCH], order = weight[0].strides[0], 0
        guarded = self.arrays if layout.sparse else (*self.arrays, grad)
        self.guards = guard(guarded, len(self.arrays), order)[np.newaxis]
        addresses = [array.ctypes.data for array in guarded]
        self.table[0, ADDRESS : ADDRESS + len(addresses)] = addresses
        self._begin()
        self.listed = tuple(guarded[len(self.arrays) :])

    def _begin(self) -> None:
        """Allocate the hyper-parameters and divide the tensors into chunks."""
        rule, real = self.layout.rule, self.layout.real
        self.fields = np.zeros((len(self.table), len(rule.hyper)), real)
        self.hyper = self.fields.view(self.layout.record).reshape(-1)
        self.chunks, self.total = self._cut()
        self.direct = False
        self.copied: Sequence[tuple[Array, Array]] = ()
        self.borrowed: tuple[Array, Array] | None = None
        self.listed = ()  # kept alive until release()
        self.row_chunks = self.chunks, 0
        self.decay: tuple[Array, ...] = ()
        self.at_once = False

    @abstractmethod
    def _cut(self) -> tuple[Chunks, int]:
        """Return the chunks of an update, and the number of elements."""

    @classmethod
    def joined(cls, tables: Sequence["Table"]) -> Self:
        """Merge tables with the same layout into one."""
        merged = cls.__new__(cls)
        merged.layout = tables[0].layout
        merged.arrays = [array for table in tables for array in table.arrays]
        merged.sizes = tuple(size for table in tables for size in table.sizes)
        merged.items = tuple(item for table in tables for item in table.items)
        merged.table = np.concatenate([table.table for table in tables])
        columns = max(table.guards.shape[2] for table in tables)
        merged.guards = np.zeros((len(tables), tables[0].guards.shape[1], columns), np.uint64)
        for row, table in zip(merged.guards, tables, strict=True):
            row[:, : table.guards.shape[2]] = table.guards[0]
        merged._begin()
        merged.listed = tuple(array for table in tables for array in table.listed)
        return merged

    def of_copies(self, originals: Sequence[Array], grad: Array, copy: Array) -> None:
        """Record which arrays are copies; :func:`launch` copies weight and state back."""
        pairs = zip(originals, self.arrays, strict=True)
        self.copied = [(o, n) for o, n in pairs if o is not n and not np.may_share_memory(o, n)]
        if grad is not copy:
            self.borrowed = grad, copy

    @property
    def alone(self) -> bool:
        """Whether the table must not be joined with others."""
        return bool(self.layout.sparse or self.borrowed or self.copied)

    def renew(self) -> None:
        """Refresh the copies, after other tensors have been updated."""
        for original, copy in self.copied:
            self.move(copy, original)
        if self.borrowed:
            self.move(*self.borrowed[::-1])

    def serves(self, grad: "RowSparse") -> bool:
        """Whether the kernels are compiled for this kind of row-sparse gradient."""
        layout = self.layout
        return layout.sparse and layout.grad == kind_of(header(grad.values).dtype)

    @abstractmethod
    def list_rows(self, context: str, grad: "RowSparse") -> None:
        """Set a row-sparse gradient.

        Raises
        ------
        ValueError
            An index is out of range, or the values have the wrong shape, as the gradient's arrays
            were changed after its creation.
        """

    def take_rows(self, values: Any, indices: Any, written: Array) -> bool:
        """Set a row-sparse gradient like :meth:`list_rows`, by one kernel.

        If the gradient needs the checks in Python, nothing changes and the result is False. It must
        not overlap the sorted memory ranges `written`.
        """
        return False

    @cached_property
    def flat(self) -> tuple[NDArray[np.int64], int]:
        """Chunks of elements, independent of the number of threads."""
        return chunks_of(*[(size, 1) for size in self.sizes])

    @abstractmethod
    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; the order depends only on its shape."""

    @abstractmethod
    def run(self, combine: Combine | None = None) -> None:
        """Launch the kernels of every reduction and of the update, then :meth:`copy_back`.

        If tensors are slices, `combine` computes the sums of whole tensors from the chunks' sums.
        """

    def moving(self, target: Any, source: Any) -> partial[Any]:
        """Return the call that copies the elements of an array."""
        return partial(self.move, target, source)

    def calls(self) -> tuple[list[partial[Any]], bool]:
        """Return what :meth:`run` calls, compiled, and whether a kernel of it is parallel.

        On the host, all are functions in C.
        """
        return [partial(self.run)], False

    @abstractmethod
    def flush_decay(self) -> None:
        """Apply the deferred weight decay of all rows, including the last step's."""

    @abstractmethod
    def apply_decay(self, applied: Array, before: float, after: float, at_once: bool) -> None:
        """Apply deferred weight decay to the indexed rows (`at_once`: to all) in the next update.

        Parameters
        ----------
        applied : numpy.ndarray
            Decay applied to each row so far, as a sum of logarithms.
        before, after : float
            Accumulated decay before and after the step, as sums of logarithms.
        at_once : bool
            Whether to apply the decay of all rows in each step.
        """

    def copy_back(self) -> None:
        """Copy weight and state back if kernels worked on copies, then :meth:`release`."""
        for original, copy in self.copied:
            self.move(original, copy)
        self.release()

    def release(self) -> None:
        """Release the gradients and copies."""
        if self.copied:
            self.arrays = ()
        self.copied, self.borrowed, self.listed = (), None, ()

    @property
    def done(self) -> bool:
        """Whether the update of this step has run, even if an error was raised after it."""
        return bool(self.table[0, DONE])

    def spans(self) -> NDArray[np.uint64]:
        """Return the sorted start and end addresses of the written arrays, as two rows."""
        first, last = self.written()
        order = np.argsort(first)
        return np.stack([first[order], last[order]])

    def written(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the start and end addresses of the written arrays."""
        count = self.table.shape[1] - ADDRESS - 1
        begin = self.table[:, ADDRESS : ADDRESS + count]
        end = begin + self.guards[:, :count, NBYTES]
        return joined_ranges(begin, end, [original for original, _ in self.copied])

    @abstractmethod
    def _grad_bytes(self) -> NDArray[np.uint64]:
        """Return the size of each dense gradient."""

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the start and end addresses of the gradients."""
        begin = self.table[:, -1]
        if self.layout.sparse:
            end = begin + np.uint64(self.listed[0].nbytes if self.listed else 0)
        else:
            end = begin + self._grad_bytes()
        return joined_ranges(begin, end, self.borrowed[:1] if self.borrowed else ())


def items_of(layout: Layout, weight: Array) -> tuple[int, tuple[int, int]]:
    """Return the elements of a row, and the items that chunks consist of with their elements."""
    size, height = weight.size, len(weight) if weight.ndim else 1
    width = size // max(height, 1)
    if layout.coded:
        if weight.ndim < 2 and not layout.sparse:
            width = size
        rows, in_row = scales_shape(weight.shape)
        return width, (rows * in_row, size // max(rows * in_row, 1))
    return width, (height, width) if layout.rule.row else (size, 1)


def launch(tables: Sequence[Table], combine: Combine | None = None) -> None:
    """Update the tensors of `tables` in place, in order.

    See :meth:`Table.run` for `combine`.
    """
    if combine is not None:
        for table in tables:
            if table is not tables[0]:
                table.renew()
            with uninterrupted:
                table.run(combine)
        return
    made: list[partial[Any]] = []
    parallel = False
    for table in tables:
        if table is not tables[0]:
            made += [table.moving(copy, original) for original, copy in table.copied]
            if table.borrowed:
                made.append(table.moving(*table.borrowed[::-1]))
        calls, has_parallel = table.calls()
        made += calls
        parallel |= has_parallel
    with uninterrupted, turn() if parallel else nullcontext():
        # A loop in C: no handler of a signal runs and nothing raises between two calls.
        deque(map(partial.__call__, made), 0)
    for table in tables:
        table.release()


def joined_ranges(
    begin: NDArray[np.uint64], end: NDArray[np.uint64], arrays: Sequence[Array]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return flattened start and end addresses, with the bounds of `arrays` appended."""
    if not arrays:
        return begin.ravel(), end.ravel()
    bounds = np.array([byte_bounds(array) for array in arrays], np.uint64).reshape(-1, 2)
    return np.append(begin, bounds[:, 0]), np.append(end, bounds[:, 1])
