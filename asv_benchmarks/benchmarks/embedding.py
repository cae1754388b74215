"""EmbeddingTable against row numbers: 8,192 ids a step of 1,000,000 random ids x 64, lazy Adam."""

from functools import partial
from itertools import cycle
from time import perf_counter

import numpy as np

import fastopt
from fastopt import optimizer
from fastopt.bench.clock import interleaved, sampler
from fastopt.sparse import RowSparse

from .rows import HEIGHT, WIDTH, batches, gradient

KINDS = ("permuted", "zipf", "sorted")


def hashes(count: int) -> np.ndarray:
    """Different ids of 64 bits, in no order."""
    ids = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (ids ^ (ids >> np.uint64(29))).view(np.int64)


def filled(height: int = HEIGHT, width: int = WIDTH) -> fastopt.EmbeddingTable:
    """A table of so many rows whose state has been written to."""
    table = fastopt.EmbeddingTable(width, "adam", init="zeros")
    ids = hashes(height)
    for some in np.array_split(ids, max(height // 100_000, 1)):
        table.update(some, np.ones((len(some), width), np.float32))
    return table


class Compared:
    """Calls by id and by row number on tables of their own, with the same rows in turn."""

    def __init__(self, kind: str, height: int = HEIGHT) -> None:
        self.table, known = filled(height), hashes(height)
        self.weight = self.table.weight.copy()
        self.updater = optimizer.get_updater(optimizer.Adam())
        self.values, self.rows = gradient(), batches(kind, height)
        self.grads = [RowSparse(self.values, rows, self.weight.shape) for rows in self.rows]
        self.ids = [known[rows] for rows in self.rows]
        whole = RowSparse(np.zeros_like(self.weight), np.arange(height), self.weight.shape)
        self.updater(0, whole, self.weight)  # every page is there
        self._next = cycle(range(len(self.rows)))

    def update(self) -> None:
        self.table.update(self.ids[next(self._next)], self.values)

    def plain_update(self) -> None:
        self.updater(0, self.grads[next(self._next)], self.weight)

    def lookup(self) -> None:
        self.table.lookup(self.ids[next(self._next)])

    def plain_lookup(self) -> None:
        np.take(self.weight, self.rows[next(self._next)], axis=0)

    def measured(self, what: str, rounds: int = 31) -> tuple[float, float]:
        """Median microseconds by id, and the share of the speed by row number."""
        calls = getattr(self, what), getattr(self, f"plain_{what}")
        times = interleaved([sampler(call, 0.03) for call in calls], rounds)
        return 1e6 * float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def insertion(count: int = HEIGHT, at_once: int | None = None) -> float:
    """Seconds in which an empty table gets rows with random first values, `at_once` in a call."""
    ids = hashes(count)
    fastopt.EmbeddingTable(WIDTH, "adam").lookup(ids[:10])
    table = fastopt.EmbeddingTable(WIDTH, "adam")
    start = perf_counter()
    for some in np.array_split(ids, count // at_once if at_once else 1):
        table.rows(some, create=True)
    return perf_counter() - start


def eviction(height: int, width: int = WIDTH) -> float:
    """Seconds in which a tenth of the rows, at random, are evicted."""
    small = filled(10, width)
    small.evict(count_below=1)
    table = filled(height, width)
    ids = hashes(height)
    table.rows(ids[np.random.default_rng(0).random(height) < 0.9], create=True)
    start = perf_counter()
    gone = table.evict(count_below=1)
    taken = perf_counter() - start
    assert 0.09 * height < len(gone) < 0.11 * height
    return taken


class Steps:
    params = (KINDS, ("update", "lookup"))
    param_names = ("ids", "call")
    timeout = 300

    def setup(self, kind, call):
        self.compared = Compared(kind)

    def track_time(self, kind, call):
        return self.compared.measured(call)[0]

    track_time.unit = "us"

    def track_share(self, kind, call):
        return self.compared.measured(call)[1]

    track_share.unit = "of the speed by row number"


class Insert:
    params = (None, 8_192)
    param_names = ("at_once",)

    def track_time(self, at_once):
        return min(map(partial(insertion, HEIGHT), [at_once] * 3))

    track_time.unit = "s"


class Evict:
    params = ((1_000_000, 10_000_000), (16, 64))
    param_names = ("rows", "width")
    timeout = 600

    def setup(self, rows, width):
        if rows * width > 200_000_000:
            raise NotImplementedError("takes more than 8 GB")

    def track_time(self, rows, width):
        return eviction(rows, width)

    track_time.unit = "s"
