"""Prefetching of pages of a memory-mapped file.

Tests: ``tests/table/test_records.py``.
"""

import mmap
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic

PAGE = mmap.PAGESIZE

WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
POPULATE_WRITE = 23 if sys.platform == "linux" else WILL_NEED
"""Advice that maps pages as if they were written to; kernels before 5.14 refuse it."""


@intrinsic
def madvise(typingctx, address, size, advice):
    """Call ``madvise``: give the operating system a hint about a memory range."""

    def codegen(context, builder, signature, args):
        byte, word, number = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        declared = ir.FunctionType(number, [byte, word, number])
        call = cgutils.get_or_insert_function(builder.module, declared, "madvise")
        advice = builder.trunc(args[2], number)
        return builder.call(call, [builder.inttoptr(args[0], byte), args[1], advice])

    return types.int32(types.int64, types.int64, types.int64), codegen


@cache
def bring() -> Callable:
    """Kernel ``(address, pages)`` that requests all given pages of a mapping at once.

    It then maps the pages for writing one by one, which waits for pages that are not in memory yet.
    """
    page = PAGE

    def bring(address, pages):
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int64(WILL_NEED))
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int64(POPULATE_WRITE))

    return compiled(bring, None, parallel=False)
