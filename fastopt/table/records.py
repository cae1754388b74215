"""Record files, whose changes stay in memory until they are written explicitly."""

import math
import mmap
import os
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.pages import NORESERVE, reserved
from fastopt._kernels.paging import PAGE
from fastopt.checkpoint.errors import CheckpointError

__all__ = ["SUMS", "Parts", "RecordFile", "Rows", "fields", "size_of"]

Array = np.ndarray[Any, Any]
Rows = NDArray[np.int64]
Parts = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array in a record."""

SHIFT = PAGE.bit_length() - 1
SUM = np.dtype("<u4")
SUMS = ".sums"
"""Suffix of the names of checksum files."""

BLANK = zlib.crc32(bytes(PAGE))
"""Checksum of a page of zeros. Checksums are stored XORed with it, so that a hole in the file is
valid."""


class RecordFile:
    """File of fixed-size records, mapped copy-on-write.

    The system never writes changed pages to the file by itself; only :meth:`write` does. A second
    file holds checksums of the pages.

    Parameters
    ----------
    path : Path
        The file.
    size : int
        Bytes of a record.
    create : bool
        Create the file if it does not exist.
    resident : bool
        Read all records into memory instead of mapping the file.

    Raises
    ------
    OSError
        The file cannot be opened.

    Attributes
    ----------
    records : numpy.ndarray
        Bytes of the records, of shape ``(capacity, size)``.
    held : int
        Number of pages with private copies in memory; 0 for a resident file.
    """

    records: Array

    def __init__(self, path: Path, size: int, create: bool, resident: bool) -> None:
        self.resident = resident
        self.path, self.size, self.held = path, size, 0
        self._file = _opened(self, path, create)
        self._sums_file = _opened(self, path.with_name(f"{path.name}{SUMS}"), create)
        self.length = -(-os.fstat(self._file).st_size // PAGE) * PAGE

    def map(self, capacity: int) -> None:
        """Map address space for `capacity` records.

        Raises
        ------
        MemoryError
            The address space cannot be reserved, or the file system has no files of that size.
        """
        whole = max(-(-capacity * self.size // PAGE) * PAGE, self.length)
        if self.resident:
            self._bytes = reserved((whole,), np.uint8)
            with open(self.path, "rb") as file:
                file.readinto(self._bytes[: self.length].data)
        else:
            self._pages = self._mapped(whole)
            self._bytes = np.frombuffer(self._pages, np.uint8)
        self.address = self._bytes.ctypes.data
        self.records = np.ndarray((capacity, self.size), np.uint8, self._bytes.base)
        self._changed = reserved((capacity,), np.bool_)
        self._held = reserved((whole // PAGE,), np.bool_)
        self._sums = reserved((whole // PAGE,), SUM)
        sums = np.fromfile(self.path.with_name(f"{self.path.name}{SUMS}"), SUM)[: len(self._sums)]
        self._sums[: len(sums)] = sums
        self.grow(1)

    def _mapped(self, size: int) -> mmap.mmap:
        """Map `size` bytes, which may be more than the file has."""
        flags = mmap.MAP_PRIVATE | NORESERVE.get(sys.platform, 0)
        try:
            os.ftruncate(self._file, size)  # mmap checks the size of the file
            try:
                pages = mmap.mmap(self._file, size, flags=flags)
            finally:
                os.ftruncate(self._file, self.length)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"cannot map {size} bytes of {self.path}: {error}") from None
        pages.madvise(mmap.MADV_RANDOM)
        return pages

    def grow(self, rows: int) -> None:
        """Extend the file to hold `rows` records; new ones are zeros and take no disk space."""
        needed = -(-rows * self.size // PAGE) * PAGE
        if needed > self.length:
            length = min(max(needed, 2 * self.length), len(self._bytes))
            os.ftruncate(self._file, length)
            self.length = length

    def mark(self, rows: Rows) -> None:
        """Mark records as changed."""
        self._changed[rows] = True
        self.hold(rows)

    def hold(self, rows: Rows) -> NDArray[np.int64]:
        """Mark the pages of records as copied to memory; return the newly marked ones."""
        if self.resident:
            return rows[:0]
        pages = self._pages_of(rows)
        new = np.unique(pages[~self._held[pages]])
        self._held[new] = True
        self.held += len(new)
        return new

    def _pages_of(self, rows: Rows) -> NDArray[np.int64]:
        """Pages of records, possibly repeated."""
        first, last = rows * self.size >> SHIFT, (rows + 1) * self.size - 1 >> SHIFT
        more = int((last - first).max(initial=0))
        if not more:
            return first
        return np.concatenate([np.minimum(first + k, last) for k in range(more + 1)])

    def changes(self) -> tuple[Rows, Array]:
        """Numbers and bytes of the changed records."""
        rows = np.flatnonzero(self._changed[: self.length // self.size])
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return rows, self.records[rows[0] : rows[-1] + 1]
        return rows, self.records[rows]

    def write(self) -> None:
        """Write changed pages and their checksums to disk, without clearing the marks."""
        rows = np.flatnonzero(self._changed[: self.length // self.size])
        pages = np.unique(self._pages_of(rows))
        for begin, end in _runs(pages):
            _write(self._file, self._bytes[begin * PAGE : end * PAGE], begin * PAGE)
            self._sums[begin:end] = [self._sum(page) for page in range(begin, end)]
        for begin, end in _runs(np.unique(pages * SUM.itemsize >> SHIFT)):
            of = slice(begin * PAGE // SUM.itemsize, end * PAGE // SUM.itemsize)
            _write(self._sums_file, self._sums[of].view(np.uint8), begin * PAGE)
        os.fsync(self._file)
        os.fsync(self._sums_file)

    def release(self) -> None:
        """Clear the marks of changed records, and drop the private copies of written pages."""
        self._changed[: self.length // self.size + 1] = False
        pages = np.flatnonzero(self._held[: self.length // PAGE])
        if sys.platform == "linux":  # on other systems MADV_DONTNEED keeps the copies
            for begin, end in _runs(pages):
                self._pages.madvise(mmap.MADV_DONTNEED, begin * PAGE, (end - begin) * PAGE)
        self._held[pages] = False
        self.held = 0

    def check_length(self, rows: int) -> None:
        """Raise CheckpointError unless the files hold `rows` records and their checksums."""
        pages = -(-rows * self.size // PAGE)
        for name, file, needed in (
            (self.path.name, self._file, pages * PAGE),
            (f"{self.path.name}{SUMS}", self._sums_file, pages * SUM.itemsize),
        ):
            if (found := os.fstat(file).st_size) < needed:
                raise CheckpointError(f"{name} must have {needed} bytes or more, got {found}")

    def verify(self, rows: int) -> None:
        """Raise CheckpointError if a page of the first `rows` records is damaged."""
        for page in range(-(-rows * self.size // PAGE)):
            if self._sum(page) != self._sums[page]:
                raise CheckpointError(
                    f"{self.path.name} is damaged: the checksum of its page {page} differs"
                )

    def _sum(self, page: int) -> int:
        return zlib.crc32(self._bytes[page * PAGE : (page + 1) * PAGE].data) ^ BLANK


def _opened(owner: Any, path: Path, create: bool) -> int:
    """Open a file; the descriptor is closed when its owner is garbage collected."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _runs(pages: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, as first and last + 1."""
    ends = np.flatnonzero(np.diff(pages) != 1) + 1
    first = pages[np.concatenate([[0], ends])] if len(pages) else pages
    last = pages[np.concatenate([ends - 1, [-1]])] + 1 if len(pages) else pages
    yield from zip(first.tolist(), last.tolist(), strict=True)


def _write(descriptor: int, data: Array, offset: int) -> None:
    """Write all bytes at an offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:].data, offset + done)


def size_of(parts: Parts) -> tuple[list[int], int]:
    """Aligned offsets of the arrays in a record, and the size of the record."""
    offsets, end = [], 0
    for dtype, shape in parts:
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        offsets.append(begin)
        end = begin + dtype.itemsize * math.prod(shape)
    return offsets, -(-end // 8) * 8


def fields(records: Array, parts: Parts) -> list[Array]:
    """Views of the records' bytes as one array per part, with a row for each record."""
    offsets, size = size_of(parts)
    views: list[Array] = []
    for (dtype, shape), offset in zip(parts, offsets, strict=True):
        strides = (size, *np.empty(shape, dtype).strides)
        views.append(np.ndarray((len(records), *shape), dtype, records, offset, strides))
    return views
