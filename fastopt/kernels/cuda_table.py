"""Tables of tensors in the memory of a CUDA device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels.device_memory import contiguous, cuda_target, move, sent, stream_of, wait_for
from fastopt.kernels.devices import Header, device_of, header, moved, stays
from fastopt.kernels.lanes import BLOCK, LANES
from fastopt.kernels.layout import (
    DECAY,
    DONE,
    ORDER,
    PAID,
    ROWS,
    SEGMENTS,
    STARTS,
    Layout,
)
from fastopt.kernels.table import Array, Combine, Table, chunks
from fastopt.sparse import RowSparse

__all__ = ["CudaTable"]

FEW = 8
"""Arrays of pieces of work that are remembered on the device."""

EACH = 16
"""Elements that a thread of a full block updates, one after the other."""


class CudaTable(Table):
    """A table whose arrays are on a CUDA device; its arrays are headers.

    What kernels are told is copied to the device when it has changed: the table seldom, the records
    in every step.
    """

    move = staticmethod(move)

    def __init__(
        self, layout: Layout, weight: tuple[Array, ...], state: tuple[Array, ...], grad: Array
    ) -> None:
        super().__init__(layout, weight, state, grad)
        self.watched: list[Header] = []
        self.leads: list[Any] = []

    def _begin(self) -> None:
        from fastopt.kernels import cuda, cuda_order

        self.rate = EACH * cuda.THREADS
        super()._begin()
        self.kernels, self.sorting = cuda, cuda_order
        self.device: Any = device_of(self.arrays[0])
        self._sent: dict[str, tuple[Any, Any]] = {}
        self._pieces: dict[int, tuple[Array, Any]] = {}
        self._streams: set[int] = set()
        self._room: list[Any] = []

    def watch(self, arrays: Sequence[Header]) -> None:
        """Know the arrays whose owners might move them; numba's stay where they are."""
        self.watched = [array for array in arrays if not stays(array.array())]

    @classmethod
    def joined(cls, tables: Sequence[Any]) -> Any:
        """One table of the tensors of several that have the same layout and device."""
        made = super().joined(tables)
        made.watched = [array for table in tables for array in table.watched]
        made.leads = [lead for table in tables for lead in table.leads]
        return made

    def _cut(self) -> tuple[NDArray[np.int64], int]:
        return chunks(*self.items, size=self.rate)

    def present(self, grads: Sequence[Any]) -> bool:
        """See :meth:`Table.present`."""
        if moved(self.watched) or any(device_of(g) != self.device for g in grads):
            return False
        if any(lead.stream != self.stream_handle for lead in self.leads):
            return False
        self._streams = {grad.stream for grad in grads}
        return True

    @property
    def stream_handle(self) -> int:  # type: ignore[override]
        """Stream that the first weight is used on."""
        handle: int = self.leads[0].stream
        return handle

    # What kernels are told

    def _send(self, name: str, array: Array, changed: bool = False) -> Any:
        """Device array with what is in `array`; copied if that, or the device's, has `changed`."""
        was, made = self._sent.get(name, (None, None))
        if was is None or was.shape != array.shape:
            made = sent(array, self.stream)
        elif changed or was.tobytes() != array.tobytes():
            made.copy_to_device(array, stream=self.stream)
        self._sent[name] = array.copy(), made
        return made

    def _send_pieces(self, pieces: NDArray[np.int64]) -> Any:
        """Device array of pieces of work, which are made once for tensors of some sizes."""
        known = self._pieces.get(id(pieces))
        if known is None:
            if len(self._pieces) > FEW:
                self._pieces.clear()
            known = self._pieces[id(pieces)] = pieces, sent(pieces, self.stream)
        return known[1]

    def _fetch(self, array: Any) -> Array:
        """Copy of a device array in main memory, once what was launched before is done."""
        copied: Array = array.copy_to_host(stream=self.stream)
        if self.stream:
            self.stream.synchronize()
        return copied

    def _launch(self, kernel: Any, pieces: int, threads: Any, *arguments: Any) -> None:
        if pieces:
            self.kernels.launch(kernel, pieces, threads, self.stream_handle, *arguments)

    def _threads(self) -> tuple[int, int]:
        """Threads of a block: in x as many as a row needs, in y as there is room for."""
        if not self.layout.lazy:
            return self.kernels.THREADS, 1
        across = min(1 << max(self.width - 1, 1).bit_length(), self.kernels.THREADS)
        return across, self.kernels.THREADS // across

    def list_rows(self, words: str, grad: RowSparse) -> None:
        """See :meth:`Table.list_rows`; rows are sorted and counted on the device."""
        values, indices = header(grad.values), header(grad.indices)
        height, count = len(self.arrays[0]), len(indices)
        if values.size != count * self.width:
            expected = (count, *grad.shape[1:])
            raise ValueError(f"{words}: values must have shape {expected}, got {values.shape}")
        if device_of(indices) != self.device:
            raise ValueError(f"{words}: indices of rows must be on {self.device}, as values are")
        self._streams = {array.stream for array in (values, indices)}
        with self._on_device():
            made = [contiguous(array, array.stream) for array in (values, indices)]
            self.listed = (*made, grad.values, grad.indices)
            places = self._places(count)
            entry = self.entry[0]
            entry[[ROWS, STARTS, ORDER]] = places[:3]
            entry[-1] = made[0].ctypes.data
            entry[SEGMENTS] = self._ordered(words, made[1], places, height) if count else 0
        self.list_pieces = chunks((count, self.width), size=self.rate)
        if self.layout.by_row:
            self.pieces, self.total = self.list_pieces

    def _places(self, count: int) -> list[int]:
        """Addresses of arrays for what is known of `count` listed rows once they are sorted."""
        if not self._room or self._room[0].shape[1] <= count:
            zeros = np.zeros((self.sorting.ARRAYS, count + 1), np.int64)
            self._room = [sent(zeros, self.stream)]
        base, step = header(self._room[0]).ctypes.data, self._room[0].shape[1] * 8
        return [base + k * step for k in range(self.sorting.ARRAYS)]

    def _ordered(self, words: str, indices: Header, places: list[int], height: int) -> int:
        """Sort listed rows on the device, and return how many different ones there are."""
        size, threads = len(indices), self.sorting.SORTERS
        addresses = self._send("places", np.array([[indices.ctypes.data, *places]], np.uint64))
        answer = self._send("answer", np.zeros(3, np.int64), changed=True)

        def run(kernel: Any, *arguments: Any) -> None:
            self._launch(kernel, -(-size // threads), threads, addresses, size, *arguments)

        kind = indices.dtype.type
        segments = self.sorting.order_rows(run, answer, self._fetch, kind, size, height)
        if segments is None:
            raise ValueError(f"{words}: indices must be at least 0 and below {height}")
        return int(segments)

    def pay(self, paid: Any, before: float, after: float, at_once: bool) -> None:
        """See :meth:`Table.pay`."""
        with self._on_device():
            totals = sent(np.array([before, after]), self.stream)
        self.entry[0, [PAID, DECAY]] = [header(array).ctypes.data for array in (paid, totals)]
        self.decay, self.at_once = (paid, totals), at_once

    # Launches

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the table's device the present one, and wait for gradients of other streams.

        Then wait for the table's stream, too: once a gradient is let go of, its memory may be used
        again on its own stream.
        """
        with cuda_target().gpus[self.device.device_id]:
            self.stream = stream_of(self.stream_handle)
            others = self._streams - {self.stream_handle}
            for other in others:
                wait_for(other)
            yield
            if others:
                wait_for(self.stream_handle)

    def squares(self) -> NDArray[np.float64]:
        """See :meth:`Table.squares`; listed rows are added up row by row."""
        layout, column = self.layout, self.entry.shape[1] - 1
        if layout.sparse:
            count = int(self.entry[0, SEGMENTS])
            pieces = _single(count)
        else:
            pieces = self._blocks()
        with self._on_device():
            entry = self._send("entry", self.entry)
            kernel = self.kernels.squares(layout.grad, column, layout.sparse)
            total = self._added(kernel, 1, pieces, entry)
            return np.asarray(self._fetch(total)[:, 0])

    def _blocks(self) -> NDArray[np.int64]:
        """Pieces of work of BLOCK elements."""
        return chunks(*[(size, 1) for size in self.sizes], size=BLOCK)[0]

    def _added(self, kernel: Any, count: int, pieces: NDArray[np.int64], *arguments: Any) -> Any:
        """Device array of the totals of `count` sums for each tensor."""
        tensors = len(self.sizes)
        firsts = np.searchsorted(pieces[:, 0], np.arange(tensors + 1))
        partial = self._space("partial", (max(len(pieces), 1), count))
        total = self._space("total", (tensors, count))
        grid, warps = -(-len(pieces) // self.kernels.WARPS), self.kernels.WARPS
        told = self._send_pieces(pieces) if len(pieces) else None
        self._launch(kernel, grid, (LANES, warps), told, *arguments, partial)
        adding = self.kernels.totals(count)
        firsts = self._send("firsts", firsts)
        self._launch(adding, tensors, self.kernels.THREADS, firsts, partial, total)
        return total

    def _space(self, name: str, shape: tuple[int, int]) -> Any:
        """Device array for intermediate results, used again if it is of this shape."""
        made = self._sent.get(name)
        if made is None or made[1].shape != shape:
            made = self._sent[name] = np.empty(0), sent(np.zeros(shape), self.stream)
        return made[1]

    def run(self, combine: Combine | None = None) -> None:
        """See :meth:`Table.run`; it returns before the device is done."""
        if combine is not None:
            raise TypeError("slices of tensors are updated in main memory only")
        rule, layout, kernels = self.layout.rule, self.layout, self.kernels
        with self._on_device():
            entry = self._send("entry", self.entry)
            fields = self._send("fields", self.fields, changed=bool(rule.sums))
            records = fields.view(rule.record(layout.real)).reshape(len(self.fields))
            for step, count in enumerate(rule.sums):
                adding = kernels.sums(layout, step)
                total = self._added(adding, count, self._blocks(), entry, records)
                threads = kernels.THREADS
                grid = -(-len(self.sizes) // threads)
                self._launch(kernels.finish(layout, step), grid, threads, entry, records, total)
            if self.total:
                threads = (LANES, kernels.WARPS) if rule.row else self._threads()
                factory = kernels.rows if rule.row else kernels.dense
                pieces = self._send_pieces(self.pieces)
                arguments = pieces, entry, records
                self._launch(factory(layout), len(self.pieces), threads, *arguments)
                if layout.catch_up:
                    self._launch(kernels.paid(True), len(self.pieces), threads, pieces, entry)
            self.entry[0, DONE] = 1
        if self.at_once:
            self.settle()
        if self.copied or self.listed or self.borrowed:
            self.give_back()

    def settle(self) -> None:
        """See :meth:`Table.settle`."""
        totals: Any = self.decay[1]
        height = len(self.arrays[0])
        pieces, total = chunks((height, self.width), size=self.rate)
        if not total:
            return
        with self._on_device():
            host = self._fetch(totals)
            totals.copy_to_device(np.full(2, host[1]), stream=self.stream)
            entry = self._send("entry", self.entry)
            told = self._send_pieces(pieces)
            threads = self._threads()
            self._launch(self.kernels.settle(self.layout), len(pieces), threads, told, entry)
            self._launch(self.kernels.paid(False), len(pieces), threads, told, entry)


@lru_cache(maxsize=64)
def _single(count: int) -> NDArray[np.int64]:
    """Pieces of work of one listed row of the first tensor."""
    return np.stack([np.zeros(count, np.int64), np.arange(count), np.ones(count, np.int64)], axis=1)
