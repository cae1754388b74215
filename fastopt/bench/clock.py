"""The clock: how long calls take, with those that are compared in turn."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fastopt.plain import Array

__all__ = ["Call", "Sample", "against", "interleaved", "microseconds", "ratio", "sampler"]
__all__ += ["seconds"]

Call = Callable[[], None]
Sample = Callable[[], float]

LEAST = 3
"""Rounds that are measured however long they take."""


def seconds(call: Call, number: int, warm: bool = True) -> float:
    """Mean seconds of `call`, if `warm` after one that brings its memory back into the caches."""
    if warm:
        call()
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def sampler(call: Call, duration: float = 0.01) -> Sample:
    """Function that returns the seconds of `call`, each time as a mean over about `duration`.

    What one call takes longer than that for is not in the caches anyway. The first calls, which
    compile and make plans, are not measured.
    """
    seconds(call, 2)
    number = round(duration / seconds(call, 1))
    return partial(seconds, call, max(number, 1), warm=number > 0)


def interleaved(samples: Sequence[Sample], rounds: int, budget: float = math.inf) -> Array:
    """Results of all `samples` in each round; every other round goes backwards.

    Other programs on the machine slow neighbours in a round alike, so that ratios within a
    round are steadier than ratios of medians. After `budget` seconds no round is begun, but for
    the first :data:`LEAST`.

    Examples
    --------
    >>> from fastopt.bench.clock import interleaved
    >>> numbers = iter(range(6))
    >>> interleaved([lambda: next(numbers)] * 2, rounds=3)
    array([[0., 1.],
           [3., 2.],
           [4., 5.]])
    """
    start = time.perf_counter()
    times: list[list[float]] = []
    for index in range(rounds):
        if index >= LEAST and time.perf_counter() - start > budget:
            break
        order = range(len(samples))[:: -1 if index % 2 else 1]
        measured = {k: samples[k]() for k in order}
        times.append([measured[k] for k in range(len(samples))])
    return np.array(times, float)


def ratio(call: Call, other: Call, rounds: int = 15) -> float:
    """Median of the time of `call` over that of `other` in the same round."""
    times = interleaved([sampler(call), sampler(other)], rounds)
    return float(np.median(times[:, 0] / times[:, 1]))


def against(limit: Call, step: Call, rounds: int = 15) -> tuple[float, float]:
    """Median seconds of `step`, and the share of the limit's speed that it reaches."""
    times = interleaved([sampler(step), sampler(limit)], rounds)
    return float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def microseconds(step: Call, rounds: int = 31) -> float:
    """Median microseconds of `step`."""
    return 1e6 * float(np.median(interleaved([sampler(step)], rounds)))
