"""Ids of rows: which id has which row, how often each was used, and when last."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import hashing
from fastopt.kernels.compiling import bind
from fastopt.kernels.hashing import BITS, DEAD, FREE, HIGH, HINT, LIVE, NUMBERS
from fastopt.kernels.pages import reserved

__all__ = ["MOST_ROWS", "Ids", "RowIndex", "Rows"]

Ids = NDArray[np.int64]
Rows = NDArray[np.int64]

MOST_ROWS = (1 << 31) - 2
"""Rows whose numbers fit into a slot besides a bit for rows that are gone."""

LOAD, GROWTH, SPARE, FEWEST = 0.8, 1.4, 0.9, 1 << 10
"""Share of slots that may be used, by how much they grow where rows would take more than the third
number of that share, and how many there are at least. A row takes 24 bytes: 16 of its own, and at
most 4 * GROWTH / (LOAD * SPARE) for its slot."""


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

    Raises
    ------
    MemoryError
        So many addresses cannot be reserved.
    """

    def __init__(self, capacity: int, rate: float = 0.0) -> None:
        self.capacity, self.rate = capacity, rate
        records = reserved((capacity, 16), np.uint8)
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

    def find(self, ids: Ids) -> tuple[Rows, int]:
        """Row of each id, -1 where it has none; and how many have none."""
        rows = np.empty(len(ids), np.int64)
        missing = self._run(hashing.find, ids, self.slots, self.ids, self.numbers, rows)
        return rows, missing

    def insert(self, ids: Ids, rows: Rows, missing: int) -> Rows:
        """Give ids whose entry in `rows` is -1 a row; return the new rows.

        `missing` is the number of these entries, and there is capacity for them.
        """
        if len(self) + self.numbers.item(DEAD) + missing > LOAD * len(self.slots):
            distinct = len(np.unique(ids[rows < 0]))
            if len(self) + self.numbers.item(DEAD) + distinct > LOAD * len(self.slots):
                self._make_room(len(self) + distinct)
        new = np.empty(missing, np.int64)
        arguments = ids, self.slots, self.ids, self.last, self.numbers, rows, new
        return new[: self._run(hashing.insert, *arguments)]

    def remove(self, rows: Rows) -> None:
        """Free different rows that have an id."""
        self._run(hashing.remove, rows, self.slots, self.ids, self.last, self.numbers)
        self.counts[rows] = 0

    def withdraw(self, rows: Rows, high: int) -> None:
        """Free the rows of the last :meth:`insert`, before which there were `high` rows."""
        self.remove(rows)
        self.numbers[[HIGH, HINT]] = high, min(self.numbers[HINT], high)

    def touch(self, rows: Rows, now: int, counted: bool) -> None:
        """Set the last use of rows; each occurrence adds 1 to the count if it is `counted`."""
        if counted:
            arguments = rows, self.counts, self.last, now, self.rate
            self._run(hashing.touch, *arguments)
        else:
            self.last[rows] = now

    def counts_at(self, rows: Rows, now: int) -> NDArray[Any]:
        """Counts of rows, as they have decayed until `now`."""
        counts: NDArray[Any] = self.counts[rows]
        if not self.rate:
            return counts.astype(np.int64)
        return counts * np.exp(-self.rate * (now - self.last[rows].astype(np.float64)))

    def fill(self, ids: Ids, counts: NDArray[Any], last: NDArray[np.uint32]) -> None:
        """Take over the records of rows from 0 on; a last use of FREE marks a free row."""
        high, free = len(ids), int((last == FREE).sum())
        self.ids[:high], self.counts[:high], self.last[:high] = ids, counts, last
        self.numbers[[LIVE, HIGH, HINT, DEAD]] = high - free, high, 0, 0
        self._make_room(high)

    def _make_room(self, rows: int) -> None:
        """Make slots for `rows` rows with an id, or drop those of rows that are gone."""
        needed, size = max(rows, self.high), max(len(self.slots), FEWEST)
        if max(needed, rows / SPARE) > LOAD * size:
            size = max(int(size * GROWTH), int(needed / LOAD) + 1)
        slots = np.zeros(size, np.uint32)
        self.numbers[BITS] = int(LOAD * size + 2).bit_length()
        self.slots = slots
        if self.high:
            self._run(hashing.place, self.slots, self.ids, self.last, self.numbers)

    def _run(self, factory: Any, *arguments: Any) -> Any:
        kernel = self._kernels.get(factory)
        if kernel is None:
            kernel = self._kernels[factory] = bind(factory(), *arguments)
        return kernel(*arguments)
