"""One dense step of Adam and SGD in several libraries, as a Markdown table.

Every library runs in a process of its own, on its own warm memory and with the same number of
threads. The processes take turns; a cell holds the median time of a step and the median ratio to
fastopt's time in the same round. The limit reads and writes the memory that the step must, and
nothing else.
"""

import argparse
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import llvmlite.binding
import numba
import numpy as np
from benchmarks.common import (
    TABLE_SHAPE,
    Step,
    against_limit,
    first_steps,
    import_overhead,
    interleaved,
    microseconds,
    names,
    sampler,
)
from benchmarks.half import LARGE, slowdown, speedup_over_casts
from steps import LIBRARIES, PEERS, THREADS

import fastopt

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(iterable, **_):
        return iterable


SIZES = (1_000, 100_000, 1_000_000, 20_000_000, 50_000_000)


class Worker:
    """A process that measures one step whenever it is asked to."""

    def __init__(self, row: str, algorithm: str, size: int) -> None:
        self.row = row
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(
            target=serve, args=(pipe, row, algorithm, size), daemon=True
        )
        self._process.start()
        pipe.close()
        self.error = self._pipe.recv()

    def sample(self) -> float:
        time.sleep(0.01)  # until the threads of the process before no longer spin
        self._pipe.send(True)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(False)
        self._process.join()


def serve(pipe, row: str, algorithm: str, size: int) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the table alone goes to stdout
    try:
        sample = sampler(PEERS[row][1](algorithm, size))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".partition("\n")[0])
        return
    pipe.send(None)
    while pipe.recv():
        pipe.send(sample())


def race(rows: list[str], algorithm: str, size: int, rounds: int) -> dict[str, str]:
    """Cell of each row in the column of `size`."""
    workers = [Worker(row, algorithm, size) for row in rows]
    for worker in workers:
        if worker.error:
            note(f"{worker.row}, {algorithm}, {size:,}: skipped, {worker.error}")
    workers = [worker for worker in workers if not worker.error]
    times = interleaved([worker.sample for worker in workers], rounds)
    for worker in workers:
        worker.stop()
    return {
        worker.row: f"{duration(np.median(column))} ({np.median(column / times[:, 0]):.2f})"
        for worker, column in zip(workers, times.T, strict=True)
    }


def duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def note(line: str) -> None:
    print(line, file=sys.stderr)


def table(head: list[str], lines: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(cells) + " |")


def installed() -> dict[str, str]:
    """Version of every library that is there."""
    versions = {"fastopt": fastopt.__version__, "numba": numba.__version__}
    for library in LIBRARIES:
        if library not in versions and find_spec(library):
            versions[library] = metadata.version(library)
    return versions


def peers(only: str, quick: bool) -> None:
    versions = installed()
    for library in LIBRARIES:
        if library not in versions:
            note(f"{library}: skipped, it is not installed")
    sizes = SIZES[:3] if quick else SIZES
    lines = []
    for algorithm in ("adam", "sgd"):
        rows = [
            row
            for row, (library, _, algorithms) in PEERS.items()
            if library in versions and algorithm in algorithms
            if re.search(only, f"{algorithm} {row}", re.IGNORECASE)
        ]
        if not rows:
            continue
        rows = list(dict.fromkeys(["fastopt", *rows]))
        columns = [
            race(rows, algorithm, size, rounds=5 if quick else 15)
            for size in tqdm(sizes, desc=algorithm, leave=False)
        ]
        lines += [[algorithm, row, *(c.get(row, "") for c in columns)] for row in rows]
    table(["step", "library", *(f"{size:,}" for size in sizes)], lines)


Bar = tuple[str, str, Callable[[], str]]


def all_bars(quick: bool) -> Iterator[Bar]:
    """What is measured, the bar, and the function that measures it."""
    rounds = 5 if quick else 31

    def share(name: str, shape: int | tuple[int, ...]) -> str:
        return f"{against_limit(Step(name, shape), rounds)[1]:.3f}"

    yield (
        "Adam, 1,000 elements",
        "<= 8 us",
        lambda: f"{microseconds(Step('adam', 1_000), rounds):.1f} us",
    )
    yield "Adam, 1M elements, limit / time", ">= 0.70", lambda: share("adam", 1_000_000)
    yield "Adam, 50M elements, limit / time", ">= 0.95", lambda: share("adam", 50_000_000)
    yield (
        "import, over that of numba",
        "<= 0.15 s",
        lambda: f"{import_overhead(5 if quick else 11):.3f} s",
    )
    yield (
        "first step, kernels cached",
        "<= 0.3 s",
        lambda: f"{first_steps(1_000_000, 1 if quick else 5)[1]:.3f} s",
    )
    yield from half_bars(rounds)
    for name in names():
        yield f"{name}, 20M elements, limit / time", ">= 0.90", partial(share, name, TABLE_SHAPE)


def half_bars(rounds: int) -> Iterator[Bar]:
    """Those of half precision."""
    for dtype in ("float16", "bfloat16"):
        yield (
            f"Adam, {dtype} with masters, 20M elements, time / float32's",
            "<= 1.25",
            lambda dtype=dtype: f"{slowdown(f'{dtype}, masters', rounds=rounds):.3f}",
        )
    yield (
        "Adam, float16, 20M elements, casts with NumPy / masters",
        ">= 8",
        lambda: f"{speedup_over_casts('float16', min(rounds, 5)):.1f}",
    )
    yield (
        "Adam, 50M elements, float32 state / bfloat16 state",
        ">= 1.25",
        lambda: f"{1 / slowdown('float32, bfloat16 state', LARGE, rounds):.3f}",
    )


def bars(only: str, quick: bool) -> None:
    chosen = [bar for bar in all_bars(quick) if re.search(only, bar[0], re.IGNORECASE)]
    lines = [[what, bar, measure()] for what, bar, measure in tqdm(chosen, leave=False)]
    table(["measurement", "bar", "measured"], lines)


def conditions() -> None:
    """What the numbers above depend on."""
    features = llvmlite.binding.get_host_cpu_features()
    vector = ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "neon", "sve")
    print(
        f"\n{platform.platform()}, {processor()} ({llvmlite.binding.get_host_cpu_name()}: "
        f"{', '.join(f for f in vector if features.get(f))}), {os.cpu_count()} cores, "
        f"{THREADS} threads; Python {platform.python_version()}, "
        f"{', '.join(f'{library} {version}' for library, version in installed().items())}; "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows to measure")
    parser.add_argument("--bars", action="store_true", help="fastopt against its own bars instead")
    options = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC"):
        os.environ[variable] = str(THREADS)
    (bars if options.bars else peers)(options.only, options.quick)
    conditions()


if __name__ == "__main__":
    main()
