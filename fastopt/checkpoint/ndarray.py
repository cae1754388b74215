"""Arrays in the bytes that MXNet's ``NDArray`` writes."""

import math
import struct

import numpy as np

from fastopt.checkpoint.container import DIMENSION_LIMIT, Array
from fastopt.checkpoint.errors import CheckpointError

__all__ = ["from_bytes"]

MAGIC, NUMPY_MAGIC = 0xF993FAC9, 0xF993FACA
"""First number of an array; the second kind may have no dimensions."""

DENSE, ROW_SPARSE = 0, 1
DTYPES = dict(enumerate(("f4", "f8", "f2", "u1", "i4", "i1", "i8")))


def from_bytes(blob: bytes) -> Array:
    """Return the array that MXNet wrote; a row-sparse one comes dense.

    Nothing is allocated for elements before `blob` is known to hold them.

    Raises
    ------
    CheckpointError
        `blob` is not such an array.
    """
    reader = _Reader(blob)
    magic = reader.number("<I")
    if magic not in (MAGIC, NUMPY_MAGIC):
        raise CheckpointError(f"an array must begin with {MAGIC:#x}, got {magic:#x}")
    storage = reader.number("<i")
    if storage not in (DENSE, ROW_SPARSE):
        raise CheckpointError(f"an array is of unknown storage type {storage}")
    stored = reader.shape() if storage == ROW_SPARSE else ()
    shape = reader.shape()
    if not shape and magic == MAGIC:
        raise CheckpointError("an array has no shape")
    reader.number("<ii")  # the device that it was on
    dtype = reader.dtype()
    if storage == DENSE:
        return reader.end(reader.array(shape, dtype))
    row_dtype, row_shape = reader.dtype(), reader.shape()
    values = reader.array(stored, dtype)
    rows = reader.end(reader.array(row_shape, row_dtype))
    return _dense(shape, values, rows)


def _dense(shape: tuple[int, ...], values: Array, rows: Array) -> Array:
    """Array of zeros but for some rows."""
    if not shape or values.shape != (rows.size, *shape[1:]) or rows.shape != (rows.size,):
        raise CheckpointError(
            f"rows of shape {values.shape} and their numbers of shape {rows.shape} do not belong "
            f"to an array of shape {shape}"
        )
    if rows.dtype.kind not in "iu" or np.unique(rows).size < rows.size:
        raise CheckpointError("row numbers must be distinct integers")
    if rows.size and (rows.min() < 0 or rows.max() >= shape[0]):
        raise CheckpointError(f"row numbers must be from 0 to {shape[0] - 1}")
    try:
        dense = np.zeros(shape, values.dtype)
    except (MemoryError, ValueError):
        raise CheckpointError(f"an array of shape {shape} does not fit into memory") from None
    dense[rows] = values
    return dense


class _Reader:
    """Takes numbers and arrays off the front of bytes."""

    def __init__(self, blob: bytes) -> None:
        self.rest = memoryview(blob)

    def take(self, size: int) -> memoryview:
        if size > len(self.rest):
            raise CheckpointError(f"an array needs {size} bytes where {len(self.rest)} are left")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def number(self, code: str) -> int:
        first: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return first

    def shape(self) -> tuple[int, ...]:
        dimensions = self.number("<i")
        if not 0 <= dimensions <= DIMENSION_LIMIT:
            raise CheckpointError(f"an array cannot have {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}q", self.take(8 * dimensions))
        if any(size < 0 for size in shape):
            raise CheckpointError(f"an array cannot have shape {shape}")
        return shape

    def dtype(self) -> np.dtype[np.generic]:
        code = self.number("<i")
        if code not in DTYPES:
            raise CheckpointError(f"an array has the unknown dtype {code}")
        return np.dtype(f"<{DTYPES[code]}")

    def array(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        data = self.take(math.prod(shape) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def end(self, array: Array) -> Array:
        """Return `array` if nothing is left."""
        if self.rest:
            raise CheckpointError(f"an array has {len(self.rest)} bytes too many")
        return array
