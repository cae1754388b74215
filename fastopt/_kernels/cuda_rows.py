"""Row-sparse gradients of a table on a CUDA device: rows are checked and sorted there.

Tests: ``tests/gpu/test_cuda_rows.py``, ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.cuda_arrays import CallArrays
from fastopt._kernels.cuda_memory import TableMemory
from fastopt._kernels.device_memory import contiguous
from fastopt._kernels.devices import Header, device_of, header
from fastopt._kernels.layout import FOLDED, ORDER, ROWS, SEGMENTS, STARTS, Layout
from fastopt._kernels.segments import FOLD

Array = NDArray[Any]


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


class Target(Protocol):
    """The table of a tensor: where its row-sparse gradient is entered."""

    layout: Layout
    arrays: Sequence[Header]
    width: int
    table: NDArray[np.uint64]
    device: Any
    inputs: CallArrays
    memory: TableMemory

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the device current."""

    def launch(self, kernel: Any, blocks: int, threads: Any, *arguments: Any) -> None:
        """Launch a kernel on the stream of the table."""


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

    def take(self, table: Target, context: str, grad: RowGradient) -> int:
        """Enter a row-sparse gradient into the table of the tensor; return the number of rows.

        Rows are sorted and counted on the device, in the memory of the table.

        Raises
        ------
        ValueError
            An index is out of range, or the values have the wrong shape, as the gradient's arrays
            were changed after its creation.
        """
        memory = table.memory
        values, indices = header(grad.values), header(grad.indices)
        height, count = len(table.arrays[0]), len(indices)
        if values.size != count * table.width:
            expected = (count, *grad.shape[1:])
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
            self.listed = made, rows, grad.values, grad.indices
            entry = table.table[0]
            places = [at, *self._places(memory, count), made.ctypes.data]
            entry[[ROWS, STARTS, ORDER, -1]] = [*places[1:4], places[-1]]
            entry[SEGMENTS] = count  # if no row is repeated; see CudaTable.send_entry()
            self.unique = None
            if count:
                self.unique = self._ordered(table, context, places, rows, height, ascends)
        return count

    def _places(self, memory: TableMemory, count: int) -> list[int]:
        """Return the addresses of the arrays for sorting `count` indexed rows."""
        room = memory.grown("rows", self.sorting.ARRAYS * (count + 1), np.int64)
        base, step = room.address, (count + 1) * 8
        return [base + k * step for k in range(self.sorting.ARRAYS)]

    def _ordered(
        self,
        table: Target,
        context: str,
        places: list[int],
        rows: Array,
        height: int,
        ascends: bool | None,
    ) -> Any:
        """Sort row indices on the device; return device memory with the number of unique rows.

        `ascends` is from :func:`surveyed`; if it is None, the host waits for the device to check
        the indices.
        """
        memory, sorting = table.memory, self.sorting
        width, layout = table.width, table.layout
        size, threads, wide = len(rows), sorting.SORTERS, layout.wide_grad[0]
        groups = size // FOLD
        folded = memory.grown("folded", max(groups * width, 1), wide)
        table.table[0, FOLDED] = folded.address
        listed = [*places, folded.address]
        addresses = memory.send("places", np.array([listed, [0] * len(listed)], np.uint64))

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
        of = [array for array in self.listed if isinstance(array, Header)]
        self.listed = ()
        return [array.kept for array in of if array.kept is not None]


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
