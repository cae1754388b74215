"""``fastopt bench``: memory bandwidth of this machine, and the share that updates reach."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import fastopt
from fastopt import info, warmup
from fastopt._console import Refused, Table, duration, progress, unknown
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.threads import thread_count, use_threads
from fastopt.bench.advice import on_layer, on_threads
from fastopt.bench.measurements import (
    STATES,
    Budget,
    Standing,
    arrays_of,
    bandwidth,
    by_threads,
    prepare,
    standings,
)

numba: Any = import_module("numba")  # its type hints are incomplete

FIRST = ("adam", "sgd", "adamw")
"""The most used optimizers, which are measured first."""

TIME = "100.0 us"

LEGEND = """
compile: time to compile the kernels or to load them from the cache. limit: time of a loop that
moves the same memory, divided by the time of the update; 1.00 is purely bandwidth-bound. NumPy:
time of plain NumPy code, divided by the time of the update. Optimizers with a momentum use 0.9.
"""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark; None means all optimizers, and all threads."""

    sizes: Sequence[int] = (1_000, 1_000_000, 10_000_000)
    optimizers: Sequence[str] | None = None
    threads: int | None = None
    seconds: float = 60.0


def run(options: Options) -> bool:
    """Run the benchmark: print each row when it is measured, and advice at the end.

    After ``options.seconds``, including compilation, no further row is started.

    Returns
    -------
    bool
        Whether any optimizer was measured.

    Raises
    ------
    Refused
        An option is not possible on this machine, or there is no such optimizer.
    """
    names = _names(options.optimizers)
    sizes = sorted(set(options.sizes))
    with _threads(options.threads) as count:
        try:
            return _Report(names, sizes, count, options.seconds).run()
        except MemoryError:
            raise Refused(f"no memory for {sizes[-1]:,} elements: give smaller --sizes") from None


class _Report:
    """One run of the command."""

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], count: int, seconds: float
    ) -> None:
        self.names, self.count, self.seconds = names, count, seconds
        self.start = time.perf_counter()
        self.arrays = {size: arrays_of(size) for size in sizes}
        self.parallel = [size for size in sizes if size >= PARALLEL_FROM]
        self.budget = Budget(seconds, len(STATES) + len(self.parallel) + len(names))
        self.compiling = 0.0

    def run(self) -> bool:
        """Print everything; return whether any optimizer was measured."""
        layer = numba.threading_layer()
        print(
            f"fastopt {fastopt.__version__}, {info.processor()}, "
            f"threads: {self.count} on {layer}; float32"
        )
        if busy := info.busy():
            print(busy)
        self.memory()
        times = self.threads()
        left = self.optimizers()
        print(LEGEND)
        print(
            f"{time.perf_counter() - self.start:.0f} s, {self.compiling:.0f} s of them to compile "
            "kernels or to load them from the cache"
        )
        if left:
            again = ", or run it again, now that kernels are cached" if self.compiling > 1 else ""
            print(
                f"not measured within {self.seconds:g} s: {', '.join(left)}; give more "
                f"--seconds{again}"
            )
        if times or not self.parallel:
            print(on_threads(times))
        print(on_layer(layer))
        return len(left) < len(self.names)

    def memory(self) -> None:
        """Print the bandwidth of the limit loops."""
        sizes = [f"{size:,} elements" for size in self.arrays]
        rows = Table(["arrays", *sizes], ["5 read, 4 written", *["100.0 GB/s"] * len(sizes)])
        for slots in STATES:
            if self.budget.spent:
                return
            share = Budget(self.budget.share(), len(self.arrays))
            speeds = [bandwidth(slots, size, share.share()) for size in self.arrays]
            name = f"{2 + slots} read, {1 + slots} written"
            rows.add([name, *(f"{speed / 1e9:.1f} GB/s" for speed in speeds)])

    def threads(self) -> dict[int, Mapping[int, float]]:
        """Print the times of Adam by number of threads, and return them by size."""
        if not self.parallel or self.budget.spent:
            return {}
        self.compiling += prepare("adam", self.parallel)
        times = {
            size: by_threads(self.arrays[size], self.count, self.budget.share())
            for size in self.parallel
        }
        sizes = [f"adam, {size:,}" for size in times]
        rows = Table(["threads", *sizes], ["", *[TIME] * len(sizes)])
        for number in next(iter(times.values())) if self.count > 1 else ():
            rows.add([str(number), *(duration(by_count[number]) for by_count in times.values())])
        return times

    def optimizers(self) -> list[str]:
        """Print a row for each optimizer; return the names left when the time ran out."""
        head, widest = ["optimizer", "compile"], [max(self.names, key=len), TIME]
        for size in self.arrays:
            head += [f"{size:,}", "limit", "NumPy"]
            widest += [TIME, "1.00", "100.0"]
        rows, left = Table(head, widest), []
        for name in progress(self.names, "optimizer"):
            if self.budget.spent:
                left.append(name)
                continue
            share = Budget(self.budget.share(), 1)
            seconds = prepare(name, list(self.arrays))
            self.compiling += seconds
            cells = [f"{seconds:.1f} s"]
            for standing in standings(name, list(self.arrays.values()), share.share()):
                cells += _cells(standing)
            rows.add([name, *cells])
        return left


def _cells(standing: Standing) -> list[str]:
    numpy = "-" if standing.numpy is None else f"{standing.numpy:.1f}"
    return [duration(standing.seconds), f"{standing.limit:.2f}", numpy]


def _names(given: Sequence[str] | None) -> list[str]:
    registry = fastopt.optimizer.opt_registry
    known = [name for name in warmup.names() if registry[name].native]
    every = dict.fromkeys([*FIRST, *known])
    names = list(dict.fromkeys(name.lower() for name in given or every))
    for name in names:
        if name not in known:
            raise Refused(unknown(name, known))
    return names


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Use `count` threads inside the block."""
    most, before = numba.config.NUMBA_NUM_THREADS, thread_count()
    if count is not None and count > most:
        raise Refused(f"--threads is at most {most} here, NUMBA_NUM_THREADS changes that")
    with use_threads(count or before):
        yield count or before
