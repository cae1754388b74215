"""Index of a table: the row, count and last use of each id."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels import hashing
from fastopt._kernels.compiling import bind
from fastopt._kernels.hashing import BITS, DEAD, FREE, HIGH, HINT, LIVE, NUMBERS
from fastopt._kernels.pages import LARGE, huge_pages, reserved
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt.table.directory import RecordFile, Rows

Ids = NDArray[np.int64]

MOST_ROWS = (1 << 31) - 2
"""Maximum number of rows: a slot holds a row number and a bit that marks removed rows."""

LOAD, GROWTH, SPARE, FEWEST = 0.8, 1.4, 0.9, 1 << 10
"""Largest load factor of the slots; factor by which they grow once rows exceed the fraction SPARE
of that load; and fewest slots. A row takes 24 bytes: 16 for its record, and at most
4 * GROWTH / (LOAD * SPARE) for its slot."""


RECORD = 16
"""Bytes of a row's id, count and last use."""

Use = tuple[int, bool]
"""Step to set as the last use of rows, and whether each occurrence adds 1 to the count."""

THREADED_FROM = 2048
"""Number of ids from which threads find them."""


class Found(NamedTuple):
    """Result of :meth:`RowIndex.find`."""

    rows: Rows
    """Row of each id, -1 for ids without a row."""
    missing: int
    """Number of ids without a row."""


class RowIndex:
    """Hash table from ids to rows, with a count and a last use for each row.

    Rows are numbered in the order of first appearance; rows of removed ids are reused first. No
    result depends on how ids are hashed.

    Parameters
    ----------
    capacity : int
        Maximum number of rows.
    rate : float
        Decay rate of the counts: each step multiplies them by exp(-rate). 0: counts are exact.
    file : RecordFile, optional
        File of the records, RECORD bytes for each row. Default: records are in memory.

    Raises
    ------
    MemoryError
        The address space cannot be reserved.
    """

    def __init__(self, capacity: int, rate: float = 0.0, file: RecordFile | None = None) -> None:
        self.capacity, self.rate, self._file = capacity, rate, file
        records = reserved((capacity, RECORD), np.uint8) if file is None else file.records
        self._records = records
        self.ids: Ids = records.view(np.int64)[:, 0]
        self.counts: NDArray[Any] = records.view(np.float32 if rate else np.uint32)[:, 2]
        self.last: NDArray[np.uint32] = records.view(np.uint32)[:, 3]
        self.numbers = np.zeros(NUMBERS, np.int64)
        self.slots = np.empty(0, np.uint32)
        self._kernels: dict[Any, Any] = {}
        self._make_room(0)

    def __len__(self) -> int:
        return self.numbers.item(LIVE)

    @property
    def high(self) -> int:
        """Number of rows that have ever had an id."""
        return self.numbers.item(HIGH)

    def in_use(self) -> Rows:
        """Rows that have an id, in ascending order."""
        if len(self) == self.high:
            return np.arange(self.high)
        return np.flatnonzero(self.last[: self.high] != FREE)

    def ids_of(self, rows: Rows, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Ids of rows, with their bits viewed as `dtype`."""
        ids: NDArray[Any] = self.ids[rows].view(dtype)
        return ids

    def find(self, ids: Ids) -> Found:
        """Find the rows of ids, which are bits of the ids in one dimension."""
        rows = np.empty(len(ids), np.int64)
        parallel = len(ids) >= THREADED_FROM and may_run_parallel()
        with turn() if parallel else nullcontext():
            arguments = ids, self.slots, self.ids, self.numbers, rows
            missing = self._run(hashing.find, *arguments, of=(parallel,))
        return Found(rows, missing)

    def reserve(self, rows: int) -> None:
        """Make room, so that :meth:`insert` of this many rows does not allocate slots."""
        if rows > int(LOAD * len(self.slots)) - len(self) - self.numbers.item(DEAD):
            self._make_room(len(self) + rows)

    def insert(self, ids: Ids) -> tuple[Rows, Rows]:
        """Create rows for ids that have none; return the row of each id, and the new rows.

        Ids may be repeated. The caller checks the capacity. If it fails, nothing has changed.
        """
        rows, new = np.full(len(ids), -1), np.empty(len(ids), np.int64)
        if self._file is not None:
            self._file.grow(min(self.high + len(ids), self.capacity))
        self.remove(new[:0])  # compiled now, since a failure below needs it
        high, count, done = self.high, 0, 0
        try:
            while done < len(ids):
                limit = int(LOAD * len(self.slots))
                arguments = ids, self.slots, self.ids, self.last, self.numbers, rows, new[count:]
                inserted, done = self._run(hashing.insert, *arguments, limit, done)
                count += inserted
                if done < len(ids):
                    self._make_room(len(self) + 1)
            self._mark(new[:count])
        except BaseException:
            self.withdraw(new[:count], high)
            raise
        return rows, new[:count]

    def remove(self, rows: Rows) -> None:
        """Free distinct rows that have an id."""
        self._run(hashing.remove, rows, self.slots, self.ids, self.last, self.numbers)
        self.counts[rows] = 0
        self._mark(rows)

    def withdraw(self, rows: Rows, high: int) -> None:
        """Undo the last :meth:`insert`, before which :attr:`high` was `high`."""
        self.remove(rows)
        self.numbers[[HIGH, HINT]] = high, min(self.numbers[HINT], high)

    def touch(self, rows: Rows, use: Use) -> None:
        """Record a use of rows; negative numbers are ignored."""
        numbers = np.array([*use, self.rate], np.float64)
        self._run(hashing.touch, rows, self.counts, self.last, numbers)
        self._mark(rows)

    def counts_at(self, rows: Rows | slice, now: int) -> NDArray[Any]:
        """Counts of rows, decayed to step `now`."""
        counts: NDArray[Any] = self.counts[rows]
        if not self.rate:
            return counts.astype(np.int64)
        age = np.maximum(now - self.last[rows].astype(np.float64), 0)  # 0 for free rows
        return counts * np.exp(-self.rate * age)

    def fill(self, ids: Ids, counts: NDArray[Any], last: NDArray[np.uint32]) -> None:
        """Load the records of the first rows; a last use of FREE marks a free row."""
        high = len(ids)
        if self._file is not None:
            self._file.grow(high)
        self.ids[:high], self.counts[:high], self.last[:high] = ids, counts, last
        self._mark(np.arange(high))
        self.begin(high)

    def begin(self, high: int) -> None:
        """Rebuild the hash table from the records of the first `high` rows."""
        free = int(np.count_nonzero(self.last[:high] == FREE))
        self.numbers[[LIVE, HIGH, HINT, DEAD]] = high - free, high, 0, 0
        self._make_room(high)

    def _make_room(self, rows: int) -> None:
        """Rebuild the slots, with room for `rows` rows and without the slots of removed ones."""
        needed, size = max(rows, self.high), max(len(self.slots), FEWEST)
        if max(needed, rows / SPARE) > LOAD * size:
            size = max(int(size * GROWTH), int(needed / LOAD) + 1)
        if self._records[:size].nbytes >= LARGE:
            huge_pages(self._records)
        slots, numbers = np.zeros(size, np.uint32), self.numbers.copy()
        numbers[BITS] = int(LOAD * size + 2).bit_length()
        if self.high:
            self._run(hashing.place, slots, self.ids, self.last, numbers)
        self.slots, self.numbers = slots, numbers

    def _mark(self, rows: Rows) -> None:
        """Mark records as changed in the file, if there is one; negative numbers are ignored."""
        if self._file is not None:
            self._file.mark(rows[rows >= 0])

    def _run(self, factory: Any, *arguments: object, of: tuple[bool, ...] = ()) -> Any:
        kernel = self._kernels.get((factory, of))
        if kernel is None:
            kernel = self._kernels[factory, of] = bind(factory(*of), *arguments)
        return kernel(*arguments)
