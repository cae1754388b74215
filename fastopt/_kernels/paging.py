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

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.objects import BYTES, WORD, external

PAGE = mmap.PAGESIZE

WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
POPULATE_WRITE = 23 if sys.platform == "linux" else WILL_NEED
"""Advice that maps pages as if they were written to; kernels before 5.14 refuse it."""


@intrinsic
def madvise(typingctx, address, size, advice):
    """Call ``madvise``: give the operating system a hint about a memory range."""
    numbers = types.int64, types.int64, types.int32
    return types.int32(*numbers), external("madvise", ir.IntType(32), BYTES, WORD, ir.IntType(32))


@cache
def bring() -> Callable:
    """Kernel ``(address, pages)`` that requests all given pages of a mapping at once.

    It then maps the pages for writing one by one, which waits for pages that are not in memory yet.
    """
    page = PAGE

    def bring(address, pages):
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int32(WILL_NEED))
        for k in range(len(pages)):
            madvise(address + pages[k] * page, np.int64(page), np.int32(POPULATE_WRITE))

    return compiled(bring, None, parallel=False)
