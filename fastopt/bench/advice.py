"""Advice on threads, from measurements on this machine."""

import os
import platform
from collections.abc import Mapping

from fastopt._kernels.threads import load_tbb

WORTH = 1.05
"""Speedup from which more threads are worth it."""


def on_threads(times: Mapping[int, Mapping[int, float]]) -> str:
    """Advise on the number of threads for updates.

    Parameters
    ----------
    times : mapping of int to mapping of int to float
        Seconds of an update, by number of elements and number of threads.

    Examples
    --------
    >>> from fastopt.bench.advice import on_threads
    >>> on_threads({1_000_000: {1: 3.0, 2: 1.6, 4: 1.59}})
    'threads: 2 of 4 are enough for these sizes: set NUMBA_NUM_THREADS=2'
    """
    if not times:
        return "threads: updates of these sizes use 1"
    most = max(max(by_count) for by_count in times.values())
    if most == 1:
        return "threads: 1 is used, --threads, NUMBA_NUM_THREADS and the CPUs allowed limit it"
    best = {size: _enough(by_count) for size, by_count in times.items()}
    enough = max(best.values())
    slower = [size for size, by_count in times.items() if _slower(by_count, enough)]
    if slower:
        counts = ", ".join(f"{number} at {size:,}" for size, number in best.items())
        return f"threads: how many pay off depends on the elements of a weight: {counts}"
    if enough == most:
        return f"threads: all {most} pay off"
    are = "is" if enough == 1 else "are"
    return (
        f"threads: {enough} of {most} {are} enough for these sizes: set NUMBA_NUM_THREADS={enough}"
    )


def _enough(times: Mapping[int, float]) -> int:
    """Return the smallest number of threads that is about as fast as the best."""
    return min(count for count in times if not _slower(times, count))


def _slower(times: Mapping[int, float], count: int) -> bool:
    """Whether `count` threads are slower than the best number."""
    return times[count] > WORTH * min(times.values())


def on_layer(layer: str) -> str:
    """Report whether threads run on TBB, and how to enable it if not."""
    safe = "survives forks and calls from several threads"
    if layer == "tbb":
        return f"TBB: threads run on it, it {safe}"
    layers = f"TBB: threads run on {layer}; of numba's layers TBB alone {safe}"
    bound = ""
    if layer == "omp" and not os.environ.get("OMP_PROC_BIND"):
        bound = "; OMP_PROC_BIND=true keeps threads of OpenMP from sharing a core"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{layers}, but it has no wheel for {platform.machine()}{bound}"
    if not load_tbb():
        return f"{layers}: pip install tbb{bound}"
    return f"{layers}: `fastopt info` says why it is not used{bound}"
