"""Shared code of the benchmarks besides :mod:`fastopt.bench`: ratios, and new processes."""

import os
import subprocess
import sys
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np

from fastopt.bench.clock import Call, interleaved, sampler
from fastopt.bench.steps import Step

# Without this, GNU OpenMP may keep two threads on one core of a small virtual machine.
os.environ.setdefault("OMP_PROC_BIND", "true")

TABLE_SHAPE = (312_500, 64)
"""20 million elements, two-dimensional for rules with one state value per row."""


def ratio(call: Call, other: Call, rounds: int = 15) -> float:
    """Return the median over rounds of the time of `call` divided by the time of `other`."""
    times = interleaved([sampler(call), sampler(other)], rounds)
    return float(np.median(times[:, 0] / times[:, 1]))


def against(limit: Call, step: Call, rounds: int = 15) -> tuple[float, float]:
    """Return the median seconds of `step`, and the share of the limit's speed that it reaches."""
    times = interleaved([sampler(step), sampler(limit)], rounds)
    return float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def against_limit(step: Step, rounds: int = 15) -> tuple[float, float]:
    """Return :func:`against` for a step and the limit of its arrays."""
    return against(step.limit, step, rounds)


def microseconds(step: Call, rounds: int = 31) -> float:
    """Return the median microseconds of `step`."""
    return 1e6 * float(np.median(interleaved([sampler(step)], rounds)))


def fresh(statement: str, setup: str = "", **environ: str) -> float:
    """Return the seconds that `statement` takes in a new process, after `setup`."""
    lines = [
        setup,
        "from time import perf_counter",
        "start = perf_counter()",
        statement,
        "print(perf_counter() - start)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    return float(subprocess.check_output(command, env=os.environ | environ, text=True))


def import_overhead(rounds: int = 11) -> float:
    """Return the median seconds by which importing fastopt takes longer than importing numba."""
    imports = [partial(fresh, "import fastopt"), partial(fresh, "import numba")]
    times = interleaved(imports, rounds)
    return float(np.median(times[:, 0] - times[:, 1]))


def first_steps(size: int, rounds: int = 3) -> tuple[float, float]:
    """Return the median seconds of Adam's first step in a new process, after the imports.

    The first value is for an empty cache of compiled kernels, the second one for a warm cache.
    """
    setup = f"""
import numpy as np
from fastopt import optimizer
weight, grad = np.ones((2, {size}), np.float32)
updater = optimizer.get_updater(optimizer.create("adam"))
"""
    times = []
    for _ in range(rounds):
        with TemporaryDirectory() as cache:
            step = partial(fresh, "updater(0, grad, weight)", setup, NUMBA_CACHE_DIR=cache)
            times.append((step(), step()))
    cold, warm = np.median(times, axis=0)
    return float(cold), float(warm)


def ns_per_element(step: Call, elements: int) -> float:
    """Return the median nanoseconds of `step` per element."""
    return 1e3 * microseconds(step, rounds=15) / elements
