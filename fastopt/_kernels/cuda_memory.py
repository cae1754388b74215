"""Device memory of a table of tensors, which its launches use again.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.cuda_arrays import CallArrays

Array = np.ndarray[Any, Any]

FEW = 8
"""Number of arrays that are cached on the device by their identity."""


class TableMemory:
    """Device memory by purpose and shape.

    Parameters
    ----------
    arrays : CallArrays
        The arrays of the table, whose stream is used.
    """

    def __init__(self, arrays: CallArrays) -> None:
        from fastopt._kernels import cuda_driver

        self.driver, self.arrays = cuda_driver, arrays
        self.spaces: dict[Any, Any] = {}
        self.sent: dict[Any, bytes] = {}
        self.chunks: dict[int, tuple[Array, Any]] = {}

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return self.arrays.stream

    @property
    def content(self) -> Any:
        """All memory that the last launches use, for a graph to keep."""
        return dict(self.spaces), dict(self.chunks)

    def space(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
        """Return reusable device memory of this shape."""
        memory = self.spaces.get((name, shape))
        if memory is None:
            memory = self.spaces[name, shape] = self.driver.Memory(shape, dtype)
        return memory

    def grown(self, name: str, size: int, dtype: Any, *row: int) -> Any:
        """Return reusable device memory of at least `size` rows of this shape."""
        memory = self.spaces.get((name, row))
        if memory is None or memory.shape[0] < size:
            if memory is not None:
                self.driver.hold(memory, self.stream)
            memory = self.spaces[name, row] = self.driver.Memory((size, *row), dtype)
        return memory

    def forget(self, name: str, shape: tuple[int, ...]) -> None:
        """Let the next launches have other memory."""
        self.spaces.pop((name, shape), None)
        self.sent.pop((name, shape), None)

    def send(self, name: str, array: Array, again: bool = False) -> Any:
        """Return reusable device memory with an array, uploaded if that has changed, or `again`."""
        memory, content = self.space(name, array.shape, array.dtype), array.tobytes()
        if again or self.sent.get((name, array.shape)) != content:
            self.sent.pop((name, array.shape), None)
            self.driver.upload(memory, array, self.stream)
            self.sent[name, array.shape] = content
        return memory

    def send_chunks(self, chunks: NDArray[np.int64]) -> Any:
        """Return device memory with an array that does not change, cached by its identity."""
        known = self.chunks.get(id(chunks))
        if known is None:
            if len(self.chunks) > FEW:
                self.driver.hold(dict(self.chunks), self.stream)
                self.chunks.clear()
            memory = self.driver.Memory(chunks.shape, chunks.dtype)
            self.driver.upload(memory, chunks, self.stream)
            known = self.chunks[id(chunks)] = chunks, memory
        return known[1]
