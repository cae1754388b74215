"""A table's directory: files of records, and what is written whole or not at all."""

import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastopt.checkpoint.errors import CheckpointError, read_from
from fastopt.checkpoint.files import PathLike, lock, write_atomically
from fastopt.checkpoint.tree import chunks, read
from fastopt.kernels.paging import PAGE, bring
from fastopt.optimizer import Optimizer
from fastopt.table.records import SUMS, RecordFile, Rows

__all__ = ["Directory"]

TABLE, LOG = "table.safetensors", "log.safetensors"
"""Files with the description of the table, and with all that a flush is going to change."""

NAMES = ("rows", "ids", "waiting", "decay")
"""Files of records: weight and state of rows, ids with count and last use, those of ids that wait
for a row, and the deferred decay applied to rows."""

RESIDENT = NAMES[1:]
"""Those of a few bytes for each row, which are in memory."""


class Directory:
    """Files of one table, which one process has open at a time.

    A flush writes the changed records to a log, which appears as a whole; then it changes the files
    of records; then the log goes. A log that is found belongs to a flush that did not come to its
    end, and is applied again.

    Parameters
    ----------
    path : str or os.PathLike
        The directory.

    Raises
    ------
    OSError
        It cannot be opened.
    CheckpointError
        Another process, or another table of this one, has it open.
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
        """New directory for a table.

        Raises
        ------
        FileExistsError
            There is something else, or a table.
        OSError
            It cannot be made.
        """
        where = Path(path)
        with suppress(FileExistsError):
            where.mkdir()
        made = cls(where) if where.is_dir() else None
        if made is not None:
            names = {entry.name for entry in where.iterdir()}
            parts = {LOG, *(f"{name}{end}" for name in NAMES for end in ("", SUMS))}
            if all(name in parts or name.endswith(".tmp") for name in names):
                for name in names:  # of a process that was killed before there was a table
                    (where / name).unlink()
                made._new = True
                return made
            made.close()
        is_table = (where / TABLE).exists()
        words = "a table, EmbeddingTable.open() opens it" if is_table else "no empty directory"
        raise FileExistsError(f"{where} exists and is {words}")

    def file(self, name: str, size: int, capacity: int) -> RecordFile:
        """File with records of that size, mapped for so many of them.

        Raises
        ------
        CheckpointError
            It is missing, or too short.
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
        """Bytes of pages that have copies in memory."""
        return PAGE * sum(file.held for file in self.files.values())

    # Flushes

    def read(self, optimizer: Optimizer | None) -> tuple[Any, Mapping[str, Any]]:
        """Description of the table, and the records that a flush has not come to write."""
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
        """Have :meth:`file` check that there are so many records, where no log will add some."""
        self._rows = dict(rows)

    def apply(self, table: Any, changes: Mapping[str, Any]) -> None:
        """Write the records of a log to their files, once the table's description is checked.

        Raises
        ------
        CheckpointError
            They are not records of these files.
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
        """Write all changes, and the description of the table; call `logged` when they are safe.

        Raises
        ------
        OSError
            They cannot be written: the disk is full. If `logged` was not called, the files are as
            they were; else the next flush, or whoever opens the directory, ends this one.
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
        """Have a thread bring the pages of rows to memory."""
        file = self.files["rows"]
        pages = file.hold(rows)
        self._reading = [future for future in self._reading if not future.done()]
        if self._reader is None or os.getpid() != self._process:
            self._reader = ThreadPoolExecutor(1, "fastopt-prefetch")
        if len(pages):
            self._reading.append(self._reader.submit(_bring, file, pages))

    def _wait(self) -> None:
        """Wait for threads that read ahead."""
        for future in self._reading:
            future.result()
        self._reading = []

    def discard(self) -> None:
        """Remove the files of a table that has not come to be."""
        self.close()
        for entry in [*self.path.iterdir()]:
            entry.unlink()
        self.path.rmdir()

    def close(self) -> None:
        """Let others open the directory."""
        if os.getpid() == self._process:
            self._wait()
            if self._reader is not None:
                self._reader.shutdown()
        self._close()


def _bring(file: RecordFile, pages: Any) -> None:
    bring()(file.address, pages)
