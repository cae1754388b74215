"""Directory of a table in files: record files, and atomic flushes through a log."""

import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastopt._kernels.paging import PAGE, bring
from fastopt.checkpoint.errors import CheckpointError, read_from
from fastopt.checkpoint.files import PathLike, lock, write_atomically
from fastopt.checkpoint.tree import chunks, read
from fastopt.optimizer import Optimizer
from fastopt.table.records import SUMS, RecordFile, Rows

__all__ = ["Directory"]

TABLE, LOG = "table.safetensors", "log.safetensors"
"""Files for the table's description, and for the changes of a flush before it applies them."""

NAMES = ("rows", "ids", "waiting", "decay")
"""Record files: weight and state of the rows; ids with count and last use; the same for ids that
wait for a row; the deferred decay applied to each row."""

RESIDENT = NAMES[1:]
"""Record files with few bytes per row, which are kept in memory."""


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
        self._new = False
        self._process = os.getpid()
        if not hasattr(mmap, "MAP_PRIVATE") or not hasattr(os, "O_DIRECTORY"):
            raise OSError(f"{self.path}: a table in files needs the mmap of a POSIX system")
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._reader: ThreadPoolExecutor | None = None
        self._reading: list[Future[None]] = []
        if lock(self._descriptor, wait=False) is None:
            raise CheckpointError(f"{self.path}: another process or table has it open")

    @classmethod
    def created(cls, path: PathLike) -> "Directory":
        """Create a directory for a new table.

        Raises
        ------
        FileExistsError
            `path` exists and is not an empty directory.
        OSError
            The directory cannot be created.
        """
        where = Path(path)
        with suppress(FileExistsError):
            where.mkdir()
        directory = cls(where) if where.is_dir() else None
        if directory is not None:
            names = {entry.name for entry in where.iterdir()}
            parts = {LOG, *(f"{name}{end}" for name in NAMES for end in ("", SUMS))}
            if all(name in parts or name.endswith(".tmp") for name in names):
                for name in names:  # left by a process that was killed while it created a table
                    (where / name).unlink()
                directory._new = True
                return directory
            directory.close()
        is_table = (where / TABLE).exists()
        reason = "a table, EmbeddingTable.open() opens it" if is_table else "no empty directory"
        raise FileExistsError(f"{where} exists and is {reason}")

    def file(self, name: str, size: int, capacity: int) -> RecordFile:
        """Open a file of records of `size` bytes, mapped for `capacity` records.

        Raises
        ------
        CheckpointError
            The file is missing, or too short.
        MemoryError
            See :meth:`RecordFile.map`.
        """
        try:
            file = RecordFile(self.path / name, size, self._new, name in RESIDENT)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: {name} or {name}{SUMS} is missing") from None
        if name in self._rows:
            with read_from(self.path):
                file.check_length(self._rows[name])
        file.map(capacity)
        self.files[name] = file
        return file

    @property
    def held(self) -> int:
        """Bytes of file pages that have private copies in memory."""
        return PAGE * sum(file.held for file in self.files.values())

    # Flushes

    def read(self, optimizer: Optimizer | None) -> tuple[Any, Mapping[str, Any]]:
        """Return the table's description, and the records of a flush that did not complete."""
        log = self.path / LOG
        if log.exists():
            with read_from(log), open(log, "rb") as file:
                tree = read(file, optimizer)
                if not isinstance(tree, dict) or tree.keys() != {"table", "changes"}:
                    raise CheckpointError("not the log of a table")
                return tree["table"], tree["changes"]
        table = self.path / TABLE
        if not table.exists():
            raise CheckpointError(f"{self.path}: not a table, it has no {TABLE}")
        with read_from(table), open(table, "rb") as file:
            return read(file, optimizer), {}

    def expect(self, rows: Mapping[str, int]) -> None:
        """Set the number of records that :meth:`file` requires; used if no log will add records."""
        self._rows = dict(rows)

    def apply(self, table: Any, changes: Mapping[str, Any]) -> None:
        """Write the records of a log to their files, after the table's description was checked.

        Raises
        ------
        CheckpointError
            The log does not match the files.
        """
        if not changes:
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
        for name, file in self.files.items():
            rows, records = changes[name]
            file.grow(int(rows.max(initial=0)) + 1)
            file.records[rows] = records
            file.mark(rows)
        self._write(table)

    def flush(self, table: Any, logged: Callable[[], None]) -> None:
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
        self._wait()
        changes = {name: file.changes() for name, file in self.files.items()}
        write_atomically(self.path / LOG, chunks({"table": table, "changes": changes}))
        logged()
        del changes
        self._write(table)

    def _write(self, table: Any) -> None:
        for file in self.files.values():
            file.write()
        write_atomically(self.path / TABLE, chunks(table))
        (self.path / LOG).unlink(missing_ok=True)
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
        """Remove the directory of a table whose creation failed."""
        self.close()
        for entry in [*self.path.iterdir()]:
            entry.unlink()
        self.path.rmdir()

    def close(self) -> None:
        """Release the directory for other processes and tables."""
        if os.getpid() == self._process:
            self._wait()
            if self._reader is not None:
                self._reader.shutdown()
        self._close()


def _bring(file: RecordFile, pages: Any) -> None:
    bring()(file.address, pages)
