"""Lazy Adam on row-sparse gradients: 8,192 ids of a table of 64 columns, against a plain loop."""

import mmap
import sys
from itertools import cycle

import numpy as np
from numba import njit, prange

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.bench.clock import interleaved, sampler
from fastopt.sparse import RowSparse

from .common import against, microseconds

KINDS = ("sorted", "permuted", "zipf")
"""Row indices of a step: unique and sorted, unique, or with Zipf frequencies like words."""

HEIGHT, WIDTH, LISTED, BATCHES = 1_000_000, 64, 8_192, 64


def batches(
    kind: str, height: int = HEIGHT, count: int = BATCHES, listed: int = LISTED
) -> list[np.ndarray]:
    """Draw `count` batches of `listed` row indices each."""
    rng = np.random.default_rng(0)
    if kind == "zipf":  # probability inversely proportional to the row index
        return [(height ** rng.random(listed)).astype(np.int64) - 1 for _ in range(count)]
    drawn = [rng.choice(height, listed, replace=False) for _ in range(count)]
    return [np.sort(ids) for ids in drawn] if kind == "sorted" else drawn


def gradient(listed: int = LISTED) -> np.ndarray:
    """Return gradient values, one array for all batches: in cache, as if just computed."""
    return np.random.default_rng(1).standard_normal((listed, WIDTH), np.float32)


@njit(parallel=True, error_model="numpy", cache=True)
def _scatter(weight, mean, var, grad, rows, zero):
    """Read and rewrite the indexed rows of three arrays without changing them."""
    for k in prange(len(rows)):
        row = rows[k]
        for i in range(weight.shape[1]):
            weight[row, i] -= zero * grad[k, i]
            mean[row, i] -= zero
            var[row, i] -= zero


class _Batches:
    """Base class of steps on batches of row indices.

    Parameters
    ----------
    kind : str
        One of KINDS.
    cold : bool
        Cycle through BATCHES batches, so that the rows are not in the caches.
    height : int
        Rows of the table.
    listed : int
        Row indices per call.
    """

    def __init__(self, kind: str, cold: bool, height: int = HEIGHT, listed: int = LISTED) -> None:
        self.cold, self.shape, self.values = cold, (height, WIDTH), gradient(listed)
        self.ids = batches(kind, height, BATCHES if cold else 1, listed)
        self.weight = self.table()

    def table(self) -> np.ndarray:
        """Return a table of zeros; for cold steps, all pages are touched."""
        return self.touched(np.zeros(self.shape, np.float32))

    def touched(self, array: np.ndarray) -> np.ndarray:
        if self.cold:
            array += 0
        return array


class RowStep(_Batches):
    """A call that updates indexed rows of a float32 table with lazy Adam."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args)
        self.updater = optimizer.get_updater(optimizer.Adam(lazy_update=True, **kwargs))
        self._grads = cycle([RowSparse(self.values, ids, self.shape) for ids in self.ids])
        self()
        for array in leaves(self.updater.states[0]):
            self.touched(array)

    def __call__(self) -> None:
        self.updater(0, next(self._grads), self.weight)


class Loop(_Batches):
    """A call that only reads and writes the indexed rows of weight and state, each once."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._arrays = self.weight, self.table(), self.table()
        unique = [ids if len(set(ids)) == len(ids) else np.unique(ids) for ids in self.ids]
        self._rows = cycle(unique)

    def __call__(self) -> None:
        _scatter(*self._arrays, self.values, next(self._rows), np.float32(0))


def over_heights(heights: tuple[int, ...], rounds: int = 15) -> float:
    """Return the median ratio of the slowest to the fastest step over table heights, in cache."""
    samples = [sampler(RowStep("sorted", False, height)) for height in heights]
    times = interleaved(samples, rounds)
    return float(np.median(times.max(axis=1) / times.min(axis=1)))


def resident_share(order: str, height: int) -> float:
    """Return the resident share of Adam's state after an update of 1% of the rows.

    The rows are drawn at random or, if `order` is 'contiguous', the first of the table.
    """
    rows = np.arange(height // 100)
    if order == "random":
        rows = np.sort(np.random.default_rng(0).choice(height, len(rows), replace=False))
    values = np.ones((len(rows), WIDTH), np.float32)
    updater = optimizer.get_updater(optimizer.Adam())
    updater("small", (values, np.arange(len(rows))), np.ones_like(values))  # compiles
    weight = np.ones((height, WIDTH), np.float32)
    before = _resident()
    updater("table", (values, rows), weight)
    return (_resident() - before) / sum(array.nbytes for array in updater.states["table"])


def _resident() -> int:
    """Return the resident memory of this process in bytes, on Linux."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


class Rows:
    params = (KINDS, ("cold", "cached"))
    param_names = ("ids", "memory")

    def setup(self, kind, memory):
        arguments = kind, memory == "cold"
        self.step, self.loop = RowStep(*arguments), Loop(*arguments)

    def track_time(self, kind, memory):
        return 1e6 * against(self.loop, self.step)[0]

    track_time.unit = "us"

    def track_slowdown(self, kind, memory):
        return 1 / against(self.loop, self.step)[1]

    track_slowdown.unit = "times the loop"


class Few:
    """Few ids of a table of 1,000,000 rows, where call overhead dominates."""

    params = (("sorted", "permuted"), (64, 512))
    param_names = ("ids", "listed")

    def setup(self, kind, listed):
        arguments = kind, True, HEIGHT, listed
        self.step, self.loop = RowStep(*arguments), Loop(*arguments)

    def track_time(self, kind, listed):
        return 1e6 * against(self.loop, self.step)[0]

    track_time.unit = "us"

    def track_slowdown(self, kind, listed):
        return 1 / against(self.loop, self.step)[1]

    track_slowdown.unit = "times the loop"


class Heights:
    """Time of a step in cache, which should not depend on the height of the table."""

    params = (100_000, 1_000_000, 10_000_000)
    param_names = ("rows",)

    def setup(self, height):
        self.step = RowStep("sorted", False, height)

    def track_time(self, height):
        return microseconds(self.step)

    track_time.unit = "us"


class State:
    """Memory of the state after an update of 1% of the rows."""

    params = ("random", "contiguous")
    param_names = ("order",)

    def setup(self, order):
        if sys.platform != "linux":
            raise NotImplementedError("resident memory is read from /proc")

    def track_resident(self, order):
        return 100 * resident_share(order, 10_000_000)

    track_resident.unit = "% of the state's size"

    def peakmem_step(self, order):
        resident_share(order, HEIGHT)
