"""EmbeddingTable against row indices: 8,192 ids per step out of 1,000,000 x 64, lazy Adam."""

import os
import tempfile
from functools import partial
from itertools import cycle, pairwise
from time import perf_counter

import numpy as np

import fastopt
from fastopt import optimizer
from fastopt.bench.clock import interleaved, sampler
from fastopt.sparse import RowSparse

from .rows import HEIGHT, WIDTH, batches, gradient

KINDS = ("permuted", "zipf", "sorted")


def hashes(count: int) -> np.ndarray:
    """Return distinct 64-bit ids, unsorted."""
    ids = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (ids ^ (ids >> np.uint64(29))).view(np.int64)


def filled(
    height: int = HEIGHT, width: int = WIDTH, path: str | None = None
) -> fastopt.EmbeddingTable:
    """Return a table of `height` rows whose state has been written to."""
    table = fastopt.EmbeddingTable(width, "adam", init="zeros", path=path)
    ids = hashes(height)
    for some in np.array_split(ids, max(height // 100_000, 1)):
        table.update(some, np.ones((len(some), width), np.float32))
    return table


class Compared:
    """Calls by id and by row index, on separate tables with the same sequence of rows."""

    def __init__(self, kind: str, height: int = HEIGHT) -> None:
        self.table, known = filled(height), hashes(height)
        self.weight = self.table.weight.copy()
        self.updater = optimizer.get_updater(optimizer.Adam())
        self.values, self.rows = gradient(), batches(kind, height)
        self.grads = [RowSparse(self.values, rows, self.weight.shape) for rows in self.rows]
        self.ids = [known[rows] for rows in self.rows]
        whole = RowSparse(np.zeros_like(self.weight), np.arange(height), self.weight.shape)
        self.updater(0, whole, self.weight)  # touches every page
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
        """Return median microseconds by id, and the speed relative to calls by row index."""
        calls = getattr(self, what), getattr(self, f"plain_{what}")
        times = interleaved([sampler(call, 0.03) for call in calls], rounds)
        return 1e6 * float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def insertion(count: int = HEIGHT, at_once: int | None = None) -> float:
    """Return seconds to insert randomly initialized rows into an empty table.

    Each call inserts `at_once` rows, by default all of them.
    """
    ids = hashes(count)
    fastopt.EmbeddingTable(WIDTH, "adam").lookup(ids[:10])
    table = fastopt.EmbeddingTable(WIDTH, "adam")
    start = perf_counter()
    for some in np.array_split(ids, count // at_once if at_once else 1):
        table.rows(some, create=True)
    return perf_counter() - start


def eviction(height: int, width: int = WIDTH) -> float:
    """Return the seconds to evict a random tenth of the rows."""
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


def zipf(height: int, exponent: float, steps: int, listed: int = 8_192) -> list[np.ndarray]:
    """Draw batches of ids; the probability of row r is proportional to ``(r + 1) ** -exponent``."""
    rng, power, known = np.random.default_rng(0), 1 - exponent, hashes(height)
    uniform = rng.random((steps, listed))
    ranks = ((height**power - 1) * uniform + 1) ** (1 / power)
    return [known[np.minimum(some.astype(np.int64) - 1, height - 1)] for some in ranks]


def drop_pages(path: str) -> None:
    """Drop the files of a table from the page cache."""
    for entry in os.scandir(path):
        descriptor = os.open(entry.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def stepped(
    height: int, width: int, exponent: float, path: str | None, warm: int = 50, timed: int = 60
) -> float:
    """Return the median seconds of a step: prefetch of the next batch, lookup and update.

    The first `warm` steps are not counted. A table in files is dropped from the page cache before
    the first step.
    """
    table = filled(height, width, path)
    if path is not None:
        table.flush()
        drop_pages(path)
    batches = zipf(height, exponent, warm + timed + 1)
    grads = np.ones((len(batches[0]), width), np.float32)
    times = []
    for batch, following in pairwise(batches):
        start = perf_counter()
        table.prefetch(following)
        table.lookup(batch)
        table.update(batch, grads)
        times.append(perf_counter() - start)
    table.close()
    return float(np.median(times[warm:]))


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


class InFiles:
    params = ((1_000_000,), (1.05, 1.2), (False, True))
    param_names = ("rows", "exponent", "in_files")
    timeout = 600

    def track_time(self, rows, exponent, in_files):
        with tempfile.TemporaryDirectory() as folder:
            return 1e3 * stepped(rows, 16, exponent, f"{folder}/table" if in_files else None)

    track_time.unit = "ms"
