"""Threading layers on a busy machine: ``python busy.py`` prints a table in Markdown.

Updates with two threads are compared with the serial kernel: on TBB; on OpenMP as fastopt
configures it without TBB, with threads that spin briefly while they wait; on OpenMP with the
default spin time; and on OpenMP with threads that sleep immediately. Two threads are used at every
size, even if fastopt itself would use one.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import product

import numpy as np

import fastopt
from fastopt import info
from fastopt._console import duration, table

__all__ = ["main"]

SIZES = (10_000, 65_536, 150_000, 1_000_000, 20_000_000)
OPTIMIZERS = ("adagrad", "adam")
COLUMNS: dict[str, dict[str, str | None]] = {
    "1 thread": {"NUMBA_NUM_THREADS": "1"},
    "TBB": {"NUMBA_THREADING_LAYER": "tbb"},
    "OpenMP": {"NUMBA_THREADING_LAYER": "omp"},
    "spinning": {"NUMBA_THREADING_LAYER": "omp", "GOMP_SPINCOUNT": "300000"},
    "passive": {"NUMBA_THREADING_LAYER": "omp", "OMP_WAIT_POLICY": "passive"},
}
"""Environment variables of the process of each column; 300,000 is libgomp's default."""
SETTINGS = ("NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
PAUSE = 0.02
"""Seconds to wait until the threads of another column have stopped spinning."""

WORKER = """
import json, sys, time
import numba, numpy as np
from fastopt import optimizer
from fastopt._kernels import chunks, host_table

parallel = numba.config.NUMBA_NUM_THREADS > 1
chunks.PARALLEL_FROM = host_table.PARALLEL_FROM = 0 if parallel else 1 << 62
current = step = None
for line in sys.stdin:
    name, size, seconds = json.loads(line)
    if current != (name, size):
        step = None  # frees the arrays of the previous one
        updater = optimizer.get_updater(optimizer.create(name))
        weight, grad = np.zeros(size, np.float32), np.ones(size, np.float32)
        step, current = lambda: updater(0, grad, weight), (name, size)
        step()
    time.sleep(PAUSE)
    step()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)
"""


class Column:
    """A process that measures updates on one threading layer."""

    def __init__(self, settings: dict[str, str | None], threads: int) -> None:
        env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER.replace("PAUSE", str(PAUSE))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"NUMBA_NUM_THREADS": str(threads)} | settings,
        )

    def __enter__(self) -> "Column":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def times(self, optimizer: str, size: int, seconds: float) -> list[float]:
        """Measure updates for about `seconds`, and return the seconds of each."""
        print(json.dumps([optimizer, size, seconds]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes inside the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cells(
    columns: Sequence[Column], optimizer: str, size: int, seconds: float, rounds: int
) -> list[np.ndarray]:
    """Return the seconds of updates by column; columns take turns, forwards and backwards."""
    times: list[list[float]] = [[] for _ in columns]
    for index in range(rounds):
        for k in range(len(columns))[:: -1 if index % 2 else 1]:
            times[k] += columns[k].times(optimizer, size, seconds / rounds)
    return [np.array(each) for each in times]


def written(times: np.ndarray) -> str:
    """Format the median and the 90th percentile."""
    return " / ".join(duration(float(np.percentile(times, p))) for p in (50, 90))


def environment(threads: int) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("numba", "numpy", "tbb"))
    return (
        f"{platform.system()} {platform.release()}, {info.processor()}, {os.cpu_count()} CPUs, "
        f"{threads} threads; Python {platform.python_version()}, fastopt {fastopt.__version__}, "
        f"{versions}; float32; median / 90th percentile"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 8], metavar="PROCESSES")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="ELEMENTS")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number, default 0.3")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        columns = [
            stack.enter_context(Column(settings, options.threads)) for settings in COLUMNS.values()
        ]
        for name in options.optimizers:  # compiles
            cells(columns, name, 1_000, 0, 1)
        lines = []
        for count in options.busy:
            with busy(count):
                for name, size in product(options.optimizers, options.sizes):
                    times = cells(columns, name, size, options.seconds, options.rounds)
                    lines.append([f"{name}, {size:,}, {count} busy", *map(written, times)])
    print(table(["update", *COLUMNS], lines, markdown=True))
    print(f"\n{environment(options.threads)}")


if __name__ == "__main__":
    main()
