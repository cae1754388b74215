"""Directory of a table in files: record files, and atomic flushes through a log."""

import errno
import mmap
import os
import stat
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.pages import PAGE, allocate, bring, map_file, reserved
from fastopt._kernels.threads import in_forked_child
from fastopt.checkpoint.format import files
from fastopt.checkpoint.format.errors import CheckpointError, read_from
from fastopt.checkpoint.format.tree import chunks, read
from fastopt.optimizer import Optimizer

Array = np.ndarray[Any, Any]
Rows = NDArray[np.int64]
Parts = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array in a record."""

BLOCK = 4096
"""Bytes that have a checksum of their own, and by which files grow. It belongs to the format: pages
of memory have other sizes on other machines."""

SUM = np.dtype("<u4")
SUMS = ".sums"
"""Suffix of the names of checksum files."""

BLANK = zlib.crc32(bytes(BLOCK))
"""Checksum of a block of zeros. Checksums are stored XORed with it, so that a hole in the file is
valid."""

LINKS = errno.ELOOP, errno.EISDIR, errno.ENXIO
"""Errors of ``open`` for symbolic links, directories and sockets."""


class RecordFile:
    """File of fixed-size records, mapped copy-on-write.

    The system never writes changed pages to the file by itself; only :meth:`write` does, which also
    creates and extends the file. Until then, new records are in anonymous memory, so that access to
    a record never depends on free disk space. A second file holds checksums of the blocks.

    Parameters
    ----------
    path : Path
        The file.
    size : int
        Bytes of a record.
    resident : bool
        Read all records into memory instead of mapping the file.
    missing : bool
        The files may be missing.

    Raises
    ------
    CheckpointError, OSError
        A file cannot be opened, or is not a regular file.

    Attributes
    ----------
    records : numpy.ndarray
        Bytes of the records, of shape ``(capacity, size)``.
    rows : int
        Number of the first records that may have been used.
    held : int
        Number of pages with private copies in memory; 0 for a resident file.
    """

    records: Array

    def __init__(self, path: Path, size: int, resident: bool, missing: bool) -> None:
        self.path, self.size, self.resident = path, size, resident
        self.rows = self.held = self._end = 0
        self._data, self._summed = _File(path), _File(path.with_name(f"{path.name}{SUMS}"))
        for file in (self._data, self._summed):
            if not file.open() and not missing:
                raise CheckpointError(f"{path.name} or {path.name}{SUMS} is missing")

    def map(self, capacity: int, rows: int) -> None:
        """Reserve address space for `capacity` records, with the first `rows` of the file.

        Raises
        ------
        MemoryError
            The address space cannot be reserved.
        OSError
            The file has holes, and the disk is full.
        """
        rows = min(rows, capacity)
        blocks = -(-capacity * self.size // BLOCK)
        pages = -(-blocks * BLOCK // PAGE)
        self._bytes = reserved((pages * PAGE,), np.uint8)
        self.address = self._bytes.ctypes.data
        self.records = np.ndarray((capacity, self.size), np.uint8, self._bytes.base)
        self._changed = reserved((capacity,), np.bool_)
        self._held = reserved((pages,), np.bool_)
        self._sums = reserved((blocks,), SUM)
        used = -(-rows * self.size // BLOCK)
        self._summed.read(self._sums[:used].view(np.uint8))
        end, self._end = min(used * BLOCK, self._data.length), 0
        if self.resident:
            self._data.read(self._bytes[:end])
            self._end = end
        else:
            self._map(end)
        self.rows = rows

    def _map(self, end: int) -> None:
        """Map the file up to the byte `end`, from the page on that the mapped part ends in."""
        begin = self._end // PAGE * PAGE
        if end > self._end:
            allocate(self._data.descriptor, end)
            map_file(self._bytes, self._data.descriptor, begin, end)
            self._advise(mmap.MADV_RANDOM, begin, end)
            self._end = end

    def _advise(self, advice: int, begin: int, end: int) -> None:
        self._bytes.base.madvise(advice, begin, end - begin)  # type: ignore[union-attr]

    @property
    def stored(self) -> int:
        """Number of records in the file."""
        return self._end // self.size

    def grow(self, rows: int) -> None:
        """Make room for the first `rows` records; new ones are zeros."""
        self.rows = max(self.rows, rows)

    def mark(self, rows: Rows) -> None:
        """Mark records as changed."""
        self._changed[rows] = True
        self.hold(rows)

    def hold(self, rows: Rows) -> NDArray[np.int64]:
        """Mark the pages of records as copied to memory; return the newly marked ones."""
        if self.resident:
            return rows[:0]
        pages = self._units_of(rows, PAGE)
        new = np.unique(pages[~self._held[pages]])
        self._held[new] = True
        self.held += len(new)
        return new

    def _units_of(self, rows: Rows, unit: int) -> NDArray[np.int64]:
        """Pages or blocks of records, possibly repeated."""
        shift = unit.bit_length() - 1
        first, last = rows * self.size >> shift, (rows + 1) * self.size - 1 >> shift
        more = int((last - first).max(initial=0))
        if not more:
            return first
        return np.concatenate([np.minimum(first + k, last) for k in range(more + 1)])

    def changes(self) -> tuple[Rows, Array]:
        """Numbers and bytes of the changed records."""
        rows = np.flatnonzero(self._changed[: self.rows])
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return rows, self.records[rows[0] : rows[-1] + 1]
        return rows, self.records[rows]

    def _blocks(self) -> NDArray[np.int64]:
        """Blocks to write: those of changed records, and all between the file's end and them."""
        blocks = np.unique(self._units_of(np.flatnonzero(self._changed[: self.rows]), BLOCK))
        gap = np.arange(self._end // BLOCK, blocks[-1] if len(blocks) else 0)
        return np.union1d(blocks, gap)

    def _written(self) -> int:
        """Bytes of the file that are in use after :meth:`write`."""
        blocks = self._blocks()
        return max(self._end, int(blocks[-1] + 1) * BLOCK if len(blocks) else 0)

    def sum(self) -> NDArray[np.int64]:
        """Compute the checksums of the blocks to write, and return their numbers."""
        blocks = self._blocks()
        self._sums[blocks] = [self._sum(block) for block in blocks]
        return blocks

    def write(self) -> None:
        """Write changed blocks and their checksums to disk, without clearing the marks."""
        blocks = self.sum()
        for begin, end in _runs(blocks):
            self._data.write(self._bytes[begin * BLOCK : end * BLOCK], begin * BLOCK)
        for begin, end in _runs(np.unique(blocks * SUM.itemsize // BLOCK)):
            of = slice(begin * BLOCK // SUM.itemsize, end * BLOCK // SUM.itemsize)
            self._summed.write(self._sums[of].view(np.uint8), begin * BLOCK)
        self._data.sync()
        self._summed.sync()

    def release(self) -> None:
        """Clear the marks of changed records, and drop the private copies of written pages."""
        end = self._written()
        self._changed[: self.rows] = False
        if self.resident:
            self._end = end
            return
        self._map(end)
        pages = np.flatnonzero(self._held[: -(-end // PAGE)])
        if sys.platform == "linux":  # on other systems MADV_DONTNEED keeps the copies
            for first, last in _runs(pages):
                self._advise(mmap.MADV_DONTNEED, first * PAGE, last * PAGE)
        self._held[pages] = False
        self.held = 0

    def check_length(self, rows: int) -> None:
        """Raise CheckpointError unless files and changes have `rows` records with checksums."""
        blocks, written = -(-rows * self.size // BLOCK), self._written() // BLOCK
        for file, unit in ((self._data, BLOCK), (self._summed, SUM.itemsize)):
            length, needed = max(file.length, written * unit), blocks * unit
            if length < needed:
                name = file.path.name
                raise CheckpointError(f"{name} must have {needed} bytes or more, got {length}")

    def verify(self, rows: int) -> None:
        """Raise CheckpointError if a block of the first `rows` records is damaged."""
        for block in range(-(-rows * self.size // BLOCK)):
            if self._sum(block) != self._sums[block]:
                raise CheckpointError(
                    f"{self.path.name} is damaged: the checksum of its block {block} differs"
                )

    def _sum(self, block: int) -> int:
        return zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK].data) ^ BLANK

    def discard(self) -> None:
        """Remove the files that :meth:`write` created."""
        for file in (self._data, self._summed):
            if file.created:
                file.path.unlink()


class _File:
    """Bytes of one file, which the first write creates; closed by the garbage collector."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor, self.length, self.created = path, -1, 0, False

    def open(self) -> bool:
        """Open the file; return whether it exists."""
        try:
            self._use(open_regular(self.path, os.O_RDWR))
        except FileNotFoundError:
            return False
        self.length = os.fstat(self.descriptor).st_size
        return True

    def _use(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, into: Array) -> None:
        """Read the first bytes of the file; less if it is shorter."""
        if len(into) and self.descriptor >= 0:
            with open(self.descriptor, "rb", closefd=False) as file:
                file.seek(0)
                file.readinto(into.data)

    def write(self, data: Array, offset: int) -> None:
        """Write all bytes at an offset."""
        self._create()
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data[done:].data, offset + done)

    def sync(self) -> None:
        """Write the file to the disk."""
        self._create()
        os.fsync(self.descriptor)

    def _create(self) -> None:
        if self.descriptor < 0:
            self._use(open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            self.created = True


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file without following a link: its directory may be from someone else.

    Raises
    ------
    CheckpointError
        `path` is a symbolic link, has several hard links, or is not a file.
    OSError
        The file cannot be opened.
    """
    wrong = f"{path.name} must be a regular file, not a link; copy the directory without links"
    try:
        safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for its other end
        descriptor = os.open(path, flags | safe, 0o666)
    except OSError as error:
        if error.errno in LINKS:
            raise CheckpointError(wrong) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise CheckpointError(wrong)
    return descriptor


def _runs(units: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, as first and last + 1."""
    ends = np.flatnonzero(np.diff(units) != 1) + 1
    first = units[np.concatenate([[0], ends])] if len(units) else units
    last = units[np.concatenate([ends - 1, [-1]])] + 1 if len(units) else units
    yield from zip(first.tolist(), last.tolist(), strict=True)


def record_of(parts: Parts) -> np.dtype[Any]:
    """Dtype of records with an aligned array for each part, by its number."""
    numbered = [(str(number), *part) for number, part in enumerate(parts)]
    end = ("", np.int64, (0,))  # without elements; it makes the size a multiple of 8
    return np.dtype([*numbered, end], align=True)


TABLE, LOG = "table.safetensors", "log.safetensors"
"""Files for the table's description, and for the changes of a flush before it applies them."""

NAMES = ("rows", "ids", "waiting", "decay")
"""Record files: weight and state of the rows; ids with count and last use; the same for ids that
wait for a row; the deferred decay applied to each row."""

RESIDENT = NAMES[1:]
"""Record files with few bytes per row, which are kept in memory."""

_used: "weakref.WeakSet[Directory]" = weakref.WeakSet()


def _let_parent_release() -> None:
    """Close a forked child's descriptors, which would keep directories locked."""
    for directory in list(_used):
        directory._close()


in_forked_child(_let_parent_release)


class Directory:
    """Files of one table, opened by one process at a time.

    A flush writes the changed records to a log file atomically, then to the record files, then
    removes the log. If the directory has a log when it is opened, that flush did not complete, and
    the log is applied again.

    Parameters
    ----------
    path : str or os.PathLike
        The directory.

    Raises
    ------
    OSError
        The directory cannot be opened.
    CheckpointError
        Another process, or another table in this process, has it open.
    """

    def __init__(self, path: files.PathLike) -> None:
        self.path = Path(path)
        self.files: dict[str, RecordFile] = {}
        self._rows: dict[str, int] = {}
        self._made = False
        self._incomplete = False
        """Whether no flush has completed, or one was interrupted: files may be missing."""
        self._process = os.getpid()
        if not hasattr(mmap, "MAP_PRIVATE") or not hasattr(os, "O_DIRECTORY"):
            raise OSError(f"{self.path}: a table in files needs the mmap of a POSIX system")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _release, descriptor, self._process)
        _used.add(self)
        self._reader: ThreadPoolExecutor | None = None
        self._reading: list[Future[None]] = []
        if files.lock(descriptor, wait=False) is None:
            raise CheckpointError(f"{self.path}: another process or table has it open")

    @classmethod
    def created(cls, path: files.PathLike) -> "Directory":
        """Create a directory for a new table; the first flush creates its files.

        Raises
        ------
        FileExistsError
            `path` exists and is not an empty directory.
        OSError
            The directory cannot be created.
        """
        where = Path(path)
        made = False
        with suppress(FileExistsError):
            where.mkdir()
            made = True
        directory = cls(where) if where.is_dir() else None
        if directory is not None:
            directory._incomplete, directory._made = True, made
            # A process that was killed before its first flush may have left a temporary file.
            if all(files.is_temporary(entry.name, LOG) for entry in where.iterdir()):
                return directory
            directory.close()
        is_table = (where / TABLE).exists() or (where / LOG).exists()
        reason = "a table, EmbeddingTable.open() opens it" if is_table else "no empty directory"
        raise FileExistsError(f"{where} exists and is {reason}")

    def file(self, name: str, size: int, capacity: int) -> RecordFile:
        """Open a file of records of `size` bytes, with room for `capacity` records.

        Raises
        ------
        CheckpointError
            The file is missing, or a link.
        MemoryError
            See :meth:`RecordFile.map`.
        """
        file = self.files.get(name)
        if file is None:
            file = RecordFile(self.path / name, size, name in RESIDENT, self._incomplete)
        file.map(capacity, self._rows.get(name, 0))
        self.files[name] = file
        return file

    @property
    def held(self) -> int:
        """Bytes of file pages that have private copies in memory."""
        return PAGE * sum(file.held for file in self.files.values())

    # Flushes

    def read(self, optimizer: Optimizer | None) -> tuple[Any, Mapping[str, Any]]:
        """Return the table's description, and the records of a flush that did not complete."""
        with read_from(self.path / LOG), suppress(FileNotFoundError):
            tree = self._tree(LOG, optimizer)
            if not isinstance(tree, dict) or tree.keys() != {"table", "changes"}:
                raise CheckpointError("not the log of a table")
            self._incomplete = True
            self._logged = b"".join(chunks(tree["table"]))  # a table changes its optimizer
            return tree["table"], tree["changes"]
        with read_from(self.path / TABLE), suppress(FileNotFoundError):
            return self._tree(TABLE, optimizer), {}
        raise CheckpointError(f"{self.path}: not a table, it has no {TABLE}")

    def _tree(self, name: str, optimizer: Optimizer | None) -> Any:
        with open(open_regular(self.path / name, os.O_RDONLY), "rb") as file:
            return read(file, optimizer)

    def expect(self, rows: Mapping[str, int]) -> None:
        """Set the number of records that :meth:`file` loads from each file."""
        self._rows = dict(rows)

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Change the records in memory like an interrupted flush, whose log has the changes.

        Raises
        ------
        CheckpointError
            The log does not match the files.
        """
        if not self._incomplete:
            return
        if changes.keys() != self.files.keys():
            raise CheckpointError(f"{LOG} is for files {sorted(changes)}")
        for name, file in self.files.items():
            rows, records = changes[name]
            if rows.dtype != np.int64 or records.dtype != np.uint8:
                raise CheckpointError(f"{LOG} must have bytes for {name}")
            if rows.ndim != 1 or records.shape != (len(rows), file.size):
                raise CheckpointError(f"{LOG} must have records of {file.size} bytes for {name}")
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(file.records):
                raise CheckpointError(f"{LOG} has a row of {name} that cannot be")
            new = rows.max(initial=-1) + 1 - file.stored
            if np.count_nonzero(rows >= file.stored) < new:
                raise CheckpointError(f"{LOG} must have {new} new rows of {name}, some are missing")
        for name, file in self.files.items():
            rows, records = changes[name]
            file.grow(int(rows.max(initial=-1)) + 1)
            file.records[rows] = records
            file.mark(rows)
            file.sum()

    def recover(self) -> None:
        """Complete an interrupted flush, after all checks of its log and of the files."""
        if self._incomplete:
            self._write([self._logged])

    def flush(self, table: Mapping[str, Any], logged: Callable[[], None]) -> None:
        """Write all changes and the table's description; call `logged` once the log is on disk.

        Raises
        ------
        OSError
            The changes cannot be written, for instance because the disk is full. If `logged` was
            not called, the files are unchanged; otherwise the next flush, or the next process that
            opens the directory, completes this one.
        """
        if os.getpid() != self._process:
            raise OSError(f"{self.path} was opened by another process, which alone may flush it")
        if not self._close.alive:
            raise OSError(f"{self.path} is closed, and another process may have it open")
        if self._made and self._incomplete:
            files.sync_directory(self.path.absolute().parent)
        self._wait()
        changes = {name: file.changes() for name, file in self.files.items()}
        files.write_atomically(self.path / LOG, chunks({"table": table, "changes": changes}))
        logged()
        del changes
        self._write(chunks(table))

    def _write(self, description: Iterable[bytes | memoryview]) -> None:
        for file in self.files.values():
            file.write()
        files.write_atomically(self.path / TABLE, description)
        (self.path / LOG).unlink(missing_ok=True)
        self._incomplete = False
        for file in self.files.values():
            file.release()

    # Reading ahead

    def prefetch(self, rows: Rows) -> None:
        """Read the pages of rows into memory in a background thread."""
        file = self.files["rows"]
        pages = file.hold(rows)
        self._reading = [future for future in self._reading if not future.done()]
        if self._reader is None or os.getpid() != self._process:
            self._reader = ThreadPoolExecutor(1, "fastopt-prefetch")
        if len(pages):
            self._reading.append(self._reader.submit(_bring, file, pages))

    def _wait(self) -> None:
        """Wait until reading ahead has finished."""
        for future in self._reading:
            future.result()
        self._reading = []

    def discard(self) -> None:
        """Remove what the failed creation of a table made; the log last, with which it opens."""
        for file in self.files.values():
            file.discard()
        for name in (TABLE, LOG):
            (self.path / name).unlink(missing_ok=True)
        self.close()
        if self._made:
            with suppress(OSError):  # another process has put a file there
                self.path.rmdir()

    def close(self) -> None:
        """Release the directory for other processes and tables."""
        if os.getpid() == self._process:
            self._wait()
            if self._reader is not None:
                self._reader.shutdown()
        self._close()


def _release(descriptor: int, process: int) -> None:
    """Unlock and close a directory; a forked child shares the lock, and may not release it."""
    if os.getpid() == process:
        files.unlock(descriptor)
    os.close(descriptor)


def _bring(file: RecordFile, pages: Rows) -> None:
    bring()(file.address, pages)
