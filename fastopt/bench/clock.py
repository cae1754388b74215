"""Timing of calls; calls to be compared are timed in turn."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], None]
Sample = Callable[[], float]

LEAST = 3
"""Number of rounds that are measured regardless of the budget."""


def seconds(call: Call, number: int, warm: bool = True) -> float:
    """Return the mean seconds of `number` calls; `warm` does an untimed call first.

    The untimed call brings the memory of `call` back into the caches.
    """
    if warm:
        call()
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def sampler(call: Call, duration: float = 0.01) -> Sample:
    """Return a function that times `call`, as the mean over about `duration` seconds.

    If one call takes longer than that, its memory does not fit into the caches, and no warm-up
    call is done. The first calls, which compile and create records, are not measured.
    """
    seconds(call, 2)
    number = round(duration / seconds(call, 1))
    return partial(seconds, call, max(number, 1), warm=number > 0)


def interleaved(samples: Sequence[Sample], rounds: int, budget: float = math.inf) -> NDArray[Any]:
    """Return the results of all `samples` by round; every other round runs in reverse order.

    Other programs on the machine slow neighbours in a round alike, so that ratios within a
    round are steadier than ratios of medians. After `budget` seconds no round is started, except
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
