"""``fastopt bench``: memory bandwidth of this machine, and the share that updates reach."""

import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from math import gcd
from shutil import get_terminal_size
from typing import Any

import numpy as np

import fastopt
from fastopt import info, optimizer, warmup
from fastopt._console import Refused, duration, say, unknown
from fastopt._kernels import traffic
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.threads import thread_count, use_threads
from fastopt.bench.clock import Call, interleaved, sampler
from fastopt.bench.steps import PLAIN, Step, draw, momentum_of

numba: Any = import_module("numba")  # its type hints are incomplete

FIRST = ("adam", "sgd", "adamw")
"""The most used optimizers, which are measured first."""
WIDTH = 64
"""Columns of a weight, if its size is a multiple of this; two dimensions for rules with rows."""
ROUNDS = 31

LEGEND = """compile: time to compile the kernels or to load them from the cache. limit: time of a
loop that moves the same memory, divided by the time of the update; 1.00 is purely bandwidth-bound.
NumPy: time of plain NumPy code, divided by the time of the update. Optimizers with a momentum use
0.9."""

SIZES = (1_000, 1_000_000, 10_000_000)
"""Default numbers of elements; the last one in wide terminals."""


def run(
    optimizers: Sequence[str] = (),
    sizes: Sequence[int] = (),
    threads: int | None = None,
    seconds: float = 60.0,
) -> bool:
    """Run the benchmark, of all optimizers and on all threads by default; print rows as they come.

    The default sizes are 1,000, 1,000,000 and, if the terminal has room for it, 10,000,000.

    After `seconds`, including compilation, no further row is started.

    Returns
    -------
    bool
        Whether any optimizer was measured.

    Raises
    ------
    Refused
        An option is not possible on this machine, or there is no such optimizer.
    """
    known = [name for name in warmup.names() if optimizer.opt_registry[name].native]
    names = list(dict.fromkeys(name.lower() for name in optimizers or (*FIRST, *known)))
    for name in names:
        if name not in known:
            raise Refused(unknown(name, known))
    most, count = numba.config.NUMBA_NUM_THREADS, threads or thread_count()
    if count > most:
        raise Refused(f"--threads is at most {most} here, NUMBA_NUM_THREADS changes that")
    sizes = sizes or SIZES[: 3 if get_terminal_size((120, 24)).columns >= 105 else 2]
    with use_threads(count):
        try:
            return _Report(names, sorted(set(sizes)), count, seconds).run()
        except MemoryError:
            raise Refused(f"no memory for {max(sizes):,} elements: give smaller --sizes") from None


class _Report:
    """One run of the command."""

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], count: int, seconds: float
    ) -> None:
        self.names, self.count, self.seconds = names, count, seconds
        self.start, self.compiling = time.perf_counter(), 0.0
        self.arrays = {size: draw((size // gcd(size, WIDTH), gcd(size, WIDTH))) for size in sizes}
        self.parallel = [size for size in sizes if size >= PARALLEL_FROM]
        self.tasks = len(sizes) * (1 + len(names)) + len(self.parallel)

    def run(self) -> bool:
        """Print everything; return whether any optimizer was measured."""
        say(
            f"fastopt {fastopt.__version__}, {info.processor()}, "
            f"threads: {self.count} on {numba.threading_layer()}; float32"
        )
        say(info.busy())
        self.memory()
        self.threads()
        left = self.optimizers()
        say(
            f"\n{' '.join(LEGEND.split())}\n \n{time.perf_counter() - self.start:.0f} s, "
            f"{self.compiling:.0f} s of them to compile kernels or to load them from the cache"
        )
        if left:
            again = ", or run it again, now that kernels are cached" if self.compiling > 1 else ""
            unmeasured = f"not measured within {self.seconds:g} s: {', '.join(left)}"
            say(f"{unmeasured}; give more --seconds{again}")
        return len(left) < len(self.names)

    @property
    def rest(self) -> float:
        """Seconds that are left."""
        return max(self.start + self.seconds - time.perf_counter(), 0.0)

    def timed(self, calls: Sequence[Call]) -> Any:
        """Return the seconds of calls by round, in an equal part of the remaining time."""
        share = self.rest / self.tasks
        self.tasks -= 1
        with np.errstate(all="ignore"):
            return interleaved([sampler(call) for call in calls], ROUNDS, share)

    def memory(self) -> None:
        """Print the bandwidth of a loop that moves the memory of Adam."""
        speeds = []
        for size in self.arrays if self.rest else ():
            arrays = tuple(np.ones(size, np.float32) for _ in range(4))
            seconds = np.median(self.timed([partial(traffic.write, arrays)]))
            speeds.append(f"{7 * arrays[0].nbytes / seconds / 1e9:.1f} GB/s at {size:,}")
        if speeds:
            say(f"memory, 4 arrays read and 3 written: {', '.join(speeds)} elements")

    def threads(self) -> None:
        """Print the times of Adam by number of threads."""
        if self.count == 1 or not self.parallel or not self.rest:
            return
        counts = sorted({1 << k for k in range(self.count.bit_length())} | {self.count})
        columns = []
        for size in self.parallel:
            step = self.step("adam", size)
            times = self.timed([partial(_on_threads, count, step) for count in counts])
            columns.append([f"{duration(seconds):>18}" for seconds in np.median(times, axis=0)])
        numba.set_num_threads(self.count)
        print(f"\n{'threads':<20}", *(f"{f'adam, {size:,}':>18}" for size in self.parallel), sep="")
        for number, *cells in zip(counts, *columns, strict=True):
            print(f"{number:<20}", *cells, sep="", flush=True)

    def optimizers(self) -> list[str]:
        """Print a row for each optimizer; return the names left when the time ran out."""
        left = []
        heads = [f"{size:>12,}  limit  NumPy" for size in self.arrays]
        for name in self.names:
            if not self.rest:
                left.append(name)
                continue
            if name == self.names[0]:
                print(f"\n{'optimizer':<20}compile", *heads, sep="")
            before = self.compiling
            cells = [self.standing(name, size) for size in self.arrays]
            print(f"{name:<20}{self.compiling - before:>5.1f} s", *cells, sep="", flush=True)
        return left

    def step(self, name: str, size: int) -> Step:
        """Return an update; count the time to compile its kernels or to load them."""
        start = time.perf_counter()
        step = Step(name, self.arrays[size][0].shape, self.arrays[size], **momentum_of(name))
        step.limit()
        self.compiling += time.perf_counter() - start
        return step

    def standing(self, name: str, size: int) -> str:
        """Return the cells of an optimizer's time, and of the limit and NumPy relative to it."""
        step = self.step(name, size)
        calls: list[Call] = [step, step.limit]
        if name in PLAIN:
            update = PLAIN[name](step.updater.optimizer)
            calls.append(partial(update, 0, step.grad, step.weight.copy()))
        times = self.timed(calls)
        _, limit, *plain = np.median(times / times[:, :1], axis=0)
        ratio = f"{plain[0]:.1f}" if plain else "-"
        return f"{duration(float(np.median(times[:, 0]))):>12}{limit:>7.2f}{ratio:>7}"


def _on_threads(count: int, step: Step) -> None:
    numba.set_num_threads(count)
    step()
