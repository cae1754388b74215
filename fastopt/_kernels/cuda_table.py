"""Tables of tensors on a CUDA device.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels import cpu_calls
from fastopt._kernels.chunks import Chunks, chunks_of
from fastopt._kernels.compiling import bind
from fastopt._kernels.device_memory import Copy, contiguous, move
from fastopt._kernels.devices import (
    Header,
    Reading,
    device_of,
    handles_of,
    header,
    mark_written,
    readings,
    stays,
)
from fastopt._kernels.lanes import BLOCK, LANES
from fastopt._kernels.layout import (
    APPLIED,
    DECAY,
    DONE,
    FOLDED,
    ORDER,
    ROWS,
    SEGMENTS,
    STARTS,
    Layout,
)
from fastopt._kernels.segments import FOLD, MIXED, OUTSIDE
from fastopt._kernels.table import Array, Combine, Table

if TYPE_CHECKING:
    from fastopt.sparse import RowSparse

__all__ = ["CudaTable"]

FEW = 8
"""Number of arrays of chunks that are cached on the device."""

EACH = 16
"""Elements that each thread of a full block updates."""

DONE_BYTES = 8
"""Bytes of the DONE column of a table, its first."""

assert DONE == 0

MOST = 64
"""Maximum number of hyper-parameters that are passed by value."""

UNREADABLE = AttributeError, KeyError, TypeError, ValueError
"""Errors from reading an object that is not a device array; the full checks report it."""


@final
class CudaTable(Table):
    """A table whose arrays are on a CUDA device, described by headers.

    Hyper-parameters that are equal for all tensors are passed to kernels by value. Everything else
    is uploaded when it has changed, which is rare for the addresses.
    """

    move = staticmethod(move)

    def __init__(
        self, layout: Layout, weight: tuple[Array, ...], state: tuple[Array, ...], grad: Array
    ) -> None:
        super().__init__(layout, weight, state, grad, 0)  # headers have one layout for life
        # Gradients are checked by take_grads().
        self.guards = np.ascontiguousarray(self.guards[:, : len(self.arrays)])
        self.grad_bytes = np.array([grad.nbytes], np.uint64)
        self.grad_kinds: list[Any] = []
        self.watched: list[Header] = []
        self.watched_at: tuple[list[int], list[Any]] = [], []
        self.leads: list[Any] = []

    def _begin(self) -> None:
        from fastopt._kernels import cuda, cuda_blocks, cuda_driver, cuda_order

        self.rate = EACH * cuda.THREADS
        super()._begin()
        self.kernels, self.coding, self.sorting, self.driver = (
            cuda,
            cuda_blocks,
            cuda_order,
            cuda_driver,
        )
        self.device: Any = device_of(self.arrays[0])
        self.words = self.fields.view(f"u{self.fields.itemsize}")
        self.uploaded: bytes | None = None
        count = self.words.shape[1]
        self._by_value: Any = None
        if not self.layout.rule.passes and 0 < count <= MOST:
            self._by_value = cuda_driver.values(self.fields.dtype, count)
        self._memory: dict[Any, Any] = {}
        self._chunks: dict[int, tuple[Array, Any]] = {}
        self._streams: set[int] = set()
        self._segments: Any = None
        self._take: Any = None
        self._seen: list[int] = []
        self._alive: list[Any] = []
        self._dead: list[Any] = []
        self.strided: _Strided | None = None
        self.captured = self.capturable = False

    @property
    def alone(self) -> bool:
        """See :meth:`Table.alone`."""
        return super().alone or self.strided is not None

    def watch(self, arrays: Sequence[Header]) -> None:
        """Record the arrays that their owners might move; numba's never move."""
        self.watched = [each for each in arrays if each.kept is None and not stays(each.array())]
        addresses = [each.ctypes.data for each in self.watched]
        self.watched_at = addresses, readings([each.array() for each in self.watched]).kinds

    @classmethod
    def joined(cls, tables: Sequence[Any]) -> Any:
        """Merge tables with the same layout and device into one."""
        made = super().joined(tables)
        made.grad_bytes = np.concatenate([table.grad_bytes for table in tables])
        made.grad_kinds = [kind for table in tables for kind in table.grad_kinds]
        made.watched = [array for table in tables for array in table.watched]
        addresses, kinds = (
            [each for table in tables for each in table.watched_at[k]] for k in range(2)
        )
        made.watched_at = addresses, kinds
        made.leads = [lead for table in tables for lead in table.leads]
        made._streams = {stream for table in tables for stream in table._streams}
        return made

    def _cut(self) -> tuple[Chunks, int]:
        return chunks_of(*self.items, size=self.rate)

    # The arrays of a call

    def prepare(self, lead: Any, arrays: Sequence[Header], grad: Header, values: Any) -> None:
        """Record the properties that later calls are compared with.

        Parameters
        ----------
        lead : Header
            The array whose stream is used.
        arrays : sequence of Header
            The caller's arrays of weight and state.
        grad : Header
            The caller's gradient.
        values : Header
            The gradient that kernels read: `grad`, or a copy of it.
        """
        self.leads = [lead]
        self.watch(arrays)
        self._streams = set() if self.layout.sparse else {values.stream}
        of = grad.array() if grad.kept is None else None
        self.grad_kinds = [None] if of is None else readings([of]).kinds
        if values is not grad and not self.layout.sparse:
            with self.driver.entered(self.device.device_id):
                self.strided = _Strided(values, grad)
        self.driver.refuse_capture(self.stream_handle, *self._streams - {self.stream_handle})

    @cached_property
    def _moving(self) -> list[Any]:
        """Watched arrays whose stream the update uses."""
        return [lead for lead in self.leads if any(lead is each for each in self.watched)]

    @cached_property
    def _tensors(self) -> list[Any]:
        """References to the watched arrays, whose versions torch counts."""
        return [each.array for each in self.watched]

    def _unmoved(self) -> bool:
        """Whether weight and state have not moved and are used on one stream."""
        try:
            found = readings([each.array() for each in self.watched])
            if (found.addresses, found.kinds) != self.watched_at:
                return False
        except UNREADABLE:
            return False
        for each, stream in zip(self.watched, found.streams, strict=True):
            each.stream = stream
        handle = self.stream_handle
        return all(lead.stream == handle for lead in self._moving)

    def take_grads(self, grads: Sequence[Any], written: NDArray[np.uint64]) -> bool:
        """Enter the gradients of a call, unless they are row-sparse.

        Parameters
        ----------
        grads : sequence
            The gradient of each tensor.
        written : numpy.ndarray
            Sorted memory ranges that are written to, which gradients must not overlap.

        Returns
        -------
        bool
            False, with nothing changed, if a gradient differs in kind from the one that the table
            was made for, or a weight or state has moved.

        Raises
        ------
        RuntimeError
            The stream is being captured for a CUDA graph.
        """
        if self.watched and not self._unmoved():
            return False
        handle = self.stream_handle
        self.captured = self.driver.is_captured(handle)
        if self.captured and not self.capturable:
            self.driver.refuse_capture(handle)
        if self.layout.sparse:
            return True
        ids = list(map(id, grads))
        again = ids == self._seen
        if again and self._alive and not self._dead:  # the same numba arrays
            return self._use(handles_of(grads), handle)
        try:
            found = readings(grads)
        except UNREADABLE:
            return False
        if found.kinds != self.grad_kinds:
            return False
        self._use(found.streams, handle)
        if not self._enter(found, written):
            return False
        self._seen, self._alive, self._dead = ids, [], []
        if again and all(map(stays, grads)):
            died = self._dead.append
            self._alive = [ref(grad, died) for grad in grads]
        return True

    def _use(self, streams: Sequence[int], handle: int) -> bool:
        """Record the streams of gradients, none of which is captured, besides the table's own."""
        self._streams = set(streams)
        if self._streams != {handle}:
            if self.captured:  # the others' work would not be part of the graph
                self.driver.refuse_capture(handle)
            self.driver.refuse_capture(*self._streams - {handle})
        return True

    def _enter(self, found: Reading, written: NDArray[np.uint64]) -> bool:
        """Enter addresses of gradients if they are aligned and overlap no written memory."""
        first = np.array(found.addresses, np.uint64)
        itemsize = np.dtype(self.layout.grad).itemsize
        arguments = self.table, written, self.grad_bytes, itemsize, first
        if self.strided is not None:
            arguments = self.strided.arguments(written, first)
        if self._take is None:
            self._take = bind(cpu_calls.take_addresses(), *arguments)
        taken: bool = self._take(*arguments)
        if taken and self.strided is not None:
            self.strided.source = found.addresses[0]
        return taken

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """See :meth:`Table.read`; gradients that are copied are read where they are."""
        if self.strided is None:
            return super().read()
        return self.strided.bounds()

    def _grad_bytes(self) -> NDArray[np.uint64]:
        return self.grad_bytes

    @property
    def stream_handle(self) -> int:  # type: ignore[override]
        """Handle of the stream that the first weight is used on."""
        handle: int = self.leads[0].stream
        return handle

    # Kernel arguments

    def _space(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
        """Return reusable device memory of this shape."""
        memory = self._memory.get((name, shape))
        if memory is None:
            memory = self._memory[name, shape] = self.driver.Memory(shape, dtype)
        return memory

    def _grown(self, name: str, size: int, dtype: Any, *row: int) -> Any:
        """Return reusable device memory of at least `size` rows of this shape."""
        memory = self._memory.get((name, row))
        if memory is None or memory.shape[0] < size:
            if memory is not None:
                self.driver.hold(memory, self.stream_handle)
            memory = self._memory[name, row] = self.driver.Memory((size, *row), dtype)
        return memory

    def _uploaded(self, rows: NDArray[np.int64]) -> int:
        """Upload row indices; return their address."""
        memory = self._grown("indices", max(len(rows), 1), np.int64)
        self.driver.upload(memory, rows, self.stream_handle)
        return int(header(memory.array).ctypes.data)

    def _send(self, name: str, array: Array) -> Any:
        """Upload `array` to reusable device memory."""
        memory = self._space(name, array.shape, array.dtype)
        self.driver.upload(memory, array, self.stream_handle)
        return memory

    def _send_entry(self) -> Any:
        """Return device memory with the table, uploaded if it has changed."""
        memory = self._space("entry", self.table.shape, self.table.dtype)
        content = self.table.tobytes()[DONE_BYTES:]
        if content != self.uploaded:
            self.uploaded, sent = None, self.table.copy()
            sent[:, DONE] = 0  # on the device, whether the step is skipped
            self.driver.upload(memory, sent, self.stream_handle)
            self.uploaded = content
        if self._segments is not None:
            self.driver.copy_word(memory, SEGMENTS, self._segments, 2, self.stream_handle)
        return memory

    def _send_hyper(self) -> Any:
        """Return the hyper-parameters, by value if all tensors share them and none is written."""
        words, by_value = self.words, self._by_value
        if by_value is not None and (len(words) == 1 or (words[1:] == words[0]).all()):
            return by_value(words[0].tolist())
        memory = self._space("hyper", (len(words),), self.layout.record)
        self.driver.upload(memory, self.hyper, self.stream_handle)
        return memory

    def _send_chunks(self, chunks: NDArray[np.int64]) -> Any:
        """Return device memory with chunks, cached by the identity of `chunks`."""
        known = self._chunks.get(id(chunks))
        if known is None:
            if len(self._chunks) > FEW:
                self.driver.hold(dict(self._chunks), self.stream_handle)
                self._chunks.clear()
            memory = self.driver.Memory(chunks.shape, chunks.dtype)
            self.driver.upload(memory, chunks, self.stream_handle)
            known = self._chunks[id(chunks)] = chunks, memory
        return known[1]

    def _fetch(self, memory: Any) -> Array:
        """Download device memory after the earlier launches have finished."""
        copied: Array = self.driver.download(memory, self.stream_handle)
        return copied

    def _launch(self, kernel: Any, chunks: int, threads: Any, *arguments: Any) -> None:
        if chunks:
            self.kernels.launch(kernel, chunks, threads, self.stream_handle, *arguments)

    @cached_property
    def _threads(self) -> tuple[int, int]:
        """Threads of a block: as many in x as a row needs, the rest in y."""
        if not self.layout.lazy:
            return self.kernels.THREADS, 1
        across = min(1 << max(self.width - 1, 1).bit_length(), self.kernels.THREADS)
        return across, self.kernels.THREADS // across

    def list_rows(self, context: str, grad: "RowSparse") -> None:
        """See :meth:`Table.list_rows`; rows are sorted and counted on the device."""
        values, indices = header(grad.values), header(grad.indices)
        height, count = len(self.arrays[0]), len(indices)
        if values.size != count * self.width:
            expected = (count, *grad.shape[1:])
            raise ValueError(f"{context}: values must have shape {expected}, got {values.shape}")
        on_host = not isinstance(indices, Header)
        if not on_host and device_of(indices) != self.device:
            raise ValueError(f"{context}: indices of rows must be on {self.device}, as values are")
        rows, order = _surveyed(context, indices, height) if on_host else (indices, None)
        streams = [values.stream] if on_host else [values.stream, indices.stream]
        self._use(streams, self.stream_handle)
        with self._on_device():
            made = contiguous(values, values.stream)
            if on_host:
                at = self._uploaded(rows)
            else:
                rows = contiguous(indices, indices.stream)
                at = rows.ctypes.data
            self.listed = made, rows, grad.values, grad.indices
            entry = self.table[0]
            places = [at, *self._places(count), made.ctypes.data]
            entry[[ROWS, STARTS, ORDER, -1]] = [*places[1:4], places[-1]]
            entry[SEGMENTS] = count  # if no row is repeated; see _send_entry()
            self._segments = None
            if count:
                self._segments = self._ordered(context, places, rows, height, order)
        self.row_chunks = chunks_of((count, self.width), size=self.rate)
        if self.layout.by_row:
            self.chunks, self.total = self.row_chunks

    def _places(self, count: int) -> list[int]:
        """Return the addresses of the arrays for sorting `count` indexed rows."""
        room = self._grown("rows", self.sorting.ARRAYS * (count + 1), np.int64)
        base, step = header(room.array).ctypes.data, (count + 1) * 8
        return [base + k * step for k in range(self.sorting.ARRAYS)]

    def _ordered(
        self, context: str, places: list[int], rows: Array, height: int, order: int | None
    ) -> Any:
        """Sort row indices on the device; return device memory with the number of unique rows.

        `order` is from :func:`fastopt._kernels.segments.survey`; if it is None, the host waits for
        the device to check the indices.
        """
        size, threads, wide = len(rows), self.sorting.SORTERS, self.layout.wide_grad[0]
        groups = size // FOLD
        folded = self._grown("folded", max(groups * self.width, 1), wide)
        self.table[0, FOLDED] = header(folded.array).ctypes.data
        listed = [*places, int(self.table[0, FOLDED])]
        addresses = self._send("places", np.array([listed], np.uint64))
        answer = self._send("answer", np.zeros(3, np.int64))

        def run(kernel: Any, *arguments: Any) -> None:
            self._launch(kernel, -(-size // threads), threads, addresses, size, *arguments)

        kind = rows.dtype.type
        fetch = self._fetch if order is None else lambda _: (0, order == MIXED, 0)
        ordered = self.sorting.order_rows(run, answer, fetch, kind, size, height)
        if ordered is None:
            raise ValueError(f"{context}: indices must be at least 0 and below {height}")
        keys, bits = ordered
        if keys and groups and self.width:
            across = min(self.width, self.sorting.FOLDERS)
            kernel = self.sorting.fold(self.layout.grad)
            self._launch(kernel, groups, across, addresses, self.width, keys, bits)
        return answer

    def apply_decay(self, applied: Any, before: float, after: float, at_once: bool) -> None:
        """See :meth:`Table.apply_decay`."""
        with self._on_device():
            totals = self._send("decay", np.array([before, after]))
        addresses = [header(array).ctypes.data for array in (applied, totals.array)]
        self.table[0, [APPLIED, DECAY]] = addresses
        self.decay, self.at_once = (applied, totals), at_once

    # Launches

    def _on_device(self) -> Any:
        """Return a context that makes the device current, and its stream wait for gradients'."""
        device, handle = self.device.device_id, self.stream_handle
        if self._streams <= {handle}:
            return self.driver.entered(device)
        return self._after_others(device, handle, self._streams - {handle})

    @contextmanager
    def _after_others(self, device: int, handle: int, others: set[int]) -> Iterator[None]:
        """Make a device current; let the table's stream wait for others, and these for it at last.

        The latter is needed because a released gradient's memory may be reused on its stream.
        """
        with self.driver.entered(device):
            for other in others:
                self.driver.order(other, handle)
            yield
            for other in others:
                self.driver.order(handle, other)

    def squares(self) -> NDArray[np.float64]:
        """See :meth:`Table.squares`; each indexed row is one chunk."""
        with self._on_device():
            total = self._space("total", (len(self.sizes), 1))
            self._add_squares(total)
            return np.asarray(self._fetch(total)[:, 0])

    def add_squares(self, total: Any) -> None:
        """Write the sum of squares of each gradient to device memory, like :meth:`squares`."""
        with self._on_device():
            self._add_squares(total)

    def _copy_grad(self, again: bool) -> None:
        """Copy a gradient whose elements do not lie like the weight's, once in a step."""
        if self.strided is not None:
            self.strided.copy(self.stream_handle, again)

    def _add_squares(self, total: Any) -> None:
        self._copy_grad(again=True)
        layout, column = self.layout, self.table.shape[1] - 1
        kernel = self.kernels.squares(layout.grad, column, layout.sparse)
        chunks = _single(int(self.table[0, SEGMENTS])) if layout.sparse else self._blocks
        self._add(kernel, chunks, total, self._send_entry())

    @cached_property
    def _blocks(self) -> NDArray[np.int64]:
        """Chunks of BLOCK elements."""
        return chunks_of(*[(size, 1) for size in self.sizes], size=BLOCK)[0]

    def _add(
        self,
        kernel: Any,
        chunks: NDArray[np.int64],
        total: Any,
        *arguments: Any,
        largest: bool = False,
    ) -> None:
        """Launch a summing kernel, whose totals for each tensor are written to `total`."""
        tensors, count = total.shape
        partial = self._grown("partial", max(len(chunks), 1), np.float64, count)
        grid, warps = -(-len(chunks) // self.kernels.WARPS), self.kernels.WARPS
        if len(chunks):
            sent = self._send_chunks(chunks)
            self._launch(kernel, grid, (LANES, warps), sent, *arguments, partial)
        firsts = self._firsts(chunks)
        adding = self.kernels.totals(count, largest)
        self._launch(adding, tensors, self.kernels.THREADS, firsts, partial, total)

    def _firsts(self, chunks: NDArray[np.int64]) -> Any:
        """Return device memory with the first chunk of each tensor, then the number of chunks."""
        if chunks is not self._blocks:
            return self._send("firsts", _firsts_of(chunks, len(self.sizes)))
        if ("firsts", None) not in self._memory:
            firsts = _firsts_of(chunks, len(self.sizes))
            memory = self._memory["firsts", None] = self.driver.Memory(firsts.shape, firsts.dtype)
            self.driver.upload(memory, firsts, self.stream_handle)
        return self._memory["firsts", None]

    @cached_property
    def _update_kernel(self) -> Any:
        """Kernel of the update."""
        layout, kernels = self.layout, self.kernels
        if layout.coded:
            return self.coding.blocks(layout)
        if layout.rule.row:
            return kernels.rows(layout)
        return kernels.lazy(layout) if layout.lazy else kernels.dense(layout)

    def run(self, combine: Combine | None = None) -> None:
        """See :meth:`Table.run`; it returns before the device has finished."""
        if combine is not None:
            raise TypeError("slices of tensors are updated in main memory only")
        with self._on_device():
            self._update(self._send_entry(), self._send_hyper())
        self._end()

    def run_counted(self, begin: Any, hyper: Any, arguments: Sequence[Any]) -> None:
        """Like :meth:`run`, with hyper-parameters that a kernel has written to `hyper`.

        The kernel `begin` counts the step; `arguments` are those after the table.
        """
        with self._on_device():
            entry = self._send_entry()
            self._launch(begin, 1, self.kernels.THREADS, entry, *arguments)
            self._update(entry, hyper)
        self._end()

    def renew_entry(self) -> None:
        """Let the next launches have the table in other memory, as a graph keeps the present."""
        self._memory.pop(("entry", self.table.shape), None)
        self.uploaded = None

    @property
    def memory(self) -> Any:
        """All device memory that the last launches use."""
        return dict(self._memory), dict(self._chunks)

    def forget_skip(self) -> None:
        """Let the next update run even if the last one counted on the device was skipped."""
        self.uploaded = None

    def _update(self, entry: Any, hyper: Any) -> None:
        """Launch the kernels of every reduction and of the update."""
        rule, layout, kernels = self.layout.rule, self.layout, self.kernels
        self._copy_grad(again=False)
        for step, count in enumerate(rule.sums):
            total = self._space("total", (len(self.sizes), count))
            kernel, largest = kernels.sums(layout, step), rule.passes[step].largest
            self._add(kernel, self._blocks, total, entry, hyper, largest=largest)
            threads = kernels.THREADS
            grid = -(-len(self.sizes) // threads)
            self._launch(kernels.finish(layout, step), grid, threads, entry, hyper, total)
        if self.total:
            by_warp = rule.row or layout.coded
            threads = (LANES, kernels.WARPS) if by_warp else self._threads
            chunks, kernel = self._send_chunks(self.chunks), self._update_kernel
            self._launch(kernel, len(self.chunks), threads, chunks, entry, hyper)
            if layout.catch_up:
                self._launch(kernels.mark_decay(True), len(self.chunks), threads, chunks, entry)
        self.table[0, DONE] = 1

    def _end(self) -> None:
        """Do what follows the launches of an update."""
        if self.watched:
            mark_written([array() for array in self._tensors])
        if self.at_once:
            self.flush_decay()
        if self.copied or self.listed or self.borrowed:
            self.copy_back()

    def release(self) -> None:
        """See :meth:`Table.release`; copies live until the device has finished with them."""
        copies = (*(pair[1] for pair in self.copied), *(self.borrowed or ())[1:], *self.listed)
        of = [array for array in copies if isinstance(array, Header)]
        if held := [array.kept for array in of if array.kept is not None]:
            with self.driver.entered(self.device.device_id):
                self.driver.hold(held, self.stream_handle)
        super().release()

    def flush_decay(self) -> None:
        """See :meth:`Table.flush_decay`."""
        totals: Any = self.decay[1]
        height = len(self.arrays[0])
        chunks, total = chunks_of((height, self.width), size=self.rate)
        if not total:
            return
        with self._on_device():
            last = self._fetch(totals)[1]
            self.driver.upload(totals, np.full(2, last), self.stream_handle)
            entry = self._send_entry()
            sent = self._send_chunks(chunks)
            threads = self._threads
            self._launch(self.kernels.flush_decay(self.layout), len(chunks), threads, sent, entry)
            self._launch(self.kernels.mark_decay(False), len(chunks), threads, sent, entry)


class _Strided:
    """A dense gradient that is copied in each step, as its elements do not lie like the weight's.

    Parameters
    ----------
    values : Header
        The copy, which kernels read.
    grad : Header
        The gradient.
    """

    def __init__(self, values: Header, grad: Header) -> None:
        self.values, self.source = values, grad.ctypes.data
        first, last = byte_bounds(grad)
        self.before = np.array([self.source - first], np.uint64)
        self.size = np.array([last - first], np.uint64)
        self.table = np.zeros((1, 1), np.uint64)
        self.copies = Copy(values, grad)
        self.fresh = False

    def arguments(self, written: NDArray[np.uint64], first: NDArray[np.uint64]) -> tuple[Any, ...]:
        """Return the arguments with which the address of a gradient is checked."""
        return self.table, written, self.size, self.copies.unit, first - self.before

    def bounds(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the start and end addresses of the gradient."""
        first = np.array([self.source], np.uint64) - self.before
        return first, first + self.size

    def copy(self, stream: int, again: bool) -> None:
        """Copy the gradient unless it is fresh; `again` if more kernels of the step follow."""
        if again or not self.fresh:
            self.copies.run(self.source, stream)
        self.fresh = again


def _surveyed(context: str, indices: Array, height: int) -> tuple[Array, int]:
    """Return a copy of row indices on the host, and their order.

    Raises
    ------
    ValueError
        An index is out of range.
    """
    rows = np.empty(len(indices), np.int64)
    order, wrong = cpu_calls.survey()(np.asarray(indices, np.int64), height, rows)
    if order == OUTSIDE:
        raise ValueError(f"{context}: indices must be at least 0 and below {height}, got {wrong}")
    return rows, order


@lru_cache(maxsize=64)
def _single(count: int) -> NDArray[np.int64]:
    """Return `count` chunks of one indexed row each."""
    return np.stack([np.zeros(count, np.int64), np.arange(count), np.ones(count, np.int64)], axis=1)


def _firsts_of(chunks: NDArray[np.int64], tensors: int) -> NDArray[np.int64]:
    return np.searchsorted(chunks[:, 0], np.arange(tensors + 1)).astype(np.int64)
