"""Memory of large tables: only what is touched is to take room."""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

__all__ = ["huge_pages", "reserved", "small_pages"]

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


NORESERVE = {"linux": 0x4000, "darwin": 0x40}
"""Flag that reserves addresses without memory, which Python's mmap does not name everywhere."""


STAGGER = 273 * 64
"""Bytes by which arrays are shifted against each other, so that their rows do not share cache sets:
large mappings lie at equal distances, powers of two at worst."""


def reserved(shape: tuple[int, ...], dtype: Any, number: int = 0) -> np.ndarray[Any, Any]:
    """Zeros that take memory page by page, as they are written to, and addresses until then.

    `number` tells arrays apart that are used together.

    Raises
    ------
    MemoryError
        The platform does not give so many addresses.
    """
    dtype = np.dtype(dtype)
    shift = number * STAGGER
    size = max(int(np.prod(shape, dtype=object)) * dtype.itemsize, 1) + shift
    flags: dict[str, Any] = {}
    if hasattr(mmap, "MAP_ANONYMOUS"):
        more = NORESERVE.get(sys.platform, 0)
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | more
    try:
        pages = mmap.mmap(-1, size, **flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot reserve {size} bytes of address space: {error}") from None
    return np.ndarray(shape, dtype, pages, shift)


def huge_pages(array: np.ndarray[Any, Any]) -> None:
    """Ask the kernel for huge pages below an array of :func:`reserved`, which is filled densely."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            array.base.madvise(mmap.MADV_HUGEPAGE)  # type: ignore[union-attr]
        except OSError:
            return  # a kernel without them


@cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
