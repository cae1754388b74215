"""Arrays and a JSON document in a safetensors file, written and read in chunks.

The header is written and checked here instead of by the safetensors library, which only handles
whole arrays. So only small chunks are copied, and no array is allocated before the file is known to
be large enough for it.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from typing import Any

import numpy as np

from fastopt.checkpoint.format.errors import CheckpointError

Array = np.ndarray[Any, Any]
Chunks = Iterator[bytes | memoryview]

FORMAT = 2
KEY = "fastopt"
METADATA = "__metadata__"
"""Key of a header that is not the name of a tensor."""

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Code of each dtype in the header."""

BITS = {"bfloat16": "uint16"}
"""Dtypes that are stored as another dtype of the same size; the metadata hold their name."""

HEADER_LIMIT = 100_000_000
HEADER_BASE, HEADER_SHARE = 2**23, 2**11
"""Limit on the bytes of a header: a base, and bytes for each tensor in it."""

DIMENSION_LIMIT = 64
PIECE = 1 << 20


def can_hold(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be stored."""
    return dtype.name in CODES or dtype.name in BITS


def encode(tree: Any, arrays: Mapping[str, Array]) -> Chunks:
    """Yield the bytes of a file with `arrays` as its tensors and `tree` in its metadata.

    `tree` is JSON without NaN and infinity. The arrays must not change during iteration.

    Raises
    ------
    CheckpointError
        The header would be larger than :func:`decode` accepts.
    """
    # Sorted by decreasing element size, so that every array is aligned.
    stored = {name: _bits(a) for name, a in sorted(arrays.items(), key=lambda i: -i[1].itemsize)}
    tensors = {name: _record(arrays[name], bits) for name, bits in stored.items()}
    text = json.dumps({"format": FORMAT, "tree": tree, "tensors": tensors}, allow_nan=False)
    header: dict[str, Any] = {METADATA: {KEY: text, "crc32": _digest(text)}}
    end = 0
    for name, bits in stored.items():
        begin, end = end, end + bits.nbytes
        header[name] = _entry(tensors[name], begin, end)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    _check_header(head)
    yield len(head).to_bytes(8, "little") + head
    for bits in stored.values():
        for piece in _pieces(bits):
            yield _contiguous(piece).data


def decode(file: BufferedIOBase) -> tuple[Any, dict[str, Array]]:
    """Return the tree and the arrays of a file that :func:`encode` wrote.

    Raises
    ------
    CheckpointError
        The file is damaged or not of this format.
    """
    header, size = _header(file)
    metadata = header.pop(METADATA, {})
    if KEY not in metadata:
        raise CheckpointError(f"it contains no updater states: its metadata lacks the key {KEY!r}")
    text = metadata[KEY]
    if _digest(text) != metadata["crc32"]:
        raise CheckpointError("the metadata is damaged: its CRC32 differs")
    document = json.loads(text)
    if document["format"] != FORMAT:
        raise CheckpointError(f"format must be {FORMAT}, got {document['format']!r}")
    tensors = document["tensors"]
    if header.keys() != tensors.keys():
        odd = sorted(header.keys() ^ tensors.keys())
        raise CheckpointError(f"header and metadata do not list the same tensors: {odd}")
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    position = 0
    for name in names:
        end = position + _size(name, tensors[name])
        if header[name] != _entry(tensors[name], position, end):
            raise CheckpointError(
                f"tensor {name}: the header says {header[name]}, the metadata {tensors[name]}"
            )
        position = end
    if position != size:
        raise CheckpointError(f"the tensors need {position} bytes, the file has {size} for them")
    return document["tree"], {name: _read(file, name, tensors[name]) for name in names}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with a name.

    Raises
    ------
    CheckpointError
        The dtype is unknown, or the package that defines it is not installed.
    """
    if name in BITS:
        try:
            import ml_dtypes
        except ImportError:
            raise CheckpointError(f"dtype {name} needs the package ml_dtypes") from None
        name = getattr(ml_dtypes, name)
    elif name not in CODES:
        raise CheckpointError(f"unknown dtype {name!r}")
    return np.dtype(name)


def _bits(array: Array) -> Array:
    name = array.dtype.name
    return array.view(BITS[name]) if name in BITS else array


def _record(array: Array, bits: Array) -> dict[str, Any]:
    """Description of an array in the metadata."""
    crc = 0
    for piece in _pieces(bits):
        crc = zlib.crc32(_contiguous(piece).data, crc)
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    order = "F" if fortran else "C"
    return {"dtype": array.dtype.name, "shape": list(array.shape), "crc32": crc, "order": order}


def _entry(record: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Description of an array in the safetensors header."""
    dtype = record["dtype"]
    code = CODES[BITS.get(dtype, dtype)]
    return {"dtype": code, "shape": record["shape"], "data_offsets": [begin, end]}


def _digest(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _contiguous(array: Array) -> Array:
    """The elements in C order and little-endian."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _pieces(array: Array) -> Iterator[Array]:
    """Consecutive views of an array in C order, of at most `PIECE` bytes each."""
    if array.nbytes <= PIECE:
        yield array
        return
    row = array.nbytes // len(array)
    if row > PIECE:
        for part in array:
            yield from _pieces(part)
        return
    step = PIECE // row
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _header(file: BufferedIOBase) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file; return it and the number of bytes after it."""
    size = file.seek(0, 2) - 8
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size, HEADER_LIMIT):
        raise CheckpointError(
            "not a safetensors file, or a truncated one: "
            f"a header of {length} bytes cannot be in a file of {size + 8} bytes"
        )
    head = file.read(length)
    _check_header(head)
    header = json.loads(head.decode(), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise CheckpointError("the header must be a JSON object")
    return header, size - length


def _check_header(head: bytes) -> None:
    """Raise CheckpointError if a header is too large for its number of tensors.

    Parsed JSON takes up to 25 times its size in memory, so this is checked before parsing.
    """
    tensors = head.count(b'"data_offsets"') if len(head) > HEADER_BASE else 0
    limit = min(HEADER_BASE + HEADER_SHARE * tensors, HEADER_LIMIT)
    if len(head) > limit:
        raise CheckpointError(
            f"a header of {len(head)} bytes is too large for {tensors} tensors, "
            f"the limit is {limit}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise CheckpointError("the header names something twice")
    return items


def _size(name: str, record: Mapping[str, Any]) -> int:
    """Number of bytes of an array; raises CheckpointError for an invalid shape."""
    shape: list[int] = record["shape"]
    if len(shape) > DIMENSION_LIMIT or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"tensor {name}: {shape!r} is not a shape")
    return math.prod(shape) * dtype_of(record["dtype"]).itemsize


def _read(file: BufferedIOBase, name: str, record: Mapping[str, Any]) -> Array:
    """Read an array from the current position of `file`, and verify its checksum."""
    dtype = record["dtype"]
    bits = np.empty(record["shape"], BITS.get(dtype, dtype), record["order"])
    crc = 0
    for piece in _pieces(bits):
        target = piece if piece.flags.c_contiguous else np.empty(piece.shape, piece.dtype)
        if file.readinto(target.data) != target.nbytes:
            raise CheckpointError(f"tensor {name}: the file ends in it")
        crc = zlib.crc32(target.data, crc)
        if target is not piece:
            piece[...] = target
    if crc != record["crc32"]:
        raise CheckpointError(f"tensor {name} is damaged: its CRC32 differs")
    return bits.view(dtype_of(dtype)) if dtype in BITS else bits
