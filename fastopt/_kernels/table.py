"""Tables of tensors: the kernel arguments that describe the arrays of a launch."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._interrupts import uninterrupted
from fastopt._kernels import cpu
from fastopt._kernels.codes import scales_shape
from fastopt._kernels.compiling import bind
from fastopt._kernels.devices import header
from fastopt._kernels.layout import (
    ADDRESS,
    DECAY,
    DONE,
    ORDER,
    PAID,
    PITCH,
    ROWS,
    SEGMENTS,
    STARTS,
    WIDTH,
    Layout,
    kind_of,
)
from fastopt._kernels.numpy_abi import C_ORDER, NBYTES, guard
from fastopt._kernels.segments import ASCENDING, OUTSIDE, PLACES
from fastopt._kernels.threads import may_run_parallel, thread_count, turn
from fastopt.device import Device

if TYPE_CHECKING:
    from fastopt.sparse import RowSparse

__all__ = ["CHUNK", "PARALLEL_FROM", "Combine", "Pieces", "Table", "balanced", "chunks", "launch"]

CHUNK = 32_768
"""Maximum elements of a chunk: 128 KB of float32, so that four arrays stay in a core's cache."""

LINE = 64
"""Chunk sizes are a multiple of this many elements, at least a cache line of any dtype."""

PARALLEL_FROM = 65_536
"""Number of elements from which threads save more than starting them costs.

If NumPy's own threads still spin after a matrix product, starting threads costs ten times as much.
"""

SORTED_AT_ONCE = 65_536
"""Maximum indexed rows that are sorted while other Python threads wait, as headers are read."""

ROW_COST = 4
"""Cost of an element of an indexed row relative to a dense one: rows come from main memory."""

INT32 = np.dtype(np.int32)

Array = np.ndarray[Any, Any]
Pieces = NDArray[np.int64]
Combine = Callable[[Pieces, Array, int], tuple[Pieces, Array]]
"""Takes chunks, their sums and the number of tensors; returns chunks and sums of whole tensors."""


class Table:
    """Kernel arguments for the arrays of one tensor, or of several tensors with one layout.

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
    """

    device: Device | None = None
    """Device of the arrays; None is the host."""
    stream_handle = 0
    """Handle of the stream that the first weight is used on, if it is on a CUDA device."""
    indices: Sequence[int | str] = ()
    """Indices of the tensors' parameters, if a plan holds the table."""
    move: Callable[[Any, Any], None] = staticmethod(np.copyto)
    """``move(target, source)`` copies the elements of an array."""

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
        size = weight[0].size
        height = len(weight[0]) if weight[0].ndim else 1
        self.width = size // max(height, 1)
        self.sizes: tuple[int, ...] = (size,)
        item = (height, self.width) if layout.rule.row else (size, 1)
        if layout.coded:
            if weight[0].ndim < 2 and not layout.sparse:
                self.width = size
            rows, in_row = scales_shape(weight[0].shape)
            item = (rows * in_row, size // max(rows * in_row, 1))
        self.items: tuple[tuple[int, int], ...] = (item,)
        self.entry = np.zeros((1, ADDRESS + len(self.arrays) + 1), np.uint64)
        self.entry[0, WIDTH] = self.width
        if layout.pitched:
            self.entry[0, PITCH], order = weight[0].strides[0], 0
        guarded = self.arrays if layout.sparse else (*self.arrays, grad)
        self.guards = guard(guarded, len(self.arrays), order)[np.newaxis]
        addresses = [array.ctypes.data for array in guarded]
        self.entry[0, ADDRESS : ADDRESS + len(addresses)] = addresses
        self._begin()

    def _begin(self) -> None:
        """Allocate the hyper-parameters and divide the tensors into chunks."""
        rule, real = self.layout.rule, self.layout.real
        self.fields = np.zeros((len(self.entry), len(rule.hyper)), real)
        self.records = self.fields.view(self.layout.record).reshape(-1)
        self.pieces, self.total = self._cut()
        self.direct = False
        self.copied: Sequence[tuple[Array, Array]] = ()
        self.borrowed: tuple[Array, Array] | None = None
        self.listed: tuple[Array, ...] = ()
        self.list_pieces = self.pieces, 0
        self.checked_rows = np.empty(0, np.int64)
        self.row_guards: Array | None = None
        self.counting = self.places = self.row_pieces = self.checked_rows
        self.take: Callable[..., int] | None = None
        self.decay: tuple[Array, ...] = ()
        self.at_once = False
        self._bound: dict[Any, Callable[..., Any]] = {}
        self._sums: tuple[Array, Array] | None = None
        self.launch: Callable[[], None] | None = None

    def _cut(self) -> tuple[Pieces, int]:
        """Return the chunks of an update, and the number of elements."""
        return balanced(*self.items)

    @classmethod
    def joined(cls, tables: Sequence["Table"]) -> Self:
        """Merge tables with the same layout into one."""
        made = cls.__new__(cls)
        made.layout = tables[0].layout
        made.arrays = [array for table in tables for array in table.arrays]
        made.sizes = tuple(size for table in tables for size in table.sizes)
        made.items = tuple(item for table in tables for item in table.items)
        made.entry = np.concatenate([table.entry for table in tables])
        columns = max(table.guards.shape[2] for table in tables)
        made.guards = np.zeros((len(tables), tables[0].guards.shape[1], columns), np.uint64)
        for row, table in zip(made.guards, tables, strict=True):
            row[:, : table.guards.shape[2]] = table.guards[0]
        made._begin()
        return made

    def of_copies(self, originals: Sequence[Array], grad: Array, copy: Array) -> None:
        """Record which arrays are copies; :func:`launch` copies weight and state back."""
        pairs = zip(originals, self.arrays, strict=True)
        self.copied = [(o, n) for o, n in pairs if o is not n and not np.may_share_memory(o, n)]
        if grad is not copy:
            self.borrowed = grad, copy

    def renew(self) -> None:
        """Refresh the copies, after other tensors have been updated."""
        for original, copy in self.copied:
            self.move(copy, original)
        if self.borrowed:
            self.move(*self.borrowed[::-1])

    @property
    def is_dense(self) -> bool:
        """Whether an update is one launch of the dense kernel on the host, without copies."""
        layout = self.layout
        by_element = not (layout.sparse or layout.by_row or layout.rule.passes)
        return by_element and self.device is None and not (self.copied or self.borrowed)

    def serves(self, grad: "RowSparse") -> bool:
        """Whether the kernels are compiled for this kind of row-sparse gradient."""
        layout = self.layout
        return layout.sparse and layout.grad == kind_of(header(grad.values).dtype)

    def list_rows(self, words: str, grad: "RowSparse") -> None:
        """Set a row-sparse gradient.

        Raises
        ------
        ValueError
            An index is out of range, or the values have the wrong shape, as the gradient's arrays
            were changed after its creation.
        """
        height = len(self.arrays[0])
        values = _in_place(grad.values)
        given = _in_place(np.asarray(grad.indices, np.int64))
        if len(self.checked_rows) < len(given):
            self.checked_rows = np.empty(max(len(given), 2 * len(self.checked_rows)), np.int64)
        rows = self.checked_rows[: len(given)]
        found, wrong = cpu.survey()(given, height, rows)
        if found == OUTSIDE:
            raise ValueError(f"{words}: indices must be at least 0 and below {height}, got {wrong}")
        if values.size != len(rows) * self.width:
            expected = (len(rows), *grad.shape[1:])
            raise ValueError(f"{words}: values must have shape {expected}, got {values.shape}")
        if any(np.may_share_memory(values, array) for array in self.arrays):
            values = values.copy()
        if values is not grad.values:
            self.borrowed = grad.values, values
        if found == ASCENDING:
            starts = order = _counting(len(rows) + 1)
            pieces, _ = chunks((len(rows), self.width))
        else:
            with uninterrupted:  # numba loses an exception raised while it boxes the results
                rows, starts, order, pieces = cpu.order_rows()(rows, height, self._step)
        self.listed = values, rows, starts, order
        self.row_guards = None
        if values is grad.values and self.device is None:
            self._guard_rows(values, height)
        entry = self.entry[0]
        entry[[ROWS, STARTS, ORDER, -1]] = [a.ctypes.data for a in (rows, starts, order, values)]
        entry[SEGMENTS] = len(rows)
        self.list_pieces = pieces, values.size
        if self.layout.by_row:
            self.pieces, self.total = self.list_pieces
            if found == ASCENDING or len(pieces) == 1:
                self.pieces = shares(len(rows), self.width)

    def _guard_rows(self, values: Array, height: int) -> None:
        """Prepare the guards and arrays that :meth:`take_rows` needs."""
        self.row_guards = guard((values, self.checked_rows), 0)
        self.row_guards[:, NBYTES] = self.width * values.itemsize, height
        size = len(self.checked_rows)
        if len(self.counting) <= size:
            self.counting = _counting(size + 1)
            room = min(size, SORTED_AT_ONCE)
            self.places = np.empty((PLACES, room + 1), np.int64)
            self.row_pieces = np.empty((room // self._step + 1, 3), np.int64)

    @cached_property
    def _step(self) -> int:
        """Indexed rows of a chunk."""
        return max(CHUNK // max(self.width, 1), 1)

    def take_rows(self, values: Any, indices: Any, written: Array) -> bool:
        """Set a row-sparse gradient like :meth:`list_rows`, by one kernel.

        If the gradient needs the checks in Python, nothing changes and the result is False. It must
        not overlap the sorted memory ranges `written`.
        """
        if self.row_guards is None:
            return False
        if type(indices) is np.ndarray and indices.dtype is INT32:
            indices = indices.astype(np.int64)
        arguments = (self.entry, self.row_guards, written, self.checked_rows, self.counting,
                     self.places, self.row_pieces, self._step)  # fmt: skip
        if self.take is None:
            self.take = bind(cpu.take_rows(), *arguments, 0, 0)
        cuts = self.take(*arguments, id(values), id(indices))
        if cuts < 0:
            return False
        self.listed = (values,)
        rows = self.entry.item(0, SEGMENTS)
        if cuts:
            self.list_pieces = self.row_pieces[:cuts], values.size
        else:
            self.list_pieces = chunks((rows, self.width))
        if self.layout.by_row:
            self.pieces, self.total = self.list_pieces
            if cuts < 2:
                self.pieces = shares(rows, self.width)
        return True

    def pay(self, paid: Array, before: float, after: float, at_once: bool) -> None:
        """Apply deferred weight decay to the indexed rows (`at_once`: to all) in the next update.

        Parameters
        ----------
        paid : numpy.ndarray
            Decay applied to each row so far, as a sum of logarithms.
        before, after : float
            Accumulated decay before and after the step, as sums of logarithms.
        at_once : bool
            Whether to apply the decay of all rows in each step.
        """
        totals = np.array([before, after])
        self.entry[0, [PAID, DECAY]] = paid.ctypes.data, totals.ctypes.data
        self.decay, self.at_once = (paid, totals), at_once

    def give_back(self) -> None:
        """Copy weight and state back if kernels worked on copies, then :meth:`let_go`."""
        for original, copy in self.copied:
            self.move(original, copy)
        self.let_go()

    def let_go(self) -> None:
        """Release the gradients and copies."""
        if self.copied:
            self.arrays = ()
        self.copied, self.borrowed, self.listed = (), None, ()

    @property
    def done(self) -> bool:
        """Whether the update of this step has run, even if an error was raised after it."""
        return bool(self.entry[0, DONE])

    def spans(self) -> NDArray[np.uint64]:
        """Return the sorted start and end addresses of the written arrays, as two rows."""
        first, last = self.written()
        order = np.argsort(first)
        return np.stack([first[order], last[order]])

    def written(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the start and end addresses of the written arrays."""
        count = self.entry.shape[1] - ADDRESS - 1
        begin = self.entry[:, ADDRESS : ADDRESS + count]
        end = begin + self.guards[:, :count, NBYTES]
        return joined_ranges(begin, end, [original for original, _ in self.copied])

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the start and end addresses of the gradients."""
        begin = self.entry[:, -1]
        if self.layout.sparse:
            end = begin + np.uint64(self.listed[0].nbytes if self.listed else 0)
        else:
            end = begin + self.guards[:, -1, NBYTES]
        return joined_ranges(begin, end, self.borrowed[:1] if self.borrowed else ())

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; the order depends only on its shape."""
        layout = self.layout
        pieces, total = self.list_pieces if layout.sparse else self.flat
        if self._sums is None or len(self._sums[0]) != len(pieces):
            self._sums = np.zeros(len(pieces)), np.zeros(len(self.sizes))
        partials, sums = self._sums
        partials.fill(0)
        sums.fill(0)
        column = self.entry.shape[1] - 1
        what = layout.grad, layout.real, column, layout.sparse
        self._call(cpu.squares, what, total, pieces, self.entry, partials)
        self._call(cpu.totals, (), 0, pieces, partials, sums)
        return sums

    @cached_property
    def flat(self) -> tuple[NDArray[np.int64], int]:
        """Chunks of elements, independent of the number of threads."""
        return chunks(*[(size, 1) for size in self.sizes])

    def run(self, combine: Combine | None = None) -> None:
        """Launch the kernels of every reduction and of the update, then :meth:`give_back`.

        If tensors are slices, `combine` computes the sums of whole tensors from the chunks' sums.
        """
        rule, layout = self.layout.rule, self.layout
        if rule.passes:
            pieces, total = self.flat
            for step, count in enumerate(rule.sums):
                partials = np.zeros((len(pieces), count))
                arguments = pieces, self.entry, self.records, partials
                self._call(cpu.sums, (layout, step), total, *arguments)
                summed = combine(pieces, partials, len(self.entry)) if combine else None
                first, sums = summed or (pieces, partials)
                self._call(cpu.finish, (layout, step), 0, first, self.entry, self.records, sums)
        self.update(self.pieces, self.total)
        if self.at_once:
            self.settle()
        if self.copied or self.listed or self.borrowed:
            self.give_back()

    def update(self, pieces: Pieces, total: int) -> None:
        """Apply the rule to the chunks `pieces`, which have `total` elements."""
        if not total:
            return
        layout = self.layout
        if layout.by_row:
            factory = cpu.rows if layout.rule.row else cpu.lazy
            cost = total * (ROW_COST if layout.sparse else 1)
            self._call(factory, (layout,), cost, pieces, self.entry, self.records)
        else:
            arguments = pieces, self.entry, self.records
            kernel = self._call(cpu.dense, (layout,), total, *arguments)
            if self.is_dense and total >= PARALLEL_FROM and pieces is self.pieces:
                self.launch = partial(kernel, *arguments)

    def _call(
        self, factory: Callable[..., Any], what: tuple[Any, ...], total: int, *arguments: Any
    ) -> Callable[..., Any]:
        """Launch a kernel on `total` elements, parallel if that is worthwhile; return it."""
        parallel = total >= PARALLEL_FROM and may_run_parallel()
        kernel = self._bound.get((factory, what[1:], parallel))
        if kernel is None:
            one = factory in (cpu.finish, cpu.totals)
            made = factory(*what) if one else factory(*what, parallel)
            kernel = self._bound[factory, what[1:], parallel] = bind(made, *arguments)
        if parallel:
            with turn():
                kernel(*arguments)
        else:
            kernel(*arguments)
        return kernel

    def settle(self) -> None:
        """Apply the deferred weight decay of all rows, including the last step's."""
        totals = self.decay[1]
        totals[0] = totals[1]
        pieces, total = chunks((len(self.arrays[0]), self.width))
        if total:
            self._call(cpu.settle, (self.layout,), total, pieces, self.entry)


def launch(tables: Sequence[Table], combine: Combine | None = None) -> None:
    """Update the tensors of `tables` in place, in order.

    See :meth:`Table.run` for `combine`.
    """
    for table in tables:
        if table is not tables[0]:
            table.renew()
        if table.copied or table.at_once:
            with uninterrupted:
                table.run(combine)
        else:
            table.run(combine)


def joined_ranges(
    begin: NDArray[np.uint64], end: NDArray[np.uint64], arrays: Sequence[Array]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return flattened start and end addresses, with the bounds of `arrays` appended."""
    bounds = np.array([byte_bounds(array) for array in arrays], np.uint64).reshape(-1, 2)
    return np.append(begin, bounds[:, 0]), np.append(end, bounds[:, 1])


@lru_cache(maxsize=1024)
def chunks(*tensors: tuple[int, int], size: int = CHUNK) -> tuple[NDArray[np.int64], int]:
    """Divide tensors ``(items, width)``, with `width` elements per item, into chunks.

    Chunks have about `size` elements.

    Returns an array with a row ``(tensor, start, size)`` for each chunk, in items, and the total
    number of elements.
    """
    pieces = [np.empty((0, 3), np.int64)]
    for tensor, (items, width) in enumerate(tensors):
        start = np.arange(0, items, max(size // max(width, 1), 1))
        sizes = np.diff(start, append=items)
        pieces.append(np.stack([np.full_like(start, tensor), start, sizes], axis=1))
    return np.concatenate(pieces), sum(items * width for items, width in tensors)


def shares(rows: int, width: int) -> NDArray[np.int64]:
    """Return row-sparse chunks: one for each thread, or a single one if that is faster."""
    threads = thread_count() if rows * width * ROW_COST >= PARALLEL_FROM else 1
    each = max(-(-rows // threads), 1)
    made = np.zeros((-(-rows // each), 3), np.int64)
    for k in range(len(made)):
        made[k, 1:] = k * each, min(each, rows - k * each)
    return made


def balanced(*tensors: tuple[int, int]) -> tuple[NDArray[np.int64], int]:
    """Divide tensors like :func:`chunks`, with an equal share of the elements for each thread.

    Threads take equal numbers of consecutive chunks, so shares with fewer chunks are padded with
    empty ones.
    """
    total = sum(items * width for items, width in tensors)
    threads = thread_count()
    if total < PARALLEL_FROM or threads == 1:
        return chunks(*tensors)
    return _balanced(tensors, threads)


@lru_cache(maxsize=1024)
def _balanced(tensors: tuple[tuple[int, int], ...], threads: int) -> tuple[NDArray[np.int64], int]:
    total = sum(items * width for items, width in tensors)
    each = -(-total // (threads * LINE)) * LINE
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    done = 0
    for tensor, (items, width) in enumerate(tensors):
        first, unit = 0, max(width, 1) * LINE
        while first < items:
            share = min(done // each, threads - 1)
            room = -(-((share + 1) * each - done) // unit) * LINE
            count = items - first if share == threads - 1 else min(items - first, room)
            shares[share].append((tensor, first, count))
            first, done = first + count, done + count * width
    longest = max(map(len, shares))
    padded = [share + [(0, 0, 0)] * (longest - len(share)) for share in shares]
    return np.array(padded, np.int64).reshape(-1, 3), total


def _in_place(array: Array) -> Array:
    """Return the array, or a contiguous and aligned copy."""
    made = np.ascontiguousarray(array)
    return made if made.flags.aligned else made.copy()


def _counting(size: int) -> NDArray[np.int64]:
    """Return ``arange(size)``, a view of a shared array that must not be written to."""
    return _powers(size.bit_length())[:size]


@lru_cache(maxsize=64)
def _powers(bits: int) -> NDArray[np.int64]:
    return np.arange(1 << bits)
