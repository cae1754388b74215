"""What the measurements share: steps on warm memory, the limit they are held to, the clock."""

import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
from numba import njit, prange

from fastopt import optimizer
from fastopt.kernels.rule import Rule
from fastopt.optimizer.border import leaves

# Without it, GNU OpenMP may keep two threads on one core of a small virtual machine.
os.environ.setdefault("OMP_PROC_BIND", "true")

Call = Callable[[], None]
Sample = Callable[[], float]

TABLE_SHAPE = (312_500, 64)
"""20 million elements, in rows for the rules with one state number for each row."""

CHUNK = 32_768


@njit(parallel=True, error_model="numpy", cache=True)
def _write(arrays, zero):
    """Read all arrays and write all but the gradient, ``arrays[1]``, with the same values.

    Pieces of the arrays in turn are up to 1.4 times faster in cache than all in one inner loop.
    """
    size = len(arrays[0])
    for chunk in prange((size + CHUNK - 1) // CHUNK):
        first = chunk * CHUNK
        last = min(first + CHUNK, size)
        weight, grad = arrays[0][first:last], arrays[1][first:last]
        for i in range(len(weight)):
            weight[i] -= zero * grad[i]
        for k in range(2, len(arrays)):
            rows = size // len(arrays[k])
            state = arrays[k][first // rows : last // rows]
            for i in range(len(state)):
                state[i] -= zero


@njit(parallel=True, error_model="numpy", cache=True, fastmath={"reassoc", "nsz"})
def _read(arrays):
    size = len(arrays[0])
    chunks = (size + CHUNK - 1) // CHUNK
    total = np.zeros(chunks, np.float32)
    for chunk in prange(chunks):
        first = chunk * CHUNK
        last = min(first + CHUNK, size)
        for k in range(len(arrays)):
            part = arrays[k][first:last]
            sum_ = np.float32(0)
            for i in range(len(part)):
                sum_ += part[i]
            total[chunk] += sum_
    return total


class Step:
    """A call that updates one float32 weight, compiled and on touched memory.

    Parameters
    ----------
    name : str
        Registered name of the optimizer.
    shape : int or tuple of int
        Shape of the weight.
    **kwargs
        Arguments of the optimizer.
    """

    def __init__(self, name: str, shape: int | tuple[int, ...], **kwargs: object) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.weight, self.grad = draw(shape, np.float32), draw(shape, np.float32)
        self.updater = optimizer.get_updater(optimizer.create(name, **kwargs))
        self()
        arrays = (self.weight, self.grad, *leaves(self.updater.states[0]))
        self._arrays = tuple(array.reshape(-1) for array in arrays)
        self._passes = [
            tuple(self._arrays[k] for k in used) for used in _used(self.updater.optimizer.rule)
        ]

    def __call__(self) -> None:
        self.updater(0, self.grad, self.weight)

    def limit(self) -> None:
        """Read and write the memory that the update must, and nothing else.

        Weight, gradient and state are read and all but the gradient written; each pass of the
        rule reads what it depends on once more.
        """
        for arrays in self._passes:
            _read(arrays)
        _write(self._arrays, np.float32(0))


def _used(rule: Rule) -> list[list[int]]:
    """Positions among (weight, gradient, *state) that reach the sums of each pass, as NaN does."""
    h = np.ones(1, rule.record(np.float64))[0]
    numbers = np.where(np.eye(2 + len(rule.state), dtype=bool), math.nan, 1.0)
    return [
        [k for k, (w, g, *s) in enumerate(numbers) if np.isnan(sums(w, g, tuple(s), h)).any()]
        for sums, _ in rule.passes
    ]


def names() -> list[str]:
    """Names of all optimizers with a rule, without deprecated aliases."""
    registry = optimizer.Optimizer.opt_registry
    return [name for name in sorted(registry) if _ruled(registry[name])]


def _ruled(klass: type[optimizer.Optimizer]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return klass().rule is not None
        except DeprecationWarning:
            return False


def seconds(call: Call, number: int) -> float:
    """Mean seconds of `call`, after one that brings its memory back into the caches."""
    call()
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def sampler(call: Call, duration: float = 0.01) -> Sample:
    """Function that returns the seconds of `call`, each time as a mean over about `duration`."""
    return partial(seconds, call, max(1, round(duration / seconds(call, 1))))


def interleaved(samples: Sequence[Sample], rounds: int) -> np.ndarray:
    """Results of all `samples` in each round; every other round goes backwards.

    Other programs on the machine slow neighbours in a round alike, so that ratios within a
    round are steadier than ratios of medians.
    """
    times = np.empty((rounds, len(samples)))
    for index, row in enumerate(times):
        for k in range(len(samples))[:: -1 if index % 2 else 1]:
            row[k] = samples[k]()
    return times


def ratio(call: Call, other: Call, rounds: int = 15) -> float:
    """Median of the time of `call` over that of `other` in the same round."""
    times = interleaved([sampler(call), sampler(other)], rounds)
    return float(np.median(times[:, 0] / times[:, 1]))


def against(limit: Call, step: Call, rounds: int = 15) -> tuple[float, float]:
    """Median seconds of `step`, and the share of the limit's speed that it reaches."""
    times = interleaved([sampler(step), sampler(limit)], rounds)
    return float(np.median(times[:, 0])), float(np.median(times[:, 1] / times[:, 0]))


def against_limit(step: Step, rounds: int = 15) -> tuple[float, float]:
    """What :func:`against` returns, for the limit of the step's own arrays."""
    return against(step.limit, step, rounds)


def microseconds(step: Call, rounds: int = 31) -> float:
    """Median microseconds of `step`."""
    return 1e6 * float(np.median(interleaved([sampler(step)], rounds)))


def fresh(statement: str, setup: str = "", **environ: str) -> float:
    """Seconds that `statement` takes in a new process, after `setup`."""
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
    """Median seconds by which an import of fastopt takes longer than one of numba."""
    imports = [partial(fresh, "import fastopt"), partial(fresh, "import numba")]
    times = interleaved(imports, rounds)
    return float(np.median(times[:, 0] - times[:, 1]))


def first_steps(size: int, rounds: int = 3) -> tuple[float, float]:
    """Median seconds of Adam's first step in a new process after the imports.

    First with an empty cache of compiled kernels, then with the one that this leaves behind.
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
