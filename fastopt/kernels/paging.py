"""Pages of a mapped file that are brought to memory before they are used."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fastopt.kernels.compiling import compiled

__all__ = ["PAGE", "bring"]

PAGE = mmap.PAGESIZE

WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
POPULATE_WRITE = 23 if sys.platform == "linux" else WILL_NEED
"""Advice that maps pages as if they were written to; older kernels than 5.14 refuse it."""


def madvise(address, size, advice):
    """Give the kernel advice on addresses, which it may ignore."""
    call = ctypes.CDLL(None).madvise
    return call(ctypes.c_void_p(int(address)), ctypes.c_size_t(int(size)), int(advice))


@overload(madvise)
def _madvise(address, size, advice):
    return lambda address, size, advice: _madvise_intrinsic(address, size, advice)


@intrinsic
def _madvise_intrinsic(typingctx, address, size, advice):
    def codegen(context, builder, signature, args):
        byte, word, number = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        declared = ir.FunctionType(number, [byte, word, number])
        call = cgutils.get_or_insert_function(builder.module, declared, "madvise")
        advice = builder.trunc(args[2], number)
        return builder.call(call, [builder.inttoptr(args[0], byte), args[1], advice])

    return types.int32(types.int64, types.int64, types.int64), codegen


@cache
def bring() -> Callable:
    """Kernel ``(address, pages)`` that reads pages of a mapping at an address, all at once.

    Then it makes them writeable one by one: each is in memory by then, or is waited for.
    """
    page = PAGE

    def bring(address, pages):
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int64(WILL_NEED))
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int64(POPULATE_WRITE))

    return compiled(bring, None, parallel=False)
