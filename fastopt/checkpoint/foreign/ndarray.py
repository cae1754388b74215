"""Parser of MXNet's binary format of ``NDArray``, for single arrays and lists with names."""

import math
import struct
from dataclasses import dataclass

import numpy as np

from fastopt.checkpoint.format.container import DIMENSION_LIMIT, Array
from fastopt.checkpoint.format.errors import CheckpointError

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
"""Magic number of an array. V1 has no storage type; V3 allows arrays without dimensions. The format
before V1 starts with the number of dimensions instead, and stores 32-bit lengths."""

LIST_HEAD = struct.pack("<QQ", 0x112, 0)
"""First bytes of a list of arrays: a magic number and a reserved one."""

DENSE, ROW_SPARSE = 0, 1
DTYPES = dict(enumerate(("f4", "f8", "f2", "u1", "i4", "i1", "i8")))


@dataclass
class Allowance:
    """Remaining bytes that dense copies of row-sparse arrays may take."""

    left: int

    @classmethod
    def of(cls, size: int, max_bytes: int | None = None) -> "Allowance":
        """Allowance for a file of `size` bytes: `max_bytes`, or 64 MiB + 100 * `size`."""
        return cls(2**26 + 100 * size if max_bytes is None else max_bytes)

    def take(self, shape: tuple[int, ...], itemsize: int) -> None:
        """Subtract the bytes of an array, or raise CheckpointError if too few are left."""
        needed = math.prod(shape) * itemsize
        if needed > self.left:
            raise CheckpointError(
                f"a row-sparse array of shape {shape} would take {needed} bytes as a dense one, "
                f"the limit leaves {self.left}; max_bytes sets another limit"
            )
        self.left -= needed


def from_bytes(blob: bytes, allowance: Allowance) -> Array:
    """Parse one array; a row-sparse array is converted to a dense one.

    No memory is allocated for elements that `blob` does not hold, except for the dense copies of
    row-sparse arrays, which `allowance` limits.

    Raises
    ------
    CheckpointError
        `blob` is not such an array.
    """
    reader = _Reader(blob)
    array = _array(reader, allowance)
    reader.end()
    return array if array.flags.writeable else array.copy()


def list_from_bytes(data: bytes) -> dict[str, Array]:
    """Parse a file of MXNet's ``nd.save`` with names; dense arrays are views of `data`.

    Dense copies of row-sparse arrays may take what is allowed for a file of this size.

    Raises
    ------
    CheckpointError
        `data` is not such a file, or its arrays have no names.
    """
    reader, allowance = _Reader(data), Allowance.of(len(data))
    if reader.take(16) != LIST_HEAD:
        raise CheckpointError("it does not start with the header of MXNet's NDArray lists")
    arrays = []
    for position in range(reader.number("<Q")):
        try:
            arrays.append(_array(reader, allowance))
        except CheckpointError as error:
            raise CheckpointError(f"array {position} of the list: {error}") from error
    count = reader.number("<Q")
    if count != len(arrays):
        raise CheckpointError(f"a list of {len(arrays)} arrays has {count} names")
    try:
        names = [bytes(reader.take(reader.number("<Q"))).decode() for _ in arrays]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"a name is not UTF-8: {error}") from error
    reader.end()
    named = dict(zip(names, arrays, strict=True))
    if len(named) < len(names):
        raise CheckpointError("the list has a name twice")
    return named


def _array(reader: "_Reader", allowance: Allowance) -> Array:
    """Parse the next array; a dense array is a view."""
    magic = reader.number("<I")
    storage = reader.number("<i") if magic in (V2, V3) else DENSE
    if storage not in (DENSE, ROW_SPARSE):
        raise CheckpointError(f"an array is of unknown storage type {storage}")
    stored = reader.shape() if storage == ROW_SPARSE else ()
    if magic in (V1, V2, V3):
        shape = reader.shape()
    elif 0 < magic <= DIMENSION_LIMIT:
        shape = struct.unpack(f"<{magic}I", reader.take(4 * magic))
    else:
        raise CheckpointError(f"an array must start with {V2:#x}, got {magic:#x}")
    if not shape and (magic != V3 or storage == ROW_SPARSE):
        raise CheckpointError("an array has no shape")
    reader.number("<ii")  # device
    dtype = reader.dtype()
    if storage == DENSE:
        return reader.array(shape, dtype)
    row_dtype, row_shape = reader.dtype(), reader.shape()
    values = reader.array(stored, dtype)
    return _dense(shape, values, reader.array(row_shape, row_dtype), allowance)


def _dense(shape: tuple[int, ...], values: Array, rows: Array, allowance: Allowance) -> Array:
    """Check a row-sparse array and convert it to a dense one."""
    if not shape or values.shape != (rows.size, *shape[1:]) or rows.shape != (rows.size,):
        raise CheckpointError(
            f"rows of shape {values.shape} and their numbers of shape {rows.shape} do not belong "
            f"to an array of shape {shape}"
        )
    if rows.dtype.kind not in "iu" or np.unique(rows).size < rows.size:
        raise CheckpointError("row numbers must be distinct integers")
    if rows.size and (rows.min() < 0 or rows.max() >= shape[0]):
        raise CheckpointError(f"row numbers must be from 0 to {shape[0] - 1}")
    allowance.take(shape, values.itemsize)
    try:
        dense = np.zeros(shape, values.dtype)
    except (MemoryError, ValueError):
        raise CheckpointError(f"an array of shape {shape} does not fit into memory") from None
    dense[rows] = values
    return dense


class _Reader:
    """Sequential reader of numbers and arrays."""

    def __init__(self, blob: bytes) -> None:
        self.rest = memoryview(blob).toreadonly()

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
        try:
            return np.frombuffer(data, dtype).reshape(shape)
        except ValueError:  # without elements, but beyond the limits of NumPy
            raise CheckpointError(f"an array cannot have shape {shape}") from None

    def end(self) -> None:
        """Raise CheckpointError if bytes are left."""
        if self.rest:
            raise CheckpointError(f"it has {len(self.rest)} bytes too many")
