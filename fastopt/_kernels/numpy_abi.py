"""Access to the object headers of NumPy arrays, lists and tuples from compiled code.

The layout of an array's header, ``PyArrayObject_fields``, is part of NumPy's ABI, and the layouts
of lists and tuples are part of CPython's. Compiled code that reads these headers directly gets the
addresses, shapes, dtypes and flags of thousands of arrays in microseconds, while reading attributes
in Python takes milliseconds. :func:`unreadable` compares, once per process, the values that this
module reads with those that Python and NumPy report; if they differ, or if there is no GIL, calls
are checked in Python.
"""

import ctypes
import platform
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload
from numpy.lib.array_utils import byte_bounds

from fastopt._notices import warn_user
from fastopt.kernels.rule import scalar

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
LOW = np.uint64(0xFFFFFFFF)

C_ORDER, F_ORDER, ALIGNED, WRITEABLE = 0x0001, 0x0002, 0x0100, 0x0400
"""Array flags."""

ID, NBYTES, WANTED_TYPE, WANTED_DTYPE, WANTED_FLAGS, WANTED_NDIM, WANTED_SHAPE = range(7)
"""Columns of a guard: the id of an array, its size in bytes, and its expected properties."""

FITS = 0
"""Result of :func:`admit` on success; else ``-1 - row`` is the first row that does not fit."""

NO_GIL = "this Python runs without a GIL"
"""Result of :func:`unreadable` on free-threaded builds, whatever their layouts."""

TYPES = np.array([id(list), id(tuple), id(int), id(str)], np.uint64)
"""Addresses of types in this process; not compile-time constants, as kernels are cached on disk."""


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    memory: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # in a quarter of the time
    except (TypeError, ValueError, BufferError):  # it is read-only, empty or strided
        found: int = array.__array_interface__["data"][0]
        return found


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


def kind_word(dtype: Any) -> int:
    """Return kind, byte order and type number of a dtype as one signed word."""
    if not readable():
        return _kinds.setdefault(dtype, len(_kinds) + 1)
    return int(word(np.uint64(id(dtype) + KIND)).view(np.int64))


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
    return [each.address for each in written], written


def word(address):
    """Return the unsigned 64-bit number at an address."""
    return np.uint64(ctypes.c_uint64.from_address(int(address)).value)


@overload(word)
def _word(address):
    return lambda address: _word_intrinsic(address)


@intrinsic
def _word_intrinsic(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = context.get_value_type(types.CPointer(types.uint64))
        return builder.load(builder.inttoptr(args[0], pointer), align=4)

    return types.uint64(types.uint64), codegen


@scalar
def at(address: Any, offset: Any) -> Any:
    """Return the word at `offset` bytes from an address."""
    return word(np.uint64(address) + np.uint64(offset))


@scalar
def holds(wanted: Any) -> Any:
    """Whether an array has the properties in its row of a guard."""
    array = wanted[ID]
    if at(array, TYPE) != wanted[WANTED_TYPE]:
        return False
    if at(at(array, DTYPE), KIND) != wanted[WANTED_DTYPE]:
        return False
    if (at(array, FLAGS) & wanted[WANTED_FLAGS]) != wanted[WANTED_FLAGS]:
        return False
    if (at(array, NDIM) & LOW) != wanted[WANTED_NDIM]:
        return False
    shape = at(array, SHAPE)
    for axis in range(wanted[WANTED_NDIM]):
        if at(shape, 8 * axis) != wanted[WANTED_SHAPE + axis]:
            return False
    return True


@scalar
def items(sequence: Any, length: Any, known: Any) -> Any:
    """Return the address of the items of a list or tuple of this length, else 0."""
    kind = at(sequence, TYPE)
    if kind != known[0] and kind != known[1]:
        return np.uint64(0)
    if at(sequence, LENGTH) != np.uint64(length):
        return np.uint64(0)
    return at(sequence, ITEMS) if kind == known[0] else np.uint64(sequence) + np.uint64(FIRST)


@scalar
def is_index(value: Any, known: Any) -> Any:
    """Whether an object is exactly an int or a str; 1.0 and True equal 1 but are not valid."""
    kind = at(value, TYPE)
    return kind == known[2] or kind == known[3]


@scalar
def clear_of(first: Any, last: Any, written: Any) -> Any:
    """Whether the addresses from `first` to `last` overlap none of the sorted ranges `written`."""
    low, high = 0, written.shape[1]
    while low < high:
        middle = (low + high) // 2
        if written[1, middle] <= first:
            low = middle + 1
        else:
            high = middle
    return low == written.shape[1] or written[0, low] >= last


def admit(table: Any, guards: Any, written: Any, ids: Any, known: Any, objects: Any) -> Any:
    """Check the arguments of a list call against prepared guards, and enter its gradients.

    Parameters
    ----------
    table : numpy.ndarray
        Addresses of the weight and of the gradient of each tensor.
    guards : numpy.ndarray
        Their guards, two for each tensor.
    written : numpy.ndarray
        The sorted memory ranges that are written to.
    ids : numpy.ndarray
        Ids of the weights.
    known : numpy.ndarray
        :data:`TYPES`.
    objects : int
        Id of the tuple of the three lists: indices, gradients and weights.

    Returns
    -------
    int
        FITS, or ``-1 - row``.

    Notes
    -----
    Objects are read without reference counting: the caller keeps them alive and holds the GIL.
    """
    index_items = items(at(objects, FIRST), len(table), known)
    grad_items = items(at(objects, FIRST + 8), len(table), known)
    weight_items = items(at(objects, FIRST + 16), len(table), known)
    if index_items == 0 or grad_items == 0 or weight_items == 0:
        return -1
    for row in range(len(table)):
        place, guard = np.uint64(8 * row), guards[row]
        if not is_index(at(index_items, place), known) or at(weight_items, place) != ids[row]:
            return -1 - row
        guard[1, ID] = at(grad_items, place)
        if not (holds(guard[0]) and holds(guard[1])) or at(ids[row], DATA) != table[row, 0]:
            return -1 - row
        grad = at(guard[1, ID], DATA)
        if table[row, 1] != grad:
            if not clear_of(grad, grad + guard[1, NBYTES], written):
                return -1 - row
            table[row, 1] = grad
    return FITS


def take_addresses(table: Any, written: Any, sizes: Any, itemsize: Any, found: Any) -> Any:
    """Enter addresses of gradients; return False with nothing entered if one does not fit.

    Parameters
    ----------
    table, written : numpy.ndarray
        Addresses, those of gradients in the last column, and the sorted memory ranges that are
        written to.
    sizes : numpy.ndarray
        Bytes of each gradient.
    itemsize : int
        Bytes of an element; addresses must be a multiple of it.
    found : numpy.ndarray
        The addresses.
    """
    last = table.shape[1] - 1
    for row in range(len(found)):
        first = found[row]
        if first != table[row, last] and not (
            first % np.uint64(itemsize) == 0 and clear_of(first, first + sizes[row], written)
        ):
            return False
    for row in range(len(found)):
        table[row, last] = found[row]
    return True


def addresses(objects, found):
    """Write the data addresses of the arrays in the object array at `objects` to `found`."""
    for k in range(len(found)):
        array = word(np.uint64(objects) + np.uint64(8 * k))
        found[k] = word(array + np.uint64(DATA))


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
    found = (
        ctypes.string_at(id(n) + HEAD, len(each)) for n, each in zip(numbers, raw, strict=True)
    )
    return list(found) == raw


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
        header = np.uint64(id(array))
        shape = [int(at(at(header, SHAPE), 8 * axis)) for axis in range(array.ndim)]
        strides = [int(at(at(header, STRIDES), 8 * axis)) for axis in range(array.ndim)]
        bits = {C_ORDER: array.flags.c_contiguous, F_ORDER: array.flags.f_contiguous,
                ALIGNED: array.flags.aligned, WRITEABLE: array.flags.writeable}  # fmt: skip
        flags = int(at(header, FLAGS))
        kind = int(at(at(header, DTYPE), KIND))
        expected = array.ctypes.data, array.ndim, [*array.shape, *array.strides], id(type(array))
        words = [int(at(header, offset)) for offset in (DATA, NDIM, TYPE)]
        found = words[0], words[1] & int(LOW), shape + strides, words[2]
        if found != expected or any(bool(flags & bit) != is_set for bit, is_set in bits.items()):
            return False
        if int(at(header, DTYPE)) != id(array.dtype):
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
        start = items(np.uint64(id(sequence)), len(sequence), TYPES)
        if sequence and [int(at(start, 8 * k)) for k in range(len(sequence))] != [
            *map(id, sequence)
        ]:
            return False
        if int(items(np.uint64(id(sequence)), len(sequence) + 1, TYPES)):
            return False
    values = ((1, True), (10**30, True), ("a", True), (1.0, False), (True, False), (b"a", False))
    return all(bool(is_index(np.uint64(id(value)), TYPES)) == good for value, good in values)
