"""Pages of memory: those of large arrays that are updated sparsely, and of mapped files.

Tests: ``tests/platforms/test_systems.py``, ``tests/table/test_records.py``.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import DTypeLike

from fastopt._kernels.compiling import compiled
from fastopt._kernels.objects import c_function

LARGE = 1 << 22
"""Size in bytes from which NumPy requests huge pages."""


def small_pages(arrays: Iterable[Any]) -> None:
    """Disable huge pages for large arrays that are updated sparsely.

    A row that is written to then occupies a page of 4 KB instead of 2 MB. This does nothing on
    platforms without such a setting.
    """
    advise = _madvise()
    for array in arrays:
        if advise is None or not isinstance(array, np.ndarray) or array.nbytes < LARGE:
            continue
        begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_NOHUGEPAGE)


NORESERVE = {"linux": 0x4000, "darwin": 0x40}
"""``MAP_NORESERVE``, which Python's mmap does not define on every platform."""


STAGGER = 273 * 64
"""Offset in bytes between arrays, so that their rows do not share cache sets: large mappings lie at
equal distances, in the worst case powers of two."""


def reserved(shape: tuple[int, ...], dtype: DTypeLike, number: int = 0) -> np.ndarray[Any, Any]:
    """Return zeros in reserved address space; pages take memory when they are written to.

    `number` differs between arrays that are used together.

    Raises
    ------
    MemoryError
        The address space cannot be reserved.
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


MAP_FIXED = 0x10
"""Flag of ``mmap`` on Linux and macOS, which Python's mmap does not define."""


def map_file(array: np.ndarray[Any, Any], descriptor: int, begin: int, end: int) -> None:
    """Map bytes of a file over the same bytes of an array from :func:`reserved`, copy-on-write.

    Changes of these bytes in memory are lost. `begin` is at the start of a page, and the file must
    have all bytes: reading a page after its end would terminate the process.

    Raises
    ------
    OSError
        The file cannot be mapped.
    """
    flags = mmap.MAP_PRIVATE | MAP_FIXED | NORESERVE.get(sys.platform, 0)
    address, access = array.ctypes.data + begin, mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(address, end - begin, access, flags, descriptor, begin) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


IN_MEMORY = 0x01021994, 0x858458F6
"""Numbers of tmpfs and ramfs in Linux."""


def allocate(descriptor: int, size: int) -> None:
    """Allocate the holes in the first `size` bytes of a file, if its file system is in memory.

    The file keeps its bytes. If such a file system is full, access to a hole of a mapped file would
    terminate the process.

    Raises
    ------
    OSError
        The file system is full.
    """
    if sys.platform != "linux" or os.lseek(descriptor, 0, os.SEEK_HOLE) >= size:
        return
    status = (ctypes.c_long * 32)()
    if not ctypes.CDLL(None).fstatfs(descriptor, status) and status[0] in IN_MEMORY:
        os.posix_fallocate(descriptor, 0, size)


@cache
def _mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    numbers = (ctypes.c_int,) * 3
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long)
    return call


def huge_pages(array: np.ndarray[Any, Any]) -> None:
    """Enable huge pages for an array from :func:`reserved` that is filled densely."""
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


PAGE = mmap.PAGESIZE

WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
POPULATE_WRITE = 23 if sys.platform == "linux" else WILL_NEED
"""Advice that maps pages as if they were written to; kernels before 5.14 refuse it."""


madvise = c_function("madvise", types.int32, types.int64, types.int64, types.int32)
"""Give the operating system a hint about a memory range."""


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
