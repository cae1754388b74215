"""Tables: the kernel arguments that describe the arrays of one tensor on the host.

Tests: ``tests/engine/test_unrecorded.py``, ``tests/kernels/test_segments.py``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import addressof, c_char
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds
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
from fastopt._kernels.codes import scales_shape
from fastopt._kernels.compiling import bind
from fastopt._kernels.layout import (
    ADDRESS,
    APPLIED,
    DECAY,
    DONE,
    ORDER,
    PITCH,
    ROWS,
    SEGMENTS,
    STARTS,
    WIDTH,
    Layout,
)
from fastopt._kernels.segments import ASCENDING, OUTSIDE
from fastopt._kernels.threads import may_run_parallel, turn

Array = np.ndarray[Any, Any]
Combine = Callable[[Chunks, Array, int, bool], tuple[Chunks, Array]]
"""Takes chunks, their sums, the number of tensors, and whether the sums are maxima; returns chunks
and sums of whole tensors."""

Prepared = tuple[partial[Any], bool]
"""A kernel with its arguments, and whether it is parallel."""


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    memory: Any = array
    try:
        return addressof(c_char.from_buffer(memory))  # in a quarter of the time
    except (TypeError, ValueError, BufferError):  # it is read-only, empty or strided
        found: int = array.__array_interface__["data"][0]
        return found


class RowGradient(Protocol):
    """A row-sparse gradient, such as a :class:`fastopt.sparse.RowSparse`."""

    @property
    def values(self) -> Any:
        """The indexed rows."""

    @property
    def indices(self) -> Any:
        """The index of each row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole gradient."""


class Table:
    """Kernel arguments for the arrays of one tensor, of one call.

    The attributes ``chunks``, ``table`` and ``hyper`` are the arguments of that name of a kernel.

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
    after : Table or None
        What is launched next: it averages all rows, after the update of some.
    """

    after: "Table | None" = None

    def __init__(
        self,
        layout: Layout,
        weight: tuple[Array, ...],
        state: tuple[Array, ...],
        grad: Array,
    ) -> None:
        self.layout = layout
        self.arrays: Sequence[Array] = (*weight, *state)  # kept alive
        self.size = weight[0].size
        self.width, item = items_of(layout, weight[0])
        self.table = np.zeros((1, ADDRESS + len(self.arrays) + 1), np.uint64)
        self.table[0, WIDTH] = self.width
        if layout.pitched:
            self.table[0, PITCH] = weight[0].strides[0]
        given = self.arrays if layout.sparse else (*self.arrays, grad)
        self.table[0, ADDRESS : ADDRESS + len(given)] = [array.ctypes.data for array in given]
        self.fields = np.zeros((1, len(layout.rule.hyper)), layout.real)
        self.hyper = self.fields.view(layout.record).reshape(-1)
        self.chunks, self.total = balanced(item)
        self.copied: Sequence[tuple[Array, Array]] = ()
        self.borrowed: tuple[Array, Array] | None = None
        self.listed: tuple[Array, ...] = (grad,)  # kept alive until release()
        self.row_chunks = self.chunks, 0
        self.decay: tuple[Array, ...] = ()
        self.at_once = False

    def of_copies(self, originals: Sequence[Array], grad: Array, copy: Array) -> None:
        """Record which arrays are copies; :func:`launch` copies weight and state back."""
        pairs = zip(originals, self.arrays, strict=True)
        self.copied = [(o, n) for o, n in pairs if o is not n and not np.may_share_memory(o, n)]
        if grad is not copy:
            self.borrowed = grad, copy

    def refreshing(self) -> list[partial[Any]]:
        """Return calls that refresh the copies, after other tensors have been updated."""
        moves = [_moving(copy, original) for original, copy in self.copied]
        return [*moves, _moving(*self.borrowed[::-1])] if self.borrowed else moves

    def list_rows(self, context: str, grad: RowGradient) -> None:
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
        rows = np.empty(len(given), np.int64)
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
            step = max(CHUNK // max(self.width, 1), 1)  # indexed rows of a chunk
            with uninterrupted:  # numba loses an exception raised while it boxes the results
                rows, starts, order, chunks = cpu_calls.order_rows()(rows, height, step)
        self.listed = values, rows, starts, order
        entry = self.table[0]
        entry[[ROWS, STARTS, ORDER, -1]] = [a.ctypes.data for a in (rows, starts, order, values)]
        entry[SEGMENTS] = len(rows)
        self.row_chunks = chunks, values.size
        if self.layout.by_row:
            self.chunks, self.total = self.row_chunks
            if found == ASCENDING or len(chunks) == 1:
                self.chunks = shares(len(rows), self.width)

    @cached_property
    def flat(self) -> tuple[NDArray[np.int64], int]:
        """Chunks of elements, independent of the number of threads."""
        return chunks_of((self.size, 1))

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of the gradient; the order depends only on its shape."""
        layout, sums = self.layout, np.zeros(1)
        chunks, total = self.row_chunks if layout.sparse else self.flat
        partials = np.zeros(len(chunks))
        what = layout.grad, layout.real, self.table.shape[1] - 1, layout.sparse
        _launch(*_prepared(cpu_sums.squares, what, total, chunks, self.table, partials))
        _launch(*_prepared(cpu_sums.totals, (), 0, chunks, partials, sums))
        return sums

    def run(self, combine: Combine) -> None:
        """Launch the kernels of every reduction and of the update, then :meth:`copy_back`.

        The tensor is a slice: `combine` computes the sums of the whole from the chunks' sums.
        """
        rule, layout = self.layout.rule, self.layout
        chunks, total = self.flat
        for step, count in enumerate(rule.sums):
            partials = np.zeros((len(chunks), count))
            arguments = chunks, self.table, self.hyper, partials
            _launch(*_prepared(cpu_sums.sums, (layout, step), total, *arguments))
            largest = rule.passes[step].largest
            first, sums = combine(chunks, partials, 1, largest)
            finish = first, self.table, self.hyper, sums
            _launch(*_prepared(cpu_sums.finish, (layout, step), 0, *finish))
        if self.total:
            _launch(*self._update())
        if self.at_once:
            self.flush_decay()
        self.copy_back()

    def calls(self) -> tuple[list[partial[Any]], bool]:
        """Return what :meth:`run` calls, functions in C, and whether one of them is parallel."""
        layout, made = self.layout, list[Prepared]()
        chunks, total = self.flat if layout.rule.passes else (self.chunks, 0)
        for step, count in enumerate(layout.rule.sums):
            arguments = chunks, self.table, self.hyper, np.zeros((len(chunks), count))
            made.append(_prepared(cpu_sums.sums, (layout, step), total, *arguments))
            made.append(_prepared(cpu_sums.finish, (layout, step), 0, *arguments))
        if self.total:
            made.append(self._update())
        if self.at_once and self.size:
            made += [(_moving(self.decay[1][:1], self.decay[1][1:]), False), self._flush()]
        done = partial(self.table.__setitem__, (0, DONE), 1)  # also without elements
        found = [call for call, _ in made]
        found += [*(_moving(*pair) for pair in self.copied), done]
        return found, any(parallel for _, parallel in made)

    def _update(self) -> Prepared:
        """Return the kernel that applies the rule."""
        layout, arguments = self.layout, (self.chunks, self.table, self.hyper)
        if layout.by_row:
            factory = cpu_rows.rows if layout.rule.row else cpu.lazy
            cost = self.total * (ROW_COST if layout.sparse else 1)
            return _prepared(factory, (layout,), cost, *arguments)
        return _prepared(cpu.dense, (layout,), self.total, *arguments)

    def _flush(self) -> Prepared:
        chunks, total = chunks_of((len(self.arrays[0]), self.width))
        return _prepared(cpu.flush_decay, (self.layout,), total, chunks, self.table)

    def flush_decay(self) -> None:
        """Apply the deferred weight decay of all rows, including the last step's."""
        totals = self.decay[1]
        totals[0] = totals[1]
        if self.size:
            _launch(*self._flush())

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
        totals = np.array([before, after])
        self.table[0, [APPLIED, DECAY]] = applied.ctypes.data, totals.ctypes.data
        self.decay, self.at_once = (applied, totals), at_once

    def copy_back(self) -> None:
        """Copy weight and state back if kernels worked on copies, then :meth:`release`."""
        for original, copy in self.copied:
            original[...] = copy
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
            for move in table.refreshing() if table is not tables[0] else ():
                move()
            with uninterrupted:
                table.run(combine)
        return
    made: list[partial[Any]] = []
    parallel = False
    for table in tables:
        if table is not tables[0]:
            made += table.refreshing()
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
    bounds = np.array([byte_bounds(array) for array in arrays], np.uint64).reshape(-1, 2)
    return np.append(begin, bounds[:, 0]), np.append(end, bounds[:, 1])


def _moving(target: Any, source: Any) -> partial[Any]:
    """Return the call that copies the elements of an array; ``np.copyto`` calls Python."""
    return partial(np.ndarray.__setitem__, target, ..., source)


def _prepared(
    factory: Callable[..., Any], what: tuple[Any, ...], total: int, *arguments: Any
) -> Prepared:
    """Return a compiled kernel with its arguments, and whether it is parallel."""
    parallel = total >= PARALLEL_FROM and may_run_parallel()
    one = factory in (cpu_sums.finish, cpu_sums.totals)
    kernel = bind(factory(*what) if one else factory(*what, parallel), *arguments)
    return partial(kernel, *arguments), parallel


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
