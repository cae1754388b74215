"""Tables of tensors on a CUDA device: the kernel arguments that describe the arrays of a launch.

:mod:`~fastopt._kernels.cuda_arrays` verifies the arrays of a call, and
:mod:`~fastopt._kernels.cuda_rows` sorts the rows of row-sparse gradients.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels.chunks import chunks_of, single_rows
from fastopt._kernels.cuda_arrays import CallArrays, TensorArrays
from fastopt._kernels.cuda_memory import TableMemory
from fastopt._kernels.cuda_packs import square_pack, sum_pack
from fastopt._kernels.cuda_rows import IndexedRows, RowGradient
from fastopt._kernels.device_memory import move
from fastopt._kernels.devices import Header, device_of, header, mark_written
from fastopt._kernels.lanes import BLOCK, LANES
from fastopt._kernels.layout import ADDRESS, APPLIED, DECAY, SEGMENTS, kind_of

Array = np.ndarray[Any, Any]

EACH = 16
"""Elements that each thread of a full block updates."""

MOST = 64
"""Maximum number of hyper-parameters that are passed by value."""

Addresses = NDArray[np.uint64]


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
    after : CudaTable or None
        What is launched next: it averages all rows, after the update of some.
    average_rate : callable
        Returns the rate of that average for a number of updates.
    """

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
        self.uploaded: bytes | None = None
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

    @classmethod
    def joined(cls, tables: Sequence["CudaTable"]) -> Self:
        """Merge tables with the same layout, device and stream into one."""
        made, parts = cls([table.parts[0] for table in tables]), [table.inputs for table in tables]
        made.inputs.stream = parts[0].stream
        made.inputs.streams = {stream for part in parts for stream in part.streams}
        made.inputs.tensors = [tensor for part in parts for tensor in part.tensors]
        made.inputs.refuse_capture()
        return made

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

    def serves(self, grad: RowGradient) -> bool:
        """Whether the kernels are compiled for this kind of row-sparse gradient."""
        layout = self.layout
        return layout.sparse and layout.grad == kind_of(header(grad.values).dtype)

    def list_rows(self, context: str, grad: RowGradient) -> None:
        """Set a row-sparse gradient; see :meth:`IndexedRows.take`."""
        assert self.rows is not None
        count = self.rows.take(self, context, grad)
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

    def _send_entry(self) -> Any:
        """Return device memory with the table, uploaded if it has changed."""
        content = self.table.tobytes()
        memory = self.entry
        if content != self.uploaded:
            self.uploaded = None
            self.driver.upload(memory, self.table, self.stream)
            self.uploaded = content
        if self.rows is not None and self.rows.unique is not None:
            found = self.rows.sorting.FOUND
            self.driver.copy_word(memory, SEGMENTS, self.rows.unique, found, self.stream)
        return memory

    def _send_hyper(self) -> Any:
        """Return the hyper-parameters, by value if all tensors share them and none is written."""
        words, by_value = self.words, self._by_value
        if by_value is not None and (len(words) == 1 or (words[1:] == words[0]).all()):
            return by_value(words[0].tolist())
        self.driver.upload(self.hyper_memory, self.hyper, self.stream)
        return self.hyper_memory

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
            self._add_squares(total)
            return self.driver.download(total, self.stream)[:, 0]

    def add_squares(self, total: Any) -> None:
        """Write the sum of squares of each gradient to device memory, like :meth:`squares`."""
        with self.on_device():
            self._add_squares(total)

    def _copy_grad(self, again: bool) -> None:
        """Copy a gradient whose elements do not lie like the weight's, once in a step."""
        if self.inputs.strided is not None:
            self.inputs.strided.copy(self.stream, again)

    def _add_squares(self, total: Any) -> None:
        self._copy_grad(again=True)
        sparse = self.layout.sparse
        chunks = single_rows(int(self.table[0, SEGMENTS])) if sparse else self._blocks
        self._add(*self._square_kernel, chunks, total, self._send_entry())

    @cached_property
    def _square_kernel(self) -> tuple[Any, int]:
        layout, column = self.layout, self.table.shape[1] - 1
        each = square_pack(layout.grad, layout.sparse)
        return self.kernels.squares(layout.grad, column, layout.sparse), each

    @cached_property
    def _blocks(self) -> NDArray[np.int64]:
        """Chunks of BLOCK elements."""
        return _chunks([(size, 1) for size in self.sizes], BLOCK)[0]

    def _add(
        self,
        kernel: Any,
        each: int,
        chunks: NDArray[np.int64],
        total: Any,
        *arguments: Any,
        largest: bool = False,
    ) -> None:
        """Launch a summing kernel, whose totals for each tensor are written to `total`.

        A warp takes `each` chunks.
        """
        tensors, count = total.shape
        partial = self.memory.grown("partial", max(len(chunks), 1), np.float64, count)
        warps = self.kernels.WARPS
        grid = -(-len(chunks) // (warps * each))
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

    def run(self) -> None:
        """Launch the kernels of every reduction and of the update.

        It returns before the device has finished.
        """
        if self.counted:  # on the device, the step may have been marked as skipped
            self.uploaded, self.counted = None, False
        with self.on_device():
            self._update(self._send_entry(), self._send_hyper())
        self._end()

    def run_counted(self, begin: Any, hyper: Any, arguments: Sequence[Any]) -> None:
        """Like :meth:`run`, with hyper-parameters that a kernel has written to `hyper`.

        The kernel `begin` counts the step; `arguments` are those after the table.
        """
        self.counted = True
        with self.on_device():
            entry = self._send_entry()
            self.launch(begin, 1, self.kernels.THREADS, entry, *arguments)
            self._update(entry, hyper)
        self._end()

    def renew_entry(self) -> None:
        """Let the next launches have the table in other memory, as others keep the present."""
        self.memory.forget("entry", self.table.shape)
        self.uploaded = None

    def _update(self, entry: Any, hyper: Any) -> None:
        """Launch the kernels of every reduction and of the update."""
        rule, layout, kernels = self.layout.rule, self.layout, self.kernels
        self._copy_grad(again=False)
        for step, count in enumerate(rule.sums):
            total = self.memory.space("total", (len(self.sizes), count))
            kernel, largest = kernels.sums(layout, step), rule.passes[step].largest
            each = sum_pack(layout)
            self._add(kernel, each, self._blocks, total, entry, hyper, largest=largest)
            threads = kernels.THREADS
            grid = -(-len(self.sizes) // threads)
            self.launch(kernels.finish(layout, step), grid, threads, entry, hyper, total)
        if self.total:
            threads = self._threads
            chunks, kernel = self.memory.send_chunks(self.chunks), self._update_kernel
            self.launch(kernel, len(self.chunks), threads, chunks, entry, hyper)
            if layout.catch_up:
                self.launch(kernels.mark_decay(True), len(self.chunks), threads, chunks, entry)

    def _end(self) -> None:
        """Do what follows the launches of an update."""
        if self.inputs.tensors:
            mark_written(self.inputs.tensors)
        if self.at_once:
            self.flush_decay()
        self.copy_back()

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
            self.driver.upload(totals, np.full(2, last), self.stream)
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
