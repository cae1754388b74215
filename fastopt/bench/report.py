"""``fastopt bench``: the memory of this machine, and how near each update comes to it."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import product
from math import gcd
from typing import Any

import numpy as np

import fastopt
from fastopt import info, optimizer, warmup
from fastopt.bench.advice import on_layer, on_threads
from fastopt.bench.clock import interleaved, sampler
from fastopt.bench.formulas import FORMULAS
from fastopt.bench.steps import Step, draw, momentum_of
from fastopt.console import Refused, duration, progress, table
from fastopt.kernels import traffic
from fastopt.kernels.table import PARALLEL_FROM
from fastopt.kernels.threads import prefer_tbb
from fastopt.plain import Array

__all__ = ["Options", "run"]

numba: Any = import_module("numba")  # whose type hints leave much out

WIDTH = 64
"""Columns of a weight, if its size is a multiple."""
STATES = range(4)
"""Numbers of state arrays that the rules have."""
ROUNDS = 31


@dataclass(frozen=True)
class Options:
    """What is measured; None stands for all optimizers, and for all threads."""

    sizes: Sequence[int] = (1_000, 1_000_000, 10_000_000)
    optimizers: Sequence[str] | None = None
    threads: int | None = None
    seconds: float = 30.0


@dataclass(frozen=True)
class Standing:
    """Seconds of an update, and the times of the limit and of NumPy code over it."""

    seconds: float
    limit: float
    numpy: float


def run(options: Options) -> None:
    """Measure with a progress bar, and print the tables and the advice.

    Raises
    ------
    Refused
        An option does not fit this machine, or there is no such optimizer.
    """
    names = _names(options.optimizers)
    sizes = sorted(set(options.sizes))
    with _threads(options.threads) as count:
        try:
            for name in progress(names, "optimizer compiled"):
                _compile(name, sizes)
            cells = _cells(names, sizes, count)
            results = _measure(cells, options.seconds)
        except MemoryError:
            raise Refused(f"no memory for {sizes[-1]:,} elements: give smaller --sizes") from None
    layer = numba.threading_layer()
    print(
        f"fastopt {fastopt.__version__}, {info.processor()}, threads: {count} on {layer}; float32"
    )
    by_threads = {size: results["threads", size] for size in sizes if ("threads", size) in results}
    tables = [_traffic_table(results, sizes), _thread_table(by_threads)]
    tables.append(_optimizer_table(results, names, sizes))
    print("\n" + "\n\n".join(filter(None, tables)))
    print(
        "\nlimit: time of a loop that moves the same memory, over that of the update; at 1.00 only "
        "memory\nis left. NumPy: time of plain NumPy code over that of the update. Momentum is 0.9 "
        "where there is one.\n"
    )
    print(f"{on_threads(by_threads)}\n{on_layer(layer)}")


def _names(given: Sequence[str] | None) -> list[str]:
    known = warmup.names()
    names = list(dict.fromkeys(name.lower() for name in given or known))
    for name in names:
        if name not in known:
            raise Refused(f"no {name!r}; there are {', '.join(known)}")
    return names


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Use so many threads meanwhile."""
    if numba.config.DISABLE_JIT:
        raise Refused("nothing is compiled, as NUMBA_DISABLE_JIT=1: unset it")
    prefer_tbb()  # before numba starts its threads
    most, before = numba.config.NUMBA_NUM_THREADS, numba.get_num_threads()
    if count is not None and count > most:
        raise Refused(f"--threads is at most {most} here, NUMBA_NUM_THREADS changes that")
    try:
        numba.set_num_threads(count or before)
        yield count or before
    finally:
        numba.set_num_threads(before)


def _compile(name: str, sizes: Sequence[int]) -> None:
    """Have the kernels without and with threads, as far as the sizes need them."""
    for size in {PARALLEL_FROM if size >= PARALLEL_FROM else WIDTH for size in sizes}:
        Step(name, _shape(size), **momentum_of(name)).limit()


def _shape(size: int) -> tuple[int, int]:
    """Shape with a second dimension, for the rules that have a number for each row."""
    width = gcd(size, WIDTH)
    return size // width, width


Cells = dict[Hashable, Callable[[float], Any]]
"""Functions that measure something for about so many seconds."""


def _cells(names: Sequence[str], sizes: Sequence[int], count: int) -> Cells:
    """What is measured, large weights first: they take what they need, small ones what is left."""
    cells: Cells = {}
    for size in reversed(sizes):
        if size >= PARALLEL_FROM:
            cells["threads", size] = partial(_by_threads, size, count)
        cells |= {(slots, size): partial(_bandwidth, slots, size) for slots in STATES}
        cells |= {(name, size): partial(_standing, name, size) for name in names}
    return cells


def _measure(cells: Cells, seconds: float) -> dict[Any, Any]:
    """Results of all cells, which share what is left of the time."""
    results, deadline = {}, time.perf_counter() + seconds
    for done, (key, measure) in enumerate(progress(list(cells.items()), "measurement")):
        left = max(deadline - time.perf_counter(), 0)
        results[key] = measure(left / (len(cells) - done))
    return results


@lru_cache(maxsize=1)
def _arrays(size: int) -> tuple[Array, Array]:
    return draw(_shape(size))


def _bandwidth(slots: int, size: int, budget: float) -> float:
    """Bytes a second of the loop that moves what an update with so many state arrays moves."""
    arrays = tuple(np.ones(size, np.float32) for _ in range(2 + slots))
    times = interleaved([sampler(partial(traffic.write, arrays))], ROUNDS, budget)
    return (2 * len(arrays) - 1) * arrays[0].nbytes / float(np.median(times))


def _standing(name: str, size: int, budget: float) -> Standing:
    arguments = momentum_of(name)
    step = Step(name, _shape(size), _arrays(size), **arguments)
    update = FORMULAS[name](optimizer.create(name, **arguments))
    by_hand = partial(update, 0, step.grad, step.weight.copy())
    with np.errstate(all="ignore"):
        samples = [sampler(call) for call in (step, step.limit, by_hand)]
        times = interleaved(samples, ROUNDS, budget)
    ratios = np.median(times / times[:, :1], axis=0)
    return Standing(float(np.median(times[:, 0])), float(ratios[1]), float(ratios[2]))


def _by_threads(size: int, count: int, budget: float) -> Mapping[int, float]:
    """Seconds of Adam by number of threads: powers of two, and all."""
    step = Step("adam", _shape(size), _arrays(size))
    counts = sorted({1 << k for k in range(count.bit_length())} | {count})

    def on(threads: int) -> None:
        numba.set_num_threads(threads)
        step()

    times = interleaved([sampler(partial(on, threads)) for threads in counts], ROUNDS, budget)
    numba.set_num_threads(count)
    return dict(zip(counts, map(float, np.median(times, axis=0)), strict=True))


def _traffic_table(results: Mapping[Any, Any], sizes: Sequence[int]) -> str:
    lines = [
        [f"{2 + slots} read, {1 + slots} written"]
        + [f"{results[slots, size] / 1e9:.1f} GB/s" for size in sizes]
        for slots in STATES
    ]
    return table(["arrays", *(f"{size:,} elements" for size in sizes)], lines)


def _thread_table(times: Mapping[int, Mapping[int, float]]) -> str:
    """Times of Adam by number of threads, if there is anything to compare."""
    counts = list(next(iter(times.values()), ()))
    lines = [
        [str(count), *(duration(by_count[count]) for by_count in times.values())]
        for count in counts
    ]
    head = ["threads", *(f"adam, {size:,}" for size in times)]
    return table(head, lines) if len(counts) > 1 else ""


def _optimizer_table(results: Mapping[Any, Any], names: Sequence[str], sizes: Sequence[int]) -> str:
    head = ["optimizer"]
    for size in sizes:
        head += [f"{size:,}", "limit", "NumPy"]
    lines = [[name] for name in names]
    for line, size in product(lines, sizes):
        standing = results[line[0], size]
        line += [duration(standing.seconds), f"{standing.limit:.2f}", f"{standing.numpy:.1f}"]
    return table(head, lines)
