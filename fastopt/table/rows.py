"""The rows of a table's ids: found, created, updated, and written to its files.

Tests: ``tests/table/``.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastopt._engine.validate import converted, is_half
from fastopt._interrupts import uninterrupted
from fastopt._kernels.hashing import FREE
from fastopt._kernels.threads import start_locks
from fastopt._updater.updater import Updater
from fastopt.arguments import brief
from fastopt.optimizer import Optimizer
from fastopt.sparse import RowSparse
from fastopt.table.access import Access
from fastopt.table.directory import Directory
from fastopt.table.index import MOST_ROWS, RECORD, Ids, RowIndex
from fastopt.table.records import Array, RecordFile, Rows
from fastopt.table.saved import FORMAT
from fastopt.table.start import Init, Start
from fastopt.table.storage import Storage

FEWEST = 1 << 16
"""Fewest rows to reserve if `capacity` is not given."""

LAST_STEP = int(FREE) - 1


class TableRows:
    """Abstract base of :class:`EmbeddingTable`: what its methods do with checked arguments."""

    buffer_bytes: int
    _index: RowIndex
    _storage: Storage
    _waiting: RowIndex | None
    """Ids that have appeared fewer than `min_count` times."""

    def _begin(
        self,
        name: str,
        dim: int,
        optimizer: Optimizer,
        dtype: np.dtype[Any],
        start: Start,
        capacity: int | None,
        min_count: int,
        half_life: float | None,
        directory: Directory | None = None,
    ) -> None:
        """Set the attributes from checked arguments, and reserve the rows."""
        self._directory, self.flushes = directory, 0
        self.name, self.dim, self.dtype, self.min_count = name, dim, dtype, min_count
        self.half_life, self._start, self._limit = half_life, start, capacity
        start_locks(self)
        self._updater = Updater(optimizer)
        optimizer = self._updater.optimizer
        self._access = Access(name)
        self.step = 0
        self._keys: np.dtype[Any] | None = None
        rate = math.log(2) / half_life if half_life else 0.0

        def reserve(rows: int) -> tuple[RowIndex, Storage, RowIndex | None]:
            if directory is None:
                index, waits = RowIndex(rows, rate), min_count > 1
                waiting = RowIndex(rows, rate) if waits else None
                return index, Storage(name, optimizer, rows, dim, dtype), waiting

            def file(of: str, size: int) -> RecordFile:
                return directory.file(of, size, rows)

            waiting = RowIndex(rows, rate, file("waiting", RECORD)) if min_count > 1 else None
            index = RowIndex(rows, rate, file("ids", RECORD))
            return index, Storage(name, optimizer, rows, dim, dtype, file), waiting

        self._index, self._storage, self._waiting = _granted(capacity, reserve)
        self.capacity = self._index.capacity
        self._grow(1)

    def _start_locks(self) -> None:
        self.lock = threading.RLock()

    # Arguments

    def _checked_ids(
        self, ids: ArrayLike, argument: str = "ids"
    ) -> tuple[Ids, tuple[int, ...], np.dtype[Any]]:
        """Check ids; return their bits as a flat int64 array, their shape, and the id dtype."""
        context = f"table {self.name!r}: {argument}"
        if isinstance(ids, np.ma.MaskedArray):
            raise TypeError(f"{context} must be an array without a mask, got a MaskedArray")
        try:
            array = np.asarray(ids)
        except ValueError:
            raise TypeError(f"{context} must be an array of integers, got {brief(ids)}") from None
        if not (isinstance(ids, np.ndarray) or array.size):
            array = array.astype(np.int64)  # NumPy converts an empty list to float64
        if array.dtype.kind not in "iu":
            got = brief(ids) if array.dtype == object else array.dtype
            raise TypeError(f"{context} must be integers of at most 64 bits, got {got}")
        keys = self._keys or np.dtype(np.uint64 if array.dtype == np.uint64 else np.int64)
        flat = np.ascontiguousarray(array, keys).reshape(-1)  # first, as it may not fit into memory
        if array.size and array.dtype.kind != keys.kind:
            bounds = np.iinfo(keys)
            wrong = array.min() if keys.kind == "u" else array.max()
            if not bounds.min <= int(wrong) <= bounds.max:
                raise ValueError(f"{context} must fit into the table's {keys}, got {wrong}")
        return flat.view(np.int64), array.shape, keys

    def _checked_update(self, ids: ArrayLike, grads: ArrayLike) -> tuple[Ids, np.dtype[Any], Array]:
        """Check the arguments of :meth:`update`, and return those of :meth:`_update`."""
        bits, shape, keys = self._checked_ids(ids)
        context = f"table {self.name!r}: grads"
        if isinstance(grads, np.ma.MaskedArray):
            raise TypeError(f"{context} must be an array without a mask, got a MaskedArray")
        array = np.asarray(grads)
        takes = [self.dtype.name] + ["float32"] * is_half(self._storage.weight)
        if array.dtype.name not in takes or not array.dtype.isnative:
            array = converted(context, array, array.dtype, self._storage.weight, takes)
        if array.shape != (*shape, self.dim):
            raise ValueError(f"{context} must have shape {(*shape, self.dim)}, got {array.shape}")
        return bits, keys, array.reshape(-1, self.dim)

    def _rows_of(self, ids: ArrayLike | None) -> tuple[Rows, tuple[int, ...]]:
        """Row numbers of ids, by default of all ids, and their shape."""
        if ids is None:
            rows = self._index.in_use()
            return rows, rows.shape
        bits, shape, _ = self._checked_ids(ids)
        return self._index.find(bits).rows, shape

    # Rows

    def _lookup(self, ids: ArrayLike, create: bool) -> Array:
        bits, shape, keys = self._checked_ids(ids)
        rows = self._rows(bits, keys, create)
        return self._storage.taken(rows).reshape((*shape, self.dim))

    def _rows(self, ids: Ids, keys: np.dtype[Any], create: bool) -> Rows:
        """Row numbers of ids; with `create`, also create rows and record the use."""
        index = self._index
        if self._directory is not None and self._directory.held > self.buffer_bytes:
            self._commit()
        with uninterrupted:
            rows, missing = index.find(ids)
            if not create:
                return rows
            if missing:
                absent = np.flatnonzero(rows < 0)
                rows[absent] = self._created(ids[absent], keys)
            index.touch(rows, (self.step, True))
            self._keys = keys
        return rows

    def _update(self, ids: Ids, keys: np.dtype[Any], grads: Array) -> None:
        """Update rows with checked gradients."""
        index, step = self._index, min(self.step + 1, LAST_STEP)
        if self._directory is not None and self._directory.held > self.buffer_bytes:
            self._commit()
        with uninterrupted:
            (rows, missing), high = index.find(ids), index.high
            new = rows[:0]
            try:
                if missing and self.min_count == 1:
                    absent = np.flatnonzero(rows < 0)
                    rows[absent], new = self._insert(ids[absent], keys)
                elif missing:
                    rows, grads = rows[rows >= 0], grads[rows >= 0]
                grad = RowSparse(grads, rows, self._view.shape)
                self._storage.mark(rows)
                self._updater(self.name, grad, self._view)
            except BaseException:
                if len(new):
                    self._withdraw(new, high)
                raise
            index.touch(rows, (step, False))
            self.step, self._keys = step, keys

    def _created(self, ids: Ids, keys: np.dtype[Any]) -> Rows:
        """Create rows for ids that have none; -1 for ids below `min_count`."""
        if self._waiting is not None:
            return self._admit(self._waiting, ids, keys)
        return self._insert(ids, keys)[0]

    def _insert(self, ids: Ids, keys: np.dtype[Any]) -> tuple[Rows, Rows]:
        """Create rows, with weight and state; return the row of each id, and the new rows."""
        index, high = self._index, self._index.high
        self._check_room(ids)
        with naming(self.name):
            values = self._computed(ids, keys)
            rows, new = index.insert(ids)
            try:
                self._grow(index.high)
                self._storage.start(new, index.ids[new], self._start, values)
            except BaseException:
                self._withdraw(new, high)
                raise
        return rows, new

    def _computed(self, ids: Ids, keys: np.dtype[Any]) -> Array | None:
        """Initial values of distinct new ids from the user's function, if there is one."""
        if self._start.function is None:
            return None
        distinct = ids[np.sort(np.unique(ids, return_index=True)[1])]
        with self._access.in_function():
            return self._start.computed(distinct.view(keys), self.dim, self.dtype)

    def _withdraw(self, new: Rows, high: int) -> None:
        self._storage.clear(new)
        self._index.withdraw(new, high)

    def _check_room(self, ids: Ids) -> None:
        """Raise ValueError if the ids, none of which has a row, need more than `capacity` rows."""
        if len(self._index) + len(ids) > self.capacity:
            needed = len(self._index) + len(np.unique(ids))
            if needed > self.capacity:
                raise ValueError(
                    f"table {self.name!r}: ids need {needed} rows, and capacity is {self.capacity}"
                )

    def _admit(self, waiting: RowIndex, ids: Ids, keys: np.dtype[Any]) -> Rows:
        """Count ids without a row, and create rows for those that reach `min_count`."""
        found = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        distinct, first, inverse, times = found
        places, unknown = waiting.find(distinct)
        before = waiting.counts_at(np.maximum(places, 0), self.step)
        before[places < 0] = 0
        waits = before + times < self.min_count
        chosen = np.flatnonzero(~waits)
        chosen = chosen[np.argsort(first[chosen])]
        if len(waiting) + unknown > waiting.capacity:
            raise ValueError(
                f"table {self.name!r}: {len(waiting) + unknown} ids wait for a row, and capacity "
                f"is {waiting.capacity}"
            )
        rows, left = np.full(len(distinct), -1), ids[waits[inverse]]
        absent = places[inverse][waits[inverse]] < 0
        waiting.reserve(int((waits & (places < 0)).sum()))  # may fail: before rows are created
        if len(chosen):
            own, _ = self._insert(distinct[chosen], keys)
            rows[chosen] = own
            self._index.counts[own], self._index.last[own] = before[chosen], self.step
            waiting.remove(places[chosen][places[chosen] >= 0])
        if len(left):
            waiting.insert(left[absent])
            waiting.touch(waiting.find(left).rows, (self.step, True))
        return rows[inverse]

    def _unused(self, index: RowIndex, unused_for: int | None, count_below: float | None) -> Rows:
        """Rows that meet the conditions, in ascending order."""
        last = index.last[: index.high]
        chosen = last != FREE
        if unused_for is not None:
            chosen &= last <= self.step - unused_for
        if count_below is not None and index.rate:
            chosen &= index.counts_at(slice(index.high), self.step) < count_below
        elif count_below is not None:
            chosen &= index.counts[: index.high] < count_below
        return np.flatnonzero(chosen)

    def _decay_all(self) -> None:
        """Apply deferred decay to all rows."""
        storage = self._storage
        if self._directory is None:
            self._updater._flush(self.name, self._view)
            return
        height, storage.height = storage.height, max(storage.used, 1)
        self._show()  # rows that were never used are not in the file
        try:
            storage.mark(np.arange(storage.height))
            self._updater._flush(self.name, self._view)
        finally:
            storage.height = height
            self._show()

    # Memory and files

    def _commit(self) -> None:
        """Write the changes of a table in files."""
        if self._directory is not None:
            with uninterrupted, self._access.to_flush(), self._updater.lock:
                self._directory.flush(self._description(), self._logged)

    def _description(self) -> dict[str, Any]:
        """Fields of a table in files except its records, for the next flush."""
        storage, waiting = self._storage, self._waiting
        decay = self._updater.optimizer.row_decay.get(self.name)
        return self._settings() | {
            "flushes": self.flushes + 1,
            "high": self._index.high,
            "used": max(storage.used, self._index.high),
            "waiting": None if waiting is None else waiting.high,
            "decay": None if storage.decay is None or decay is None else decay[1],
            "record": [[dtype.name, list(shape)] for dtype, shape in storage.parts],
        }

    def _settings(self, init: Init | None = None) -> dict[str, Any]:
        """Fields of both kinds of tables: arguments, step and optimizer."""
        return {
            "embedding_table": FORMAT,
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype.name,
            "init": self._start.text if init is None else init,
            "seed": self._start.seed,
            "capacity": self._limit,
            "min_count": self.min_count,
            "half_life": self.half_life,
            "id_dtype": None if self._keys is None else self._keys.name,
            "step": self.step,
            "optimizer": _alone(self._updater.optimizer),
        }

    def _logged(self) -> None:
        self.flushes += 1

    def _grow(self, rows: int) -> None:
        """Extend the updater's view of weight and state to at least `rows` rows."""
        if self._storage.grow(rows):
            self._show()

    def _show(self) -> None:
        """Pass views of weight and state up to the current height to the updater."""
        storage, optimizer = self._storage, self._updater.optimizer
        self._view = storage.weight[: storage.height]
        self._updater.states[self.name] = storage.state()
        self._updater.states_synced[self.name] = True
        if storage.decay is not None:
            total = optimizer.row_decay.get(self.name, (None, 0.0))[1]
            optimizer.row_decay[self.name] = storage.decay[: storage.height], total


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Context that adds the table's name to the message of a TypeError or ValueError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {name!r}: {error}") from error


def _granted(capacity: int | None, reserve: Callable[[int], Any]) -> Any:
    """Call `reserve` with the capacity, or with as many rows as the system can reserve."""
    rows = MOST_ROWS if capacity is None else capacity
    while True:
        try:
            return reserve(rows)
        except MemoryError as error:
            if capacity is not None or rows // 2 < FEWEST:
                raise MemoryError(f"capacity of {rows} rows: {error}; pass a smaller one") from None
            rows //= 2


def _alone(optimizer: Optimizer) -> Optimizer:
    """Copy of an optimizer without its arrays of single parameters."""
    alone = copy.copy(optimizer)
    alone.row_decay, alone.masters_given = {}, {}
    return alone
