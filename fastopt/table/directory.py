"""Directory of a table in files: record files, and atomic flushes through a log."""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastopt._kernels.paging import PAGE, bring
from fastopt._kernels.threads import in_forked_child
from fastopt.checkpoint.format.errors import CheckpointError, read_from
from fastopt.checkpoint.format.files import (
    PathLike,
    is_temporary,
    lock,
    sync_directory,
    unlock,
    write_atomically,
)
from fastopt.checkpoint.format.tree import chunks, read
from fastopt.optimizer import Optimizer
from fastopt.table.records import RecordFile, Rows, open_regular

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

    def __init__(self, path: PathLike) -> None:
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
        if lock(descriptor, wait=False) is None:
            raise CheckpointError(f"{self.path}: another process or table has it open")

    @classmethod
    def created(cls, path: PathLike) -> "Directory":
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
            if all(is_temporary(entry.name, LOG) for entry in where.iterdir()):
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
            sync_directory(self.path.absolute().parent)
        self._wait()
        changes = {name: file.changes() for name, file in self.files.items()}
        write_atomically(self.path / LOG, chunks({"table": table, "changes": changes}))
        logged()
        del changes
        self._write(chunks(table))

    def _write(self, description: Iterable[bytes | memoryview]) -> None:
        for file in self.files.values():
            file.write()
        write_atomically(self.path / TABLE, description)
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
        unlock(descriptor)
    os.close(descriptor)


def _bring(file: RecordFile, pages: Rows) -> None:
    bring()(file.address, pages)
