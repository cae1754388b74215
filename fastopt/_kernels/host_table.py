"""Tables of tensors on the host.

Tests: ``tests/engine/test_plan_stale.py``, ``tests/kernels/test_segments.py``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from fastopt._interrupts import uninterrupted
from fastopt._kernels import cpu, cpu_calls, cpu_rows, cpu_sums
from fastopt._kernels.chunks import (
    CHUNK,
    PARALLEL_FROM,
    ROW_COST,
    Chunks,
    balanced,
    chunks_of,
    shares,
)
from fastopt._kernels.compiling import bind
from fastopt._kernels.layout import APPLIED, DECAY, DONE, ORDER, ROWS, SEGMENTS, STARTS
from fastopt._kernels.numpy_abi import NBYTES, guard
from fastopt._kernels.segments import ASCENDING, OUTSIDE, PLACES
from fastopt._kernels.table import Array, Combine, Table, launch
from fastopt._kernels.threads import may_run_parallel, turn

if TYPE_CHECKING:
    from fastopt.sparse import RowSparse

__all__ = ["HostTable"]

SORTED_AT_ONCE = 65_536
"""Maximum indexed rows that are sorted while other Python threads wait, as headers are read."""

INT32 = np.dtype(np.int32)

Prepared = tuple[partial[Any], bool]
"""A kernel with its arguments, and whether it is parallel."""


@final
class HostTable(Table):
    """A table of arrays on the host."""

    def _begin(self) -> None:
        super()._begin()
        self.checked_rows = np.empty(0, np.int64)
        self.row_guards: Array | None = None
        self.counting = self.places = self.chunk_buffer = self.checked_rows
        self.take: Callable[..., int] | None = None
        self._bound: dict[Any, Callable[..., Any]] = {}
        self._sums: tuple[Array, Array] | None = None

    def _cut(self) -> tuple[Chunks, int]:
        return balanced(*self.items)

    def _grad_bytes(self) -> NDArray[np.uint64]:
        sizes: NDArray[np.uint64] = self.guards[:, -1, NBYTES]
        return sizes

    def list_rows(self, context: str, grad: "RowSparse") -> None:
        """See :meth:`Table.list_rows`."""
        height = len(self.arrays[0])
        values = _in_place(grad.values)
        given = _in_place(np.asarray(grad.indices, np.int64))
        if len(self.checked_rows) < len(given):
            self.checked_rows = np.empty(max(len(given), 2 * len(self.checked_rows)), np.int64)
        rows = self.checked_rows[: len(given)]
        found, wrong = cpu_calls.survey()(given, height, rows)
        if found == OUTSIDE:
            raise ValueError(
                f"{context}: indices must be at least 0 and below {height}, got {wrong}"
            )
        if values.size != len(rows) * self.width:
            expected = (len(rows), *grad.shape[1:])
            raise ValueError(f"{context}: values must have shape {expected}, got {values.shape}")
        if any(np.may_share_memory(values, array) for array in self.arrays):
            values = values.copy()
        if values is not grad.values:
            self.borrowed = grad.values, values
        if found == ASCENDING:
            starts = order = _counting(len(rows) + 1)
            chunks, _ = chunks_of((len(rows), self.width))
        else:
            with uninterrupted:  # numba loses an exception raised while it boxes the results
                rows, starts, order, chunks = cpu_calls.order_rows()(rows, height, self._step)
        self.listed = values, rows, starts, order
        self.row_guards = None
        if values is grad.values:
            self._guard_rows(values, height)
        entry = self.table[0]
        entry[[ROWS, STARTS, ORDER, -1]] = [a.ctypes.data for a in (rows, starts, order, values)]
        entry[SEGMENTS] = len(rows)
        self.row_chunks = chunks, values.size
        if self.layout.by_row:
            self.chunks, self.total = self.row_chunks
            if found == ASCENDING or len(chunks) == 1:
                self.chunks = shares(len(rows), self.width)

    def _guard_rows(self, values: Array, height: int) -> None:
        """Prepare the guards and arrays that :meth:`take_rows` needs."""
        self.row_guards = guard((values, self.checked_rows), 0)
        self.row_guards[:, NBYTES] = self.width * values.itemsize, height
        size = len(self.checked_rows)
        if len(self.counting) <= size:
            self.counting = _counting(size + 1)
            room = min(size, SORTED_AT_ONCE)
            self.places = np.empty((PLACES, room + 1), np.int64)
            self.chunk_buffer = np.empty((room // self._step + 1, 3), np.int64)

    @cached_property
    def _step(self) -> int:
        """Indexed rows of a chunk."""
        return max(CHUNK // max(self.width, 1), 1)

    def take_rows(self, values: Any, indices: Any, written: Array) -> bool:
        """See :meth:`Table.take_rows`."""
        if self.row_guards is None:
            return False
        if type(indices) is np.ndarray and indices.dtype is INT32:
            indices = indices.astype(np.int64)
        arguments = (self.table, self.row_guards, written, self.checked_rows, self.counting,
                     self.places, self.chunk_buffer, self._step)  # fmt: skip
        if self.take is None:
            self.take = bind(cpu_calls.take_rows(), *arguments, 0, 0)
        cuts = self.take(*arguments, id(values), id(indices))
        if cuts < 0:
            return False
        self.listed = (values,)
        rows = self.table.item(0, SEGMENTS)
        if cuts:
            self.row_chunks = self.chunk_buffer[:cuts], values.size
        else:
            self.row_chunks = chunks_of((rows, self.width))
        if self.layout.by_row:
            self.chunks, self.total = self.row_chunks
            if cuts < 2:
                self.chunks = shares(rows, self.width)
        return True

    def apply_decay(self, applied: Array, before: float, after: float, at_once: bool) -> None:
        """See :meth:`Table.apply_decay`."""
        totals = np.array([before, after])
        self.table[0, [APPLIED, DECAY]] = applied.ctypes.data, totals.ctypes.data
        self.decay, self.at_once = (applied, totals), at_once

    def squares(self) -> NDArray[np.float64]:
        """See :meth:`Table.squares`."""
        layout = self.layout
        chunks, total = self.row_chunks if layout.sparse else self.flat
        if self._sums is None or len(self._sums[0]) != len(chunks):
            self._sums = np.zeros(len(chunks)), np.zeros(len(self.sizes))
        partials, sums = self._sums
        partials.fill(0)
        sums.fill(0)
        column = self.table.shape[1] - 1
        what = layout.grad, layout.real, column, layout.sparse
        self._call(cpu_sums.squares, what, total, chunks, self.table, partials)
        self._call(cpu_sums.totals, (), 0, chunks, partials, sums)
        return sums

    def run(self, combine: Combine | None = None) -> None:
        """See :meth:`Table.run`."""
        if combine is None:
            launch([self])
            return
        rule, layout = self.layout.rule, self.layout
        chunks, total = self.flat
        for step, count in enumerate(rule.sums):
            partials = np.zeros((len(chunks), count))
            arguments = chunks, self.table, self.hyper, partials
            self._call(cpu_sums.sums, (layout, step), total, *arguments)
            largest = rule.passes[step].largest
            summed = combine(chunks, partials, len(self.table), largest)
            first, sums = summed or (chunks, partials)
            self._call(cpu_sums.finish, (layout, step), 0, first, self.table, self.hyper, sums)
        self.update(self.chunks, self.total)
        if self.at_once:
            self.flush_decay()
        if self.copied or self.listed or self.borrowed:
            self.copy_back()

    def moving(self, target: Any, source: Any) -> partial[Any]:
        """See :meth:`Table.moving`; ``np.copyto`` calls Python."""
        return partial(np.ndarray.__setitem__, target, ..., source)

    def calls(self) -> tuple[list[partial[Any]], bool]:
        """See :meth:`Table.calls`."""
        layout, made = self.layout, Calls()
        chunks, total = self.flat if layout.rule.passes else (self.chunks, 0)
        for step, count in enumerate(layout.rule.sums):
            arguments = chunks, self.table, self.hyper, np.zeros((len(chunks), count))
            made.add(self._prepared(cpu_sums.sums, (layout, step), total, *arguments))
            made.add(self._prepared(cpu_sums.finish, (layout, step), 0, *arguments))
        if self.total:
            made.add(self._prepared_update(self.chunks, self.total))
        if self.at_once and len(self.arrays[0]) * self.width:
            made.append(self.moving(self.decay[1][:1], self.decay[1][1:]))
            made.add(self._prepared_flush())
        made += [self.moving(*pair) for pair in self.copied]
        made.append(partial(self.table.__setitem__, (0, DONE), 1))  # also without elements
        return made, made.parallel

    def update(self, chunks: Chunks, total: int) -> None:
        """Apply the rule to `chunks`, which have `total` elements."""
        if total:
            _launch(*self._prepared_update(chunks, total))

    def _prepared_update(self, chunks: Chunks, total: int) -> Prepared:
        layout = self.layout
        arguments = chunks, self.table, self.hyper
        if layout.by_row:
            factory = cpu_rows.rows if layout.rule.row else cpu.lazy
            cost = total * (ROW_COST if layout.sparse else 1)
            return self._prepared(factory, (layout,), cost, *arguments)
        return self._prepared(cpu.dense, (layout,), total, *arguments)

    def _call(
        self, factory: Callable[..., Any], what: tuple[Any, ...], total: int, *arguments: Any
    ) -> None:
        """Launch a kernel on `total` elements, parallel if that is worthwhile."""
        _launch(*self._prepared(factory, what, total, *arguments))

    def _prepared(
        self, factory: Callable[..., Any], what: tuple[Any, ...], total: int, *arguments: Any
    ) -> Prepared:
        """Return a compiled kernel with its arguments, and whether it is parallel."""
        parallel = total >= PARALLEL_FROM and may_run_parallel()
        kernel = self._bound.get((factory, what[1:], parallel))
        if kernel is None:
            one = factory in (cpu_sums.finish, cpu_sums.totals)
            loop = factory(*what) if one else factory(*what, parallel)
            kernel = self._bound[factory, what[1:], parallel] = bind(loop, *arguments)
        return partial(kernel, *arguments), parallel

    def flush_decay(self) -> None:
        """See :meth:`Table.flush_decay`."""
        totals = self.decay[1]
        totals[0] = totals[1]
        if len(self.arrays[0]) * self.width:
            _launch(*self._prepared_flush())

    def _prepared_flush(self) -> Prepared:
        chunks, total = chunks_of((len(self.arrays[0]), self.width))
        return self._prepared(cpu.flush_decay, (self.layout,), total, chunks, self.table)


class Calls(list[partial[Any]]):
    """Calls of kernels in order, and whether one of them is parallel."""

    parallel = False

    def add(self, prepared: Prepared) -> None:
        """Append a kernel."""
        self.append(prepared[0])
        self.parallel |= prepared[1]


def _launch(call: partial[Any], parallel: bool) -> None:
    """Launch a kernel."""
    with turn() if parallel else nullcontext():
        call()


def _in_place(array: Array) -> Array:
    """Return the array, or a contiguous and aligned copy."""
    contiguous = np.ascontiguousarray(array)
    return contiguous if contiguous.flags.aligned else contiguous.copy()


def _counting(size: int) -> NDArray[np.int64]:
    """Return ``arange(size)``, a view of a shared array that must not be written to."""
    return _powers(size.bit_length())[:size]


@lru_cache(maxsize=64)
def _powers(bits: int) -> NDArray[np.int64]:
    return np.arange(1 << bits)
