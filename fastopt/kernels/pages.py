"""Memory of large tables: only what is touched is to take room."""

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

__all__ = ["small_pages"]

LARGE = 1 << 22
"""Bytes from which NumPy asks the kernel for huge pages."""


def small_pages(arrays: Iterable[Any]) -> None:
    """Ask the kernel for no huge pages where large arrays lie, whose rows are touched sparsely.

    A row that is touched then takes room for a page of 4 KB instead of 2 MB. Where the platform
    does not take such advice nothing happens.
    """
    advise = _madvise()
    for array in arrays:
        if advise is None or not isinstance(array, np.ndarray) or array.nbytes < LARGE:
            continue
        begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_NOHUGEPAGE)


@cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
