"""NumPy arrays as compiled code sees them: by the header that every array object begins with.

Its layout, ``PyArrayObject_fields``, is a part of NumPy's binary interface. Reading it where it
lies tells address, shape, dtype and flags of thousands of arrays in microseconds; asking each array
from Python would take milliseconds.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from fastopt.kernels.layout import ADDRESS
from fastopt.kernels.rule import scalar

__all__ = ["CHANGED", "FITS", "ID", "NBYTES", "addresses", "adopt", "enter", "guard", "same"]

HEAD = object.__basicsize__
"""Bytes of the part that all Python objects begin with; its last word is the type."""
TYPE, DATA, NDIM, SHAPE = HEAD - 8, HEAD, HEAD + 8, HEAD + 16
DTYPE, FLAGS = HEAD + 40, HEAD + 48
KIND = HEAD + 8
"""Where a dtype tells its kind, byte order and number: equal dtypes may be different objects."""
LOW = np.uint64(0xFFFFFFFF)

IN_PLACE, WRITEABLE = 0x0101, 0x0400
"""Flags: contiguous in C order and aligned; and writeable."""

ID, NBYTES, WANTED_TYPE, WANTED_DTYPE, WANTED_FLAGS, WANTED_NDIM, WANTED_SHAPE = range(7)
"""What a guard holds for each array: which object it is, and what must be true of it."""

FITS, CHANGED = -1, -2
"""Answers of :func:`enter`: nothing has changed; some addresses have."""


def guard(arrays: Sequence[np.ndarray], writeable: int) -> np.ndarray:
    """Guard of one tensor: what must stay true of its arrays, the first `writeable` written to."""
    ndim = max(array.ndim for array in arrays)
    made = np.zeros((len(arrays), WANTED_SHAPE + ndim), np.uint64)
    for k, (row, array) in enumerate(zip(made, arrays, strict=True)):
        flags = IN_PLACE | (WRITEABLE if k < writeable else 0)
        kind = word(np.uint64(id(array.dtype) + KIND))
        row[:WANTED_SHAPE] = id(array), array.nbytes, id(type(array)), kind, flags, array.ndim
        row[WANTED_SHAPE : WANTED_SHAPE + array.ndim] = array.shape
    return made


def word(address):
    """Unsigned 64-bit number at an address."""
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
def holds(wanted: Any) -> Any:
    """Whether an array is what its row of a guard says."""
    array = wanted[ID]
    if word(array + np.uint64(TYPE)) != wanted[WANTED_TYPE]:
        return False
    dtype = word(array + np.uint64(DTYPE))
    if word(dtype + np.uint64(KIND)) != wanted[WANTED_DTYPE]:
        return False
    if (word(array + np.uint64(FLAGS)) & wanted[WANTED_FLAGS]) != wanted[WANTED_FLAGS]:
        return False
    if (word(array + np.uint64(NDIM)) & LOW) != wanted[WANTED_NDIM]:
        return False
    shape = word(array + np.uint64(SHAPE))
    for axis in range(wanted[WANTED_NDIM]):
        if word(shape + np.uint64(8 * axis)) != wanted[WANTED_SHAPE + axis]:
            return False
    return True


@scalar
def apart(addresses: Any, wanted: Any) -> Any:
    """Whether no two arrays of a tensor share memory."""
    for k in range(len(wanted)):
        end = addresses[k] + wanted[k, NBYTES]
        for other in range(k):
            begin = addresses[other]
            if begin < end and addresses[k] < begin + wanted[other, NBYTES]:
                return False
    return True


def enter(table: Any, guards: Any) -> Any:
    """Enter the present address of every array into `table`, if all fits.

    Returns the first row where an array is not what its guard says or two arrays share memory, and
    forgets the address of its weight so that the row counts as changed the next time; else FITS or
    CHANGED. Objects are read as they are: the caller keeps them alive and holds the
    interpreter's lock.
    """
    answer = FITS
    for row in range(len(table)):
        moved = fits = True
        for k in range(guards.shape[1]):
            fits &= holds(guards[row, k])
        if fits:
            moved = False
            for k in range(guards.shape[1]):
                address = word(guards[row, k, ID] + np.uint64(DATA))
                moved |= table[row, ADDRESS + k] != address
                table[row, ADDRESS + k] = address
        if moved:
            answer = CHANGED
            if not fits or not apart(table[row, ADDRESS:], guards[row]):
                table[row, ADDRESS] = 0
                return row
    return answer


def same(objects, known):
    """Whether the objects with addresses in memory at `objects` are those in `known`."""
    different = 0
    for k in range(len(known)):
        different += word(np.uint64(objects) + np.uint64(8 * k)) != known[k]
    return different == 0


def adopt(objects, places, guards, column):
    """Make object number ``places[k]`` of those at `objects` the array `column` of guard `k`."""
    for k in range(len(places)):
        guards[k, column, ID] = word(np.uint64(objects) + np.uint64(8 * places[k]))


def addresses(objects, found):
    """Write the addresses of the elements of the arrays at `objects` in memory to `found`."""
    for k in range(len(found)):
        array = word(np.uint64(objects) + np.uint64(8 * k))
        found[k] = word(array + np.uint64(DATA))
