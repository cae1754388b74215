"""Ids of rows: which id has which row, how often each was used, and when last."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import hashing
from fastopt.kernels.compiling import bind
from fastopt.kernels.hashing import BITS, DEAD, FREE, HIGH, HINT, LIVE, NUMBERS
from fastopt.kernels.pages import LARGE, huge_pages, reserved
from fastopt.table.records import RecordFile, Rows

__all__ = ["MOST_ROWS", "RECORD", "Ids", "RowIndex", "Rows"]

Ids = NDArray[np.int64]

MOST_ROWS = (1 << 31) - 2
"""Rows whose numbers fit into a slot besides a bit for rows that are gone."""

LOAD, GROWTH, SPARE, FEWEST = 0.8, 1.4, 0.9, 1 << 10
"""Share of slots that may be used, by how much they grow where rows would take more than the third
number of that share, and how many there are at least. A row takes 24 bytes: 16 of its own, and at
most 4 * GROWTH / (LOAD * SPARE) for its slot."""


RECORD = 16
"""Bytes of a row's id, count and last use."""

Use = Any
Array = np.ndarray[Any, Any]

UNUSED = -1, False


class Found(NamedTuple):
    """What :meth:`RowIndex.find` has found."""

    rows: Rows
    """Row of each id, -1 where it has none."""
    missing: int
    """How many have none."""
    before: Array
    """Count and last use of each before, until the next call."""


class RowIndex:
    """Rows of ids: a hash table with a count and a last use for each row.

    Rows are numbered in the order of first appearance; a row whose id was removed is given to a new
    id before any later one. Nothing depends on how ids are hashed.

    Parameters
    ----------
    capacity : int
        Most rows.
    rate : float
        Share of the logarithm that counts lose in each step; 0: counts are exact.
    file : RecordFile, optional
        Where the ids are, with RECORD bytes for each. Default: in memory.

    Raises
    ------
    MemoryError
        So many addresses cannot be reserved.
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
        self._before = np.empty((0, 2))
        self._make_room(0)

    def __len__(self) -> int:
        return self.numbers.item(LIVE)

    @property
    def high(self) -> int:
        """Number of rows that have had an id."""
        return self.numbers.item(HIGH)

    def in_use(self) -> Rows:
        """Rows that have an id, in ascending order."""
        if len(self) == self.high:
            return np.arange(self.high)
        return np.flatnonzero(self.last[: self.high] != FREE)

    def ids_of(self, rows: Rows, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Ids of rows, whose bits are those of this dtype."""
        ids: NDArray[Any] = self.ids[rows].view(dtype)
        return ids

    def find(self, ids: Ids, use: Use = UNUSED) -> Found:
        """Find the rows of ids.

        Parameters
        ----------
        ids : numpy.ndarray
            Bits of the ids, in one dimension.
        use : tuple of (now, counted)
            Last use of the rows from now on, and whether each occurrence adds 1 to the count.
            Default: they are not used.
        """
        rows = np.empty(len(ids), np.int64)
        if len(self._before) < len(ids):
            self._before = np.empty((len(ids), 2))  # which takes long where pages are new
        before = self._before[: len(ids)]
        arguments = ids, self.slots, self.ids, self.counts, self.last, self.numbers, rows, before
        use = np.array([*use, self.rate], np.float64)
        missing = self._run(hashing.find, *arguments, use)
        if use[0] >= 0:
            self._mark(rows)
        return Found(rows, missing, before)

    def unuse(self, found: Found) -> None:
        """Forget the use of rows by :meth:`find`, before which nothing else has used them."""
        known = np.flatnonzero(found.rows >= 0)[::-1]  # the first use of a row is undone last
        rows, before = found.rows[known], found.before[known]
        self.counts[rows] = before[:, 0]
        self.last[rows] = before[:, 1]

    def insert(self, ids: Ids) -> tuple[Rows, Rows]:
        """Give ids without a row one, for which there is capacity; return their and the new rows.

        An id may be repeated.
        """
        rows, new = np.full(len(ids), -1), np.empty(len(ids), np.int64)
        if self._file is not None:
            self._file.grow(min(self.high + len(ids), self.capacity))
        count = done = 0
        while done < len(ids):
            limit = int(LOAD * len(self.slots))
            arguments = ids, self.slots, self.ids, self.last, self.numbers, rows, new[count:]
            made, done = self._run(hashing.insert, *arguments, limit, done)
            count += made
            if done < len(ids):
                self._make_room(len(self) + 1)
        self._mark(new[:count])
        return rows, new[:count]

    def remove(self, rows: Rows) -> None:
        """Free different rows that have an id."""
        self._run(hashing.remove, rows, self.slots, self.ids, self.last, self.numbers)
        self.counts[rows] = 0
        self._mark(rows)

    def withdraw(self, rows: Rows, high: int) -> None:
        """Free the rows of the last :meth:`insert`, before which there were `high` rows."""
        self.remove(rows)
        self.numbers[[HIGH, HINT]] = high, min(self.numbers[HINT], high)

    def touch(self, rows: Rows, use: Use) -> None:
        """Use rows, see :meth:`find`; negative ones are left out."""
        use = np.array([*use, self.rate], np.float64)
        self._run(hashing.touch, rows, self.counts, self.last, use)
        self._mark(rows)

    def counts_at(self, rows: Rows | slice, now: int) -> NDArray[Any]:
        """Counts of rows, as they have decayed until `now`."""
        counts: NDArray[Any] = self.counts[rows]
        if not self.rate:
            return counts.astype(np.int64)
        age = np.maximum(now - self.last[rows].astype(np.float64), 0)  # of free rows too
        return counts * np.exp(-self.rate * age)

    def fill(self, ids: Ids, counts: NDArray[Any], last: NDArray[np.uint32]) -> None:
        """Take over the records of rows from 0 on; a last use of FREE marks a free row."""
        high = len(ids)
        self.ids[:high], self.counts[:high], self.last[:high] = ids, counts, last
        self.begin(high)

    def begin(self, high: int) -> None:
        """Go on from the records of rows below `high`, which are there."""
        free = int(np.count_nonzero(self.last[:high] == FREE))
        self.numbers[[LIVE, HIGH, HINT, DEAD]] = high - free, high, 0, 0
        self._make_room(high)

    def _make_room(self, rows: int) -> None:
        """Make slots for `rows` rows with an id, or drop those of rows that are gone."""
        needed, size = max(rows, self.high), max(len(self.slots), FEWEST)
        if max(needed, rows / SPARE) > LOAD * size:
            size = max(int(size * GROWTH), int(needed / LOAD) + 1)
        if self._records[:size].nbytes >= LARGE:
            huge_pages(self._records)
        slots = np.zeros(size, np.uint32)
        self.numbers[BITS] = int(LOAD * size + 2).bit_length()
        self.slots = slots
        if self.high:
            self._run(hashing.place, self.slots, self.ids, self.last, self.numbers)

    def _mark(self, rows: Rows) -> None:
        """Have a file count rows as changed; negative numbers are left out."""
        if self._file is not None:
            self._file.mark(rows[rows >= 0])

    def _run(self, factory: Any, *arguments: Any) -> Any:
        kernel = self._kernels.get(factory)
        if kernel is None:
            kernel = self._kernels[factory] = bind(factory(), *arguments)
        return kernel(*arguments)
