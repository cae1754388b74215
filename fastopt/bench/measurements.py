"""What ``fastopt bench`` measures, and how it shares the time that it has."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from math import gcd
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt.bench.clock import interleaved, sampler
from fastopt.bench.formulas import FORMULAS
from fastopt.bench.steps import Step, draw, momentum_of
from fastopt.console import progress
from fastopt.kernels import traffic
from fastopt.kernels.table import PARALLEL_FROM
from fastopt.plain import Array

__all__ = ["STATES", "Standing", "cells_of", "measure", "prepare"]

numba: Any = import_module("numba")  # whose type hints leave much out

WIDTH = 64
"""Columns of a weight, if its size is a multiple."""
STATES = range(4)
"""Numbers of state arrays that the rules have."""
ROUNDS = 31


@dataclass(frozen=True)
class Standing:
    """Seconds of an update, and the times of the limit and of NumPy code over it."""

    seconds: float
    limit: float
    numpy: float


def prepare(name: str, sizes: Sequence[int]) -> None:
    """Have the kernels without and with threads, as far as the sizes need them."""
    for size in {PARALLEL_FROM if size >= PARALLEL_FROM else WIDTH for size in sizes}:
        Step(name, _shape(size), **momentum_of(name)).limit()


def _shape(size: int) -> tuple[int, int]:
    """Shape with a second dimension, for the rules that have a number for each row."""
    width = gcd(size, WIDTH)
    return size // width, width


Cells = dict[Hashable, Callable[[float], Any]]
"""Functions that measure something for about so many seconds."""


def cells_of(names: Sequence[str], sizes: Sequence[int], count: int) -> Cells:
    """What is measured, large weights first: they take what they need, small ones what is left."""
    cells: Cells = {}
    for size in reversed(sizes):
        if size >= PARALLEL_FROM:
            cells["threads", size] = partial(_by_threads, size, count)
        cells |= {(slots, size): partial(_bandwidth, slots, size) for slots in STATES}
        cells |= {(name, size): partial(_standing, name, size) for name in names}
    return cells


def measure(cells: Cells, seconds: float) -> dict[Any, Any]:
    """Results of all cells, which share what is left of the time."""
    results, deadline = {}, time.perf_counter() + seconds
    for done, (key, cell) in enumerate(progress(list(cells.items()), "measurement")):
        left = max(deadline - time.perf_counter(), 0)
        results[key] = cell(left / (len(cells) - done))
    _arrays.cache_clear()
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
