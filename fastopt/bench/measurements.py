"""Measurements of ``fastopt bench``, and the division of its time budget."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import gcd
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt._kernels import traffic
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt.bench.clock import Call, interleaved, sampler
from fastopt.bench.steps import Step, draw, momentum_of
from fastopt.reference import FORMULAS, Array

numba: Any = import_module("numba")  # its type hints are incomplete

WIDTH = 64
"""Columns of a weight, if its size is a multiple of this."""
STATES = range(4)
"""Numbers of state arrays that occur in the rules."""
ROUNDS = 31


@dataclass(frozen=True)
class Standing:
    """Seconds of an update, and the times of the limit and of NumPy code relative to it."""

    seconds: float
    limit: float
    numpy: float | None
    """None if the optimizer has no formula in :data:`~fastopt.reference.FORMULAS`."""


class Budget:
    """A budget of wall-clock seconds, including compilation, divided among tasks.

    Examples
    --------
    >>> from fastopt.bench.measurements import Budget
    >>> budget = Budget(0.0, tasks=2)
    >>> budget.spent, budget.share()
    (True, 0.0)
    """

    def __init__(self, seconds: float, tasks: int) -> None:
        self.deadline, self.tasks = time.perf_counter() + seconds, tasks

    @property
    def spent(self) -> bool:
        """Whether no time is left."""
        return time.perf_counter() >= self.deadline

    def share(self) -> float:
        """Return the seconds for the next task: an equal part of the remaining time."""
        left = max(self.deadline - time.perf_counter(), 0.0)
        self.tasks -= 1
        return left / (self.tasks + 1)


def prepare(name: str, sizes: Sequence[int]) -> float:
    """Compile the serial and parallel kernels for the sizes, or load them from the cache.

    Returns
    -------
    float
        Seconds that this took.
    """
    start = time.perf_counter()
    for size in {PARALLEL_FROM if size >= PARALLEL_FROM else WIDTH for size in sizes}:
        Step(name, _shape(size), **momentum_of(name)).limit()
    return time.perf_counter() - start


def _shape(size: int) -> tuple[int, int]:
    """Return a two-dimensional shape, for rules with one state value per row."""
    width = gcd(size, WIDTH)
    return size // width, width


Arrays = tuple[Array, Array]
"""A weight and a gradient."""


def arrays_of(size: int) -> Arrays:
    """Draw a weight of `size` elements and its gradient."""
    return draw(_shape(size))


def standings(name: str, arrays: Sequence[Arrays], seconds: float) -> list[Standing]:
    """Measure an optimizer on each weight, the last one first.

    The others share the time that is left.
    """
    budget = Budget(seconds, len(arrays))
    return [_standing(name, each, budget.share()) for each in reversed(arrays)][::-1]


def bandwidth(slots: int, size: int, seconds: float) -> float:
    """Return the bytes per second of a loop that moves the memory of an update.

    The update has `slots` state arrays of `size` elements.
    """
    arrays = tuple(np.ones(size, np.float32) for _ in range(2 + slots))
    times = interleaved([sampler(partial(traffic.write, arrays))], ROUNDS, seconds)
    return (2 * len(arrays) - 1) * arrays[0].nbytes / float(np.median(times))


def _standing(name: str, arrays: Arrays, seconds: float) -> Standing:
    arguments = momentum_of(name)
    step = Step(name, arrays[0].shape, arrays, **arguments)
    calls: list[Call] = [step, step.limit]
    if name in FORMULAS:
        update = FORMULAS[name](optimizer.create(name, **arguments))
        calls.append(partial(update, 0, step.grad, step.weight.copy()))
    with np.errstate(all="ignore"):
        times = interleaved([sampler(call) for call in calls], ROUNDS, seconds)
    _, limit, *numpy = np.median(times / times[:, :1], axis=0)
    return Standing(float(np.median(times[:, 0])), float(limit), float(numpy[0]) if numpy else None)


def by_threads(arrays: Arrays, count: int, seconds: float) -> Mapping[int, float]:
    """Return the seconds of an Adam update by number of threads: powers of two, and `count`."""
    step = Step("adam", arrays[0].shape, arrays)
    counts = sorted({1 << k for k in range(count.bit_length())} | {count})

    def on(threads: int) -> None:
        numba.set_num_threads(threads)
        step()

    times = interleaved([sampler(partial(on, threads)) for threads in counts], ROUNDS, seconds)
    numba.set_num_threads(count)
    return dict(zip(counts, map(float, np.median(times, axis=0)), strict=True))
