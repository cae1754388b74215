"""Copies of many segments of memory with all threads."""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fastopt.kernels.compiling import compiled

__all__ = ["copy"]

CHUNK = 1 << 20
"""Bytes that a thread copies at a time."""


def move(target, source, size):
    """Copy bytes between addresses of memory that does not overlap."""
    ctypes.memmove(int(target), int(source), int(size))


@overload(move)
def _move(target, source, size):
    return lambda target, source, size: _move_intrinsic(target, source, size)


@intrinsic
def _move_intrinsic(typingctx, target, source, size):
    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], ir.IntType(64)(1))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@cache
def copy() -> Callable:
    """Kernel ``(segments)`` with a row for each segment: source and target address, and bytes.

    Threads copy chunks of equal size, whatever the sizes of the segments.
    """

    def copy(segments):
        ends = np.cumsum(segments[:, 2])
        total = ends[-1] if len(ends) else np.int64(0)
        for c in prange(-(-total // CHUNK)):
            at, stop = c * CHUNK, min((c + 1) * CHUNK, total)
            k = np.searchsorted(ends, at, side="right")
            while at < stop:
                source, target, size = segments[k, 0], segments[k, 1], segments[k, 2]
                begin, end = at - (ends[k] - size), min(stop, ends[k])
                move(target + begin, source + begin, end - at)
                at = end
                k += 1

    return compiled(copy, None, parallel=True)
