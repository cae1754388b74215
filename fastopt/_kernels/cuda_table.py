"""Tables of tensors on a CUDA device: the kernel arguments that describe the arrays of a launch.

:mod:`~fastopt._kernels.cuda_arrays` verifies the arrays of a call. The rows of row-sparse gradients
are checked and sorted on the device (:mod:`~fastopt._kernels.cuda_order`).

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_rows.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels.chunks import chunks_of, single_rows
from fastopt._kernels.cuda_arrays import CallArrays, TensorArrays
from fastopt._kernels.cuda_memory import TableMemory
from fastopt._kernels.cuda_packs import square_pack, sum_pack
from fastopt._kernels.device_memory import contiguous, move
from fastopt._kernels.devices import Header, device_of, header, mark_written
from fastopt._kernels.lanes import BLOCK, LANES
from fastopt._kernels.layout import ADDRESS, APPLIED, DECAY, FOLDED, ORDER, ROWS, SEGMENTS, STARTS
from fastopt._kernels.segments import FOLD

Array = np.ndarray[Any, Any]

EACH = 16
"""Elements that each thread of a full block updates."""

MOST = 64
"""Maximum number of hyper-parameters that are passed by value."""

Addresses = NDArray[np.uint64]


class IndexedRows:
    """The indexed rows of one tensor.

    Attributes
    ----------
    listed : tuple
        The arrays of the gradient, kept alive until :meth:`release`.
    unique : device array or None
        Device memory whose word 2 is the number of unique rows; None without rows.
    """

    def __init__(self) -> None:
        from fastopt._kernels import cuda_order

        self.sorting = cuda_order
        self.listed: tuple[Any, ...] = ()
        self.unique: Any = None

    def take(self, table: "CudaTable", context: str, values: Any, indices: Any) -> int:
        """Enter a row-sparse gradient into the table of the tensor; return the number of rows.

        They are sorted and counted on the device, in the memory of the table.

        Raises
        ------
        ValueError
            An index is out of range, or the values have the wrong shape, as the gradient's arrays
            were changed after its creation.
        """
        memory, owners = table.memory, (values, indices)
        values, indices = header(values), header(indices)
        height, count = len(table.arrays[0]), len(indices)
        if values.size != count * table.width:
            expected = (count, *table.arrays[0].shape[1:])
            raise ValueError(f"{context}: values must have shape {expected}, got {values.shape}")
        on_host = not isinstance(indices, Header)
        if not on_host and device_of(indices) != table.device:
            raise ValueError(f"{context}: indices of rows must be on {table.device}, as values are")
        rows, ascends = surveyed(context, indices, height) if on_host else (indices, None)
        streams = [values.stream] if on_host else [values.stream, indices.stream]
        table.inputs.use(streams)
        with table.on_device():
            made = contiguous(values, values.stream)
            if on_host:
                sent = memory.grown("indices", max(count, 1), np.int64)
                memory.driver.upload(sent, rows, memory.stream)
                at = sent.address
            else:
                rows = contiguous(indices, indices.stream)
                at = int(rows.ctypes.data)
            self.listed = made, rows, *owners
            entry = table.table[0]
            room = memory.grown("rows", self.sorting.ARRAYS * (count + 1), np.int64).address
            arrays = [room + k * 8 * (count + 1) for k in range(self.sorting.ARRAYS)]
            places = [at, *arrays, made.ctypes.data]
            entry[[ROWS, STARTS, ORDER, -1]] = [*places[1:4], places[-1]]
            entry[SEGMENTS] = count  # if no row is repeated; see CudaTable.send_entry()
            self.unique = None
            if count:
                self.unique = self._ordered(table, context, places, rows, ascends)
        return count

    def _ordered(
        self,
        table: "CudaTable",
        context: str,
        places: list[int],
        rows: Array,
        ascends: bool | None,
    ) -> Any:
        """Sort row indices on the device; return device memory with the number of unique rows.

        `ascends` is from :func:`surveyed`; if it is None, the host waits for the device to check
        the indices.
        """
        memory, sorting = table.memory, self.sorting
        width, height, layout = table.width, len(table.arrays[0]), table.layout
        size, threads, wide = len(rows), sorting.SORTERS, layout.wide_grad[0]
        groups = size // FOLD
        folded = memory.grown("folded", max(groups * width, 1), wide)
        table.table[0, FOLDED] = folded.address
        listed = [*places, folded.address]
        answered = np.array([listed, [0] * len(listed)], np.uint64)  # the device writes to it
        addresses = memory.send("places", answered, again=True)

        def run(kernel: Any, *arguments: Any) -> None:
            table.launch(kernel, -(-size // threads), threads, addresses, size, *arguments)

        keys, bits = sorting.order_rows(run, rows.dtype.type, size, height, bool(ascends))
        if groups and width and not ascends:
            across = min(width, sorting.FOLDERS)
            kernel = sorting.fold(layout.grad)
            table.launch(kernel, groups, across, addresses, width, keys, bits)
        if ascends is None and memory.driver.download(addresses, memory.stream)[1, sorting.OUTSIDE]:
            raise ValueError(f"{context}: indices must be at least 0 and below {height}")
        return addresses.part((1, len(listed)), first=1)

    def release(self) -> list[Any]:
        """Release the gradient; return the copies that the device still reads."""
        listed, self.listed = self.listed, ()
        return [of.kept for of in listed if isinstance(of, Header) and of.kept is not None]


@final
class CudaTable:
    """Kernel arguments for the arrays of one tensor, or of several with one layout and stream.

    Arrays are described by headers. Hyper-parameters that are equal for all tensors are passed to
    kernels by value. Everything else is uploaded when it has changed, which is rare for the
    addresses.

    Parameters
    ----------
    parts : sequence of TensorArrays
        The tensors, with one layout, device and stream.

    Attributes
    ----------
    table : numpy.ndarray
        The rows of the table; see :mod:`fastopt._kernels.layout`.
    inputs : CallArrays
        The weights and gradients of a call.
    rows : IndexedRows or None
        The rows of a row-sparse gradient.
    counted : bool
        Whether the last step was counted on the device.
    kept : bool
        Whether the table serves later calls.
    after : CudaTable or None
        What is launched next: it averages all rows, after the update of some.
    average_rate : callable
        Returns the rate of that average for a number of updates.
    """

    kept = True
    after: "CudaTable | None" = None
    average_rate: Callable[[int], float]

    def __init__(self, parts: Sequence[TensorArrays]) -> None:
        from fastopt._kernels import cuda, cuda_blocks, cuda_driver

        self.kernels, self.coding, self.driver = cuda, cuda_blocks, cuda_driver
        lead, self.parts = parts[0], parts
        layout = self.layout = lead.layout
        self.width = lead.width
        self.arrays: Sequence[Header] = [array for part in parts for array in part.arrays]
        self.sizes = tuple([part.arrays[0].size for part in parts])
        self.device: Any = device_of(lead.arrays[0])
        self.table = lead.row if len(parts) == 1 else np.concatenate([part.row for part in parts])
        nbytes = [[array.nbytes for array in part.arrays] for part in parts]
        self.nbytes = np.array(nbytes, np.uint64)
        self.fields = np.zeros((len(parts), len(layout.rule.hyper)), layout.real)
        self.hyper = self.fields.view(layout.record).reshape(-1)
        self.words = self.fields.view(f"u{self.fields.itemsize}")
        self.rate = EACH * cuda.THREADS
        self.chunks, self.total = _chunks([part.item for part in parts], self.rate)
        self.copied, self.direct = lead.copied, not lead.copied
        count = self.words.shape[1]
        self._by_value: Any = None
        if not layout.rule.passes and 0 < count <= MOST:
            self._by_value = cuda_driver.values(self.fields.dtype, count)
        self.decay: tuple[Any, ...] = ()
        self.at_once = self.counted = False
        self.inputs = CallArrays(parts)
        self.memory = TableMemory(self.inputs)
        self.rows = IndexedRows() if layout.sparse else None
        self.inputs.refuse_capture()

    # The arrays of a call

    @property
    def stream(self) -> int:
        """Handle of the stream that the weights are used on."""
        return self.inputs.stream

    @property
    def alone(self) -> bool:
        """Whether the table must not be joined with others."""
        return bool(self.layout.sparse or self.copied or self.inputs.strided)

    def renew(self) -> None:
        """Refresh the copies, after other tensors have been updated."""
        for original, copy in self.copied:
            move(copy, original)

    def list_rows(self, context: str, values: Any, indices: Any) -> None:
        """Set a row-sparse gradient; see :meth:`IndexedRows.take`."""
        assert self.rows is not None
        count = self.rows.take(self, context, values, indices)
        if self.layout.by_row:
            self.chunks, self.total = chunks_of((count, self.width), size=self.rate)

    def written(self) -> tuple[Addresses, Addresses]:
        """Return the start and end addresses of the written arrays."""
        begin = self.table[:, ADDRESS:-1]
        bounds = [byte_bounds(array) for array, _ in self.copied]
        first, last = np.array(bounds, np.uint64).reshape(-1, 2).T
        return np.append(begin, first), np.append(begin + self.nbytes, last)

    def read(self) -> tuple[Addresses, Addresses]:
        """Return the start and end addresses of the gradients, where the caller has them."""
        if self.inputs.strided is not None:
            return self.inputs.strided.bounds()
        begin, sizes = self.table[:, -1], self.inputs.grad_bytes
        if self.rows is not None:
            sizes = np.array([self.rows.listed[0].nbytes if self.rows.listed else 0], np.uint64)
        return begin, begin + sizes

    def on_device(self) -> Any:
        """Return a context that makes the device current, and its stream wait for gradients'."""
        device = self.driver.entered(self.device.device_id)
        others = self.inputs.streams - {self.stream}
        return self._after_others(device, others) if others else device

    @contextmanager
    def _after_others(self, device: Any, others: set[int]) -> Iterator[None]:
        """Let the table's stream wait for others, and these for it at last.

        The latter is needed because a released gradient's memory may be reused on its stream.
        """
        with device:
            for other in others:
                self.driver.order(other, self.stream)
            yield
            for other in others:
                self.driver.order(self.stream, other)

    # Kernel arguments

    @property
    def entry(self) -> Any:
        """Device memory of the table."""
        return self.memory.space("entry", self.table.shape, self.table.dtype)

    def _send_entry(self, again: bool = False) -> Any:
        """Return device memory with the table, uploaded if it has changed, or `again`."""
        memory = self.memory.send("entry", self.table, again)
        if self.rows is not None and self.rows.unique is not None:
            position = self.rows.sorting.FOUND
            self.driver.copy_word(memory, SEGMENTS, self.rows.unique, position, self.stream)
        return memory

    def _send_hyper(self) -> Any:
        """Return the hyper-parameters, by value if all tensors share them and none is written."""
        words, by_value = self.words, self._by_value
        if by_value is not None and (len(words) == 1 or (words[1:] == words[0]).all()):
            return by_value(words[0].tolist())
        return self.memory.send("hyper", self.hyper, again=True)

    @property
    def hyper_memory(self) -> Any:
        """Device memory of the hyper-parameters of each tensor."""
        return self.memory.space("hyper", (len(self.words),), self.layout.record)

    @cached_property
    def hyper_ring(self) -> Any:
        """Uploads of these by compiled code."""
        return self.driver.Ring(self.hyper_memory, self.hyper)

    def launch(self, kernel: Any, blocks: int, threads: Any, *arguments: Any) -> None:
        """Launch a kernel on the table's stream, if it has blocks."""
        if blocks:
            self.driver.launch(kernel, blocks, threads, self.stream, *arguments)

    @cached_property
    def _threads(self) -> tuple[int, int]:
        """Threads of a block of the update, in x and y."""
        if self.layout.rule.row or self.layout.coded:
            return LANES, self.kernels.WARPS
        return self._row_threads

    @cached_property
    def _row_threads(self) -> tuple[int, int]:
        """Threads of a block: as many in x as an indexed row needs, the rest in y."""
        if not self.layout.lazy:
            return self.kernels.THREADS, 1
        across = min(1 << max(self.width - 1, 1).bit_length(), self.kernels.THREADS)
        return across, self.kernels.THREADS // across

    def apply_decay(self, applied: Any, before: float, after: float, at_once: bool) -> None:
        """Apply deferred weight decay to the indexed rows (`at_once`: to all) in the next update.

        Parameters
        ----------
        applied : device array
            Decay applied to each row so far, as a sum of logarithms.
        before, after : float
            Accumulated decay before and after the step, as sums of logarithms.
        at_once : bool
            Whether to apply the decay of all rows in each step.
        """
        with self.on_device():
            totals = self.memory.send("decay", np.array([before, after]))
        self.table[0, [APPLIED, DECAY]] = header(applied).ctypes.data, totals.address
        self.decay, self.at_once = (applied, totals), at_once

    # Sums

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; the order depends only on its shape."""
        with self.on_device():
            total = self.memory.space("total", (len(self.sizes), 1))
            self.add_squares(total)
            return self.driver.download(total, self.stream)[:, 0]

    def add_squares(self, total: Any) -> None:
        """Write the sum of squares of each gradient to device memory, like :meth:`squares`."""
        kind, sparse = self.layout.grad, self.layout.sparse
        chunks = single_rows(int(self.table[0, SEGMENTS])) if sparse else self._blocks
        kernel = self.kernels.squares(kind, self.table.shape[1] - 1, sparse)
        with self.on_device():
            self._copy_grad(again=True)
            self._add(kernel, square_pack(kind, sparse), chunks, total, self._send_entry())

    def _copy_grad(self, again: bool) -> None:
        """Copy a gradient whose elements do not lie like the weight's, once in a step."""
        if self.inputs.strided is not None:
            self.inputs.strided.copy(self.stream, again)

    @cached_property
    def _blocks(self) -> NDArray[np.int64]:
        """Chunks of BLOCK elements."""
        return _chunks([(size, 1) for size in self.sizes], BLOCK)[0]

    def _add(
        self,
        kernel: Any,
        per_warp: int,
        chunks: NDArray[np.int64],
        total: Any,
        *arguments: Any,
        largest: bool = False,
    ) -> None:
        """Launch a summing kernel, whose totals for each tensor are written to `total`.

        A warp takes `per_warp` chunks.
        """
        tensors, count = total.shape
        partial = self.memory.grown("partial", max(len(chunks), 1), np.float64, count)
        warps = self.kernels.WARPS
        grid = -(-len(chunks) // (warps * per_warp))
        if len(chunks):
            sent = self.memory.send_chunks(chunks)
            self.launch(kernel, grid, (LANES, warps), sent, *arguments, partial)
        adding = self.kernels.totals(count, largest)
        self.launch(adding, tensors, self.kernels.THREADS, self._firsts(chunks), partial, total)

    def _firsts(self, chunks: NDArray[np.int64]) -> Any:
        """Return device memory with the first chunk of each tensor, then the number of chunks."""
        if chunks is self._blocks:
            return self.memory.send_chunks(self._first_blocks)
        return self.memory.send("firsts", _firsts_of(chunks, len(self.sizes)))

    @cached_property
    def _first_blocks(self) -> NDArray[np.int64]:
        return _firsts_of(self._blocks, len(self.sizes))

    # Launches

    @cached_property
    def _update_kernel(self) -> Any:
        """Kernel of the update."""
        layout, kernels = self.layout, self.kernels
        if layout.coded:
            return self.coding.blocks(layout)
        if layout.rule.row:
            return kernels.rows(layout)
        return kernels.lazy(layout) if layout.lazy else kernels.dense(layout)

    def compile(self) -> None:
        """Compile the kernels of the next :meth:`run`, so that it does not fail for that reason."""
        with self.on_device(), self.driver.compiling():
            self._update(self._send_entry(), self._send_hyper())

    def run(self, begin: Any = None, hyper: Any = None, arguments: Sequence[Any] = ()) -> None:
        """Launch the kernels of every reduction and of the update.

        It returns before the device has finished. With a kernel `begin`, that counts the step and
        writes the hyper-parameters to `hyper`; `arguments` are its arguments after the table.
        """
        # In a step that was counted on the device, tensors may have been marked as skipped there.
        again, self.counted = begin is None and self.counted, begin is not None
        with self.on_device():
            entry = self._send_entry(again)
            if begin is not None:
                self.launch(begin, 1, self.kernels.THREADS, entry, *arguments)
            self._update(entry, self._send_hyper() if begin is None else hyper)
        if self.inputs.tensors:
            mark_written(self.inputs.tensors)
        if self.at_once:
            self.flush_decay()
        self.copy_back()

    def renew_entry(self) -> None:
        """Let the next launches have the table in other memory, as others keep the present."""
        self.memory.forget("entry", self.table.shape)

    def _update(self, entry: Any, hyper: Any) -> None:
        """Launch the kernels of every reduction and of the update."""
        rule, layout, kernels = self.layout.rule, self.layout, self.kernels
        self._copy_grad(again=False)
        for step, count in enumerate(rule.sums):
            total = self.memory.space("total", (len(self.sizes), count))
            kernel, largest = kernels.sums(layout, step), rule.passes[step].largest
            pack = sum_pack(layout)
            self._add(kernel, pack, self._blocks, total, entry, hyper, largest=largest)
            threads = kernels.THREADS
            grid = -(-len(self.sizes) // threads)
            self.launch(kernels.finish(layout, step), grid, threads, entry, hyper, total)
        if self.total:
            threads = self._threads
            chunks, kernel = self.memory.send_chunks(self.chunks), self._update_kernel
            self.launch(kernel, len(self.chunks), threads, chunks, entry, hyper)
            if layout.catch_up:
                self.launch(kernels.mark_decay(True), len(self.chunks), threads, chunks, entry)

    def copy_back(self) -> None:
        """Copy weight and state back if kernels worked on copies, then :meth:`release`."""
        for original, copy in self.copied:
            move(original, copy)
        self.release()

    def release(self) -> None:
        """Release the gradients and copies, which live until the device has finished with them."""
        self.inputs.tensors = ()
        held = [copy.kept for _, copy in self.copied if copy.kept is not None]
        if self.rows is not None:
            held += self.rows.release()
        if held:
            with self.driver.entered(self.device.device_id):
                self.driver.hold(held, self.stream)
        self.copied = []

    def flush_decay(self) -> None:
        """Apply the deferred weight decay of all rows, including the last step's."""
        totals: Any = self.decay[1]
        height = len(self.arrays[0])
        chunks, total = chunks_of((height, self.width), size=self.rate)
        if not total:
            return
        with self.on_device():
            last = self.driver.download(totals, self.stream)[1]
            self.memory.send("decay", np.full(2, last))
            entry, sent = self._send_entry(), self.memory.send_chunks(chunks)
            threads = self._row_threads
            self.launch(self.kernels.flush_decay(self.layout), len(chunks), threads, sent, entry)
            self.launch(self.kernels.mark_decay(False), len(chunks), threads, sent, entry)


def _chunks(items: Sequence[tuple[int, int]], size: int) -> tuple[NDArray[np.int64], int]:
    """Return the chunks of several tensors, like :func:`chunks_of`, which keeps those of each."""
    parts = [chunks_of(item, size=size) for item in items]
    if len(parts) == 1:
        return parts[0]
    chunks = np.concatenate([part for part, _ in parts])
    chunks[:, 0] = np.repeat(np.arange(len(parts)), [len(part) for part, _ in parts])
    return chunks, sum([total for _, total in parts])


def _firsts_of(chunks: NDArray[np.int64], tensors: int) -> NDArray[np.int64]:
    return np.searchsorted(chunks[:, 0], np.arange(tensors + 1)).astype(np.int64)


def surveyed(context: str, indices: Array, height: int) -> tuple[Array, bool]:
    """Return a copy of row indices on the host, and whether they strictly ascend.

    The copy is checked, as another thread may change the indices.

    Raises
    ------
    ValueError
        An index is out of range.
    """
    rows = np.array(indices, np.int64)
    outside = rows[(rows < 0) | (rows >= height)]
    if outside.size:
        expected = f"indices must be at least 0 and below {height}"
        raise ValueError(f"{context}: {expected}, got {outside[0]}")
    return rows, bool((rows[1:] > rows[:-1]).all())
