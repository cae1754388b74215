"""Access to the object headers of NumPy arrays, lists and tuples from compiled code.

The layout of an array's header, ``PyArrayObject_fields``, is part of NumPy's ABI, and the layouts
of lists and tuples are part of CPython's. Compiled code that reads these headers directly gets the
addresses, shapes, dtypes and flags of thousands of arrays in microseconds, while reading attributes
in Python takes milliseconds. :func:`unreadable` compares, once per process, the values that this
module reads with those that Python and NumPy report; if they differ, or if there is no GIL, calls
are checked in Python.

Headers are only read. The GIL keeps them: an array is resized, reshaped or freed by code that holds
it. What is read is used before the GIL is released, apart from data addresses of arrays that are
held; NumPy refuses to resize an array with more than one reference, unless its owner asks for that
(``refcheck=False``) and so vouches for all readers.

Tests: ``tests/kernels/test_numpy_abi.py``.
"""

import ctypes
import platform
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from fastopt._notices import warn_user

HEAD = object.__basicsize__
"""Size of the header that all Python objects start with; its last word is the type."""
TYPE, DATA, NDIM, SHAPE, STRIDES = HEAD - 8, HEAD, HEAD + 8, HEAD + 16, HEAD + 24
DTYPE, FLAGS = HEAD + 40, HEAD + 48
KIND = HEAD + 8
"""Offset of kind, byte order and type number in a dtype; equal dtypes may be distinct objects."""
LENGTH, ITEMS = HEAD, HEAD + 8
"""Offsets of the length of a list or tuple, and of a list's pointer to its items."""
FIRST = tuple.__basicsize__
"""Offset of the first item of a tuple; newer versions of Python store a hash before it."""
LOW = 0xFFFFFFFF

C_ORDER, F_ORDER, ALIGNED, WRITEABLE = 0x0001, 0x0002, 0x0100, 0x0400
"""Array flags."""

NBYTES, WANTED_SHAPE = 1, 6
"""Columns of a guard, whose others are named in :data:`fastopt._kernels.record_words.guard_at`."""

NO_GIL = "this Python runs without a GIL"
"""Result of :func:`unreadable` on free-threaded builds, whatever their layouts."""


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    memory: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # in a quarter of the time
    except (TypeError, ValueError, BufferError):  # it is read-only, empty or strided
        address: int = array.__array_interface__["data"][0]
        return address


def guard(arrays: Sequence[np.ndarray], writeable: int, order: int = C_ORDER) -> np.ndarray:
    """Return the guard of one tensor: the expected properties of its arrays.

    The first `writeable` arrays are written to. `order` is the flag of the order in which all
    arrays are contiguous, or 0 if they are not contiguous.
    """
    ndim = max(array.ndim for array in arrays)
    rows = np.zeros((len(arrays), WANTED_SHAPE + ndim), np.uint64)
    for k, (row, array) in enumerate(zip(rows, arrays, strict=True)):
        flags = order | ALIGNED | (WRITEABLE if k < writeable else 0)
        first, last = byte_bounds(array)
        kind = np.int64(kind_word(array.dtype)).view(np.uint64)
        row[:WANTED_SHAPE] = id(array), last - first, id(np.ndarray), kind, flags, array.ndim
        row[WANTED_SHAPE : WANTED_SHAPE + array.ndim] = array.shape
    return rows


_kinds: dict[Any, int] = {}
"""Numbers that stand for dtypes whose headers must not be read."""


def kind_word(dtype: np.dtype) -> int:
    """Return kind, byte order and type number of a dtype as one signed word."""
    if not readable():
        return _kinds.setdefault(dtype, len(_kinds) + 1)
    return ctypes.c_int64.from_address(id(dtype) + KIND).value


class Written:
    """The header of an array as words in memory, which compiled code reads like the object's.

    Parameters
    ----------
    array : numpy.ndarray
        The array, which is kept alive.

    Attributes
    ----------
    address : int
        Address of the header.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        shape = FLAGS // 8 + 1
        strides, kind = shape + array.ndim, shape + 2 * array.ndim
        self.words = words = np.zeros(kind + KIND // 8 + 1, np.int64)
        self.address = address = int(words.ctypes.data)
        words[TYPE // 8], words[NDIM // 8] = id(np.ndarray), array.ndim
        words[SHAPE // 8], words[STRIDES // 8] = address + 8 * shape, address + 8 * strides
        words[DTYPE // 8], words[kind + KIND // 8] = address + 8 * kind, kind_word(array.dtype)
        self.follow()

    def follow(self) -> None:
        """Write again what may change of an array: where it lies, its shape and its flags."""
        words, array, flags = self.words, self.array, self.array.flags
        shape = FLAGS // 8 + 1
        words[DATA // 8] = array.ctypes.data
        words[shape : shape + array.ndim] = array.shape
        words[shape + array.ndim : shape + 2 * array.ndim] = array.strides
        words[FLAGS // 8] = (
            C_ORDER * flags.c_contiguous
            | F_ORDER * flags.f_contiguous
            | ALIGNED * flags.aligned
            | WRITEABLE * flags.writeable
        )


def identities(arrays: Iterable[np.ndarray]) -> tuple[list[int], list[Written]]:
    """Return where compiled code reads the headers of arrays, and those that are written."""
    if readable():
        return list(map(id, arrays)), []
    written = list(map(Written, arrays))
    return [header.address for header in written], written


def at(address: int, offset: int) -> int:
    """Return the unsigned 64-bit number at `offset` bytes from an address."""
    return ctypes.c_uint64.from_address(address + offset).value


def items(sequence: object, length: int) -> int:
    """Return the address of the items of a list or tuple of this length, else 0."""
    start = id(sequence)
    kind = at(start, TYPE)
    if kind not in (id(list), id(tuple)) or at(start, LENGTH) != length:
        return 0
    return at(start, ITEMS) if kind == id(list) else start + FIRST


def readable() -> bool:
    """Whether compiled code may read the headers of arrays, lists and tuples."""
    return not unreadable()


@cache
def unreadable() -> str:
    """Return why compiled code must not read headers, or an empty string.

    Without a GIL another thread may replace an item of a list, and free it, while compiled code
    follows its address; the layouts alone do not decide.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return NO_GIL
    try:
        same = _reads_arrays() and _reads_sequences() and _reads_numbers()
    except Exception:
        same = False
    return "" if same else f"the object layouts of {_versions()} are not known"


def _versions() -> str:
    return f"Python {platform.python_version()} with NumPy {np.__version__}"


@cache
def warn_of_layouts() -> None:
    """Warn once per process if calls are checked in Python because layouts are not known."""
    reason = unreadable()
    if reason not in ("", NO_GIL):
        warn_user(f"{reason}: calls are checked in Python, which is slower, with equal results")


def _reads_numbers() -> bool:
    """Whether numbers hold their value after their head."""
    numbers = [np.float16(-1.5), np.float32(-1.5), np.float64(-1.5), np.int64(-3), -1.5]
    raw = [np.asarray(number).tobytes() for number in numbers]
    pairs = zip(numbers, raw, strict=True)
    return [ctypes.string_at(id(number) + HEAD, len(bits)) for number, bits in pairs] == raw


def _samples() -> list[np.ndarray]:
    """Return arrays of every kind that the checks distinguish."""
    whole = np.arange(24.0)
    frozen = whole.copy()
    frozen.flags.writeable = False
    unaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
    kinds = [np.zeros((2, 3), dtype) for dtype in ("f2", "f4", "f8", "i4", "i8", ">f4")]
    return [whole, whole.reshape(2, 3, 4), whole[::2], whole.reshape(4, 6).T, np.array(1.0),
            np.zeros((0, 3)), frozen, unaligned, *kinds]  # fmt: skip


def _reads_arrays() -> bool:
    kinds: dict[int, np.dtype[Any]] = {}
    for array in _samples():
        header = id(array)
        shape = [at(at(header, SHAPE), 8 * axis) for axis in range(array.ndim)]
        strides = [at(at(header, STRIDES), 8 * axis) for axis in range(array.ndim)]
        bits = {C_ORDER: array.flags.c_contiguous, F_ORDER: array.flags.f_contiguous,
                ALIGNED: array.flags.aligned, WRITEABLE: array.flags.writeable}  # fmt: skip
        flags = at(header, FLAGS)
        kind = at(at(header, DTYPE), KIND)
        expected = array.ctypes.data, array.ndim, [*array.shape, *array.strides], id(type(array))
        words = [at(header, offset) for offset in (DATA, NDIM, TYPE)]
        actual = words[0], words[1] & LOW, shape + strides, words[2]
        if actual != expected or any(bool(flags & bit) != is_set for bit, is_set in bits.items()):
            return False
        if at(header, DTYPE) != id(array.dtype):
            return False
        if kinds.setdefault(kind, array.dtype) != array.dtype:
            return False
    return len(kinds) == len({array.dtype for array in _samples()})


def _reads_sequences() -> bool:
    first, second = object(), object()
    grown: list[Any] = []
    for value in (first, second, first):
        grown.append(value)
    for sequence in ([first, second], (first, second), grown, [], ()):
        start = items(sequence, len(sequence))
        if sequence and not start:
            return False
        if [at(start, 8 * k) for k in range(len(sequence))] != [*map(id, sequence)]:
            return False
    return all(at(id(value), TYPE) == id(type(value)) for value in (1, 10**30, "a", 1.0, True))
