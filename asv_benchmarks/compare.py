"""A step of each workload in several libraries, as a table: ``python compare.py [TABLE]``.

    peers     dense, many, row-sparse and half-precision weights in each library (the default)
    bars      the requirements of docs/performance.md, as far as they compare steps
    torch     fastopt.torch against torch.optim, with one thread
    matrices  optimizers for matrices in torch.optim or pytorch_optimizer, with one thread
    layers    threading layers; with --busy N beside N processes that keep the CPUs busy

Each column runs in its own process, on warm memory and with the same number of threads and CPUs.
The processes take turns. The first number of a line is the median time of the first column's step;
the others are medians of a column's time over the first one's in the same round: more than 1 is
slower. "limit" is a loop that only reads and writes the memory that the step must. Times of
threading layers are medians and 90th percentiles of samples, which take a millisecond or one call.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import llvmlite.binding
import numba
import numpy as np
from benchmarks.common import TABLE_SHAPE
from benchmarks.small import DEMO
from benchmarks.tables import SMALL, resnet50
from libraries import LIBRARIES, MASTERS, STATE, THREADS, Workload
from performance_page import PAGE, with_bars, with_peers
from race import Race, note

import fastopt
from fastopt import info, optimizer
from fastopt._console import Refused, duration, progress, table
from fastopt.info import FEATURES, processor
from fastopt.warmup import names

WORDS = {"adam": "Adam", "sgd": "SGD with momentum"}
POLICY = [(64, 8), (64,), (64, 64), (64,), (4, 64), (4,)]
POLICY += [(64, 8), (64,), (64, 64), (64,), (1, 64), (1,)]
"""Networks of 2 x 64 hidden units for an action and a value."""

MISSING = "not installed"

SINGLE = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Works = dict[str, Workload]
Times = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Table:
    """Workloads by label, and columns of LIBRARIES."""

    works: Works
    columns: tuple[str, ...]
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Least values by label and column; only these columns are measured."""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def dense(rule: str, *sizes: int, unit: str = "") -> Works:
    return {f"{WORDS[rule]}, {size:,}{unit}": Workload([(size,)], rule) for size in sizes}


def rows(kind: str, cold: bool = True) -> Works:
    label = f"lazy Adam, {kind} ids, {'cold' if cold else 'cached'}"
    return {label: Workload(rows=kind, cold=cold)}


def peers() -> Table:
    works = {
        **dense("adam", 1_000, 100_000, 1_000_000, 20_000_000, 50_000_000),
        **dense("sgd", 1_000, 100_000, 1_000_000, 20_000_000, 50_000_000),
        "Adam, 1,000 x 1,000": Workload(SMALL),
        "Adam, 1,000 x 1,000, fresh gradients": Workload(SMALL, fresh=True),
        "Adam, ResNet-50's 161 weights": Workload(resnet50()),
    }
    for cold in (True, False):
        for kind in ("sorted", "permuted", "zipf"):
            works |= rows(kind, cold)
    large = [(20_000_000,)]
    works["Adam, float16 with float32 masters, 20,000,000"] = Workload(large, half=MASTERS)
    works["Adam, float32 with bfloat16 state, 20,000,000"] = Workload(large, half=STATE)
    columns = "fastopt", "limit", "NumPy", "torch fused", "torch foreach", "optax", "DeepSpeed"
    return Table(works, (*columns, "torch SparseAdam"))


def bars() -> Table:
    few = {"4 x 1,000": [(1_000,)] * 4, "the demo's network": DEMO, "20 x 1,000": [(1_000,)] * 20}
    few = {
        f"{WORDS[rule]}, {label}, new gradients": Workload(shapes, rule, fresh=True)
        for label, shapes in few.items()
        for rule in WORDS
    }
    works = {
        **dense("adam", 10, 1_000, 100_000, 1_000_000, 20_000_000, 50_000_000, unit=" elements"),
        **dense("sgd", 1_000, unit=" elements"),
        **few,
        "Adam, 1,000 x 1,000": Workload(SMALL),
        "Adam, 1,000 x 1,000, fresh gradients": Workload(SMALL, fresh=True),
        **{f"{name}, 20M elements": Workload([TABLE_SHAPE], name) for name in names()},
        **rows("sorted"),
        **rows("permuted"),
        **rows("zipf"),
        "lazy Adam, 512 sorted ids": Workload(rows="sorted", cold=True, listed=512),
    }
    least = {
        "Adam, 10 elements": {"NumPy in place": 3.5, "torch fused": 12},
        "Adam, 1,000 elements": {"NumPy in place": 4, "torch fused": 12, "written loop": 0.9},
        "SGD with momentum, 1,000 elements": {"NumPy in place": 1.5},
        "Adam, 100,000 elements": {"written loop": 0.85},
        "Adam, 1,000,000 elements": {"written loop": 0.95, "limit": 0.7},
        "Adam, 20,000,000 elements": {"written loop": 0.95},
        "Adam, 50,000,000 elements": {"limit": 0.95},
        "Adam, 4 x 1,000, new gradients": {"NumPy in place": 5, "torch fused": 7},
        "Adam, the demo's network, new gradients": {"NumPy in place": 3.5},
        "SGD with momentum, the demo's network, new gradients": {"NumPy in place": 1.5},
        "Adam, 20 x 1,000, new gradients": {"NumPy in place": 9, "torch fused": 7},
        "Adam, 1,000 x 1,000": {"torch fused": 12},
        "Adam, 1,000 x 1,000, fresh gradients": {"torch fused": 9},
        "lazy Adam, sorted ids, cold": {"torch SparseAdam": 8, "limit": 0.6},
        "lazy Adam, permuted ids, cold": {"torch SparseAdam": 6, "limit": 0.6},
        "lazy Adam, zipf ids, cold": {"torch SparseAdam": 4},
        "lazy Adam, 512 sorted ids": {"limit": 0.5},
        **{f"{name}, 20M elements": {"limit": 0.9} for name in names()},
    }
    columns = "fastopt", "limit", "NumPy in place", "written loop", "torch fused"
    chosen = {label: works[label] for label in least}
    return Table(chosen, (*columns, "torch SparseAdam"), least)


def in_torch() -> Table:
    works = {
        "12 tensors of a policy network": Workload(POLICY),
        "1,000 tensors of 1,000": Workload(SMALL),
        "one tensor of 1,000,000": Workload([(1_000, 1_000)]),
        "1,024 rows of 100,000 x 64": Workload(rows="permuted", height=100_000, listed=1_024),
    }
    columns = "fastopt.torch", "torch fused", "torch foreach", "torch SparseAdam"
    return Table(works, columns, environments=dict.fromkeys(columns, SINGLE))


def matrices() -> Table:
    square, layer, wide = (512, 512), (768, 3072), (1024, 4096)
    sizes = {
        **dict.fromkeys(("sm3", "adafactor"), ((64, 64), square, wide)),
        "muon": ((64, 64), square, layer, wide),
        "soap": ((256, 256),),
    }
    works = {
        f"{optimizer.create(rule).__class__.__name__}, {rows} x {columns}": Workload(
            [(rows, columns)], rule
        )
        for rule, shapes in sizes.items()
        for rows, columns in shapes
    }
    works["Shampoo, 96 of 32 x 32"] = Workload([(32, 32)] * 96, "shampoo")
    columns = "fastopt", "torch.optim", "pytorch_optimizer"
    return Table(works, columns, environments=dict.fromkeys(columns, SINGLE))


def layers() -> Table:
    omp = {"NUMBA_THREADING_LAYER": "omp"}
    environments = {
        "1 thread": {"NUMBA_NUM_THREADS": "1"},
        "TBB": {"NUMBA_THREADING_LAYER": "tbb"},
        "OpenMP": omp,
        "spinning": {**omp, "GOMP_SPINCOUNT": "300000"},  # the default of GNU OpenMP
        "passive": {**omp, "OMP_WAIT_POLICY": "passive"},
    }
    works = {
        f"{rule}, {size:,}": Workload([(size,)], rule)
        for rule in ("adagrad", "adam")
        for size in (65_536, 150_000, 1_000_000, 20_000_000)
    }
    return Table(works, tuple(environments), environments=environments)


TABLES = {
    "peers": peers,
    "bars": bars,
    "torch": in_torch,
    "matrices": matrices,
    "layers": layers,
}


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


def installed(columns: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed libraries of columns."""
    versions = {"fastopt": fastopt.__version__, "numba": numba.__version__}
    for library in dict.fromkeys(LIBRARIES[column][0] for column in columns):
        if library not in versions and find_spec(library):
            versions[library] = metadata.version(library)
    return versions


def measure(asked: Table, only: str, quick: bool, short: bool = False) -> dict[str, Times]:
    """Return the seconds by round, column and label; `short` takes many short samples."""
    versions = installed(asked.columns)
    for library in dict.fromkeys(LIBRARIES[column][0] for column in asked.columns):
        if library not in versions:
            note(f"{library}: skipped, it is not installed")
    chosen = {
        label: work
        for label, work in asked.works.items()
        if re.search(only, label, re.IGNORECASE) and not (quick and work.is_large)
    }
    if not chosen:
        raise Refused(f"--only: no case matches {only!r}; there are {', '.join(asked.works)}")
    first, results = asked.columns[0], {}
    if LIBRARIES[first][0] not in versions:
        raise Refused(f"this table needs {LIBRARIES[first][0]}")
    with Race(0.001 if short else 0.01, asked.environments) as race:
        for label, work in progress(list(chosen.items()), "case"):
            needed = {first, *asked.bars.get(label, asked.columns)}
            makes = {
                column: partial(LIBRARIES[column][1], work)
                for column in asked.columns
                if column in needed and LIBRARIES[column][0] in versions
            }
            results[label] = race.run(makes, label, 31 if short else 5 if quick else 15)
    return results


def ratio(times: Times, column: str, first: str) -> float:
    return float(np.median(times[column] / times[first]))


def lines_of(asked: Table, results: Mapping[str, Times]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table, without empty columns."""
    columns = [column for column in asked.columns if any(column in t for t in results.values())]
    lines, first = [], columns[0]
    for label, times in results.items():
        cells = [f"{ratio(times, c, first):.2f}" if c in times else "" for c in columns[1:]]
        lines.append([label, duration(float(np.median(times[first]))), *cells])
    return ["step", f"{first}, time", *columns[1:]], lines


def lines_of_bars(asked: Table, results: Mapping[str, Times]) -> tuple[list[str], list[list[str]]]:
    lines = [
        [f"{label}, time of {column} / time", f">= {bar:g}",
         f"{ratio(times, column, 'fastopt'):.2f}" if column in times else MISSING]
        for label, times in results.items()
        for column, bar in asked.bars[label].items()
    ]  # fmt: skip
    return ["measurement", "bar", "measured"], lines


def lines_of_layers(results: Mapping[str, Times]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines with the median and the 90th percentile of each column."""
    lines = [
        [label, *(" / ".join(duration(float(np.percentile(t, p))) for p in (50, 90))
                  for t in times.values())]
        for label, times in results.items()
    ]  # fmt: skip
    return ["update", *next(iter(results.values()))], lines


def conditions(asked: Table) -> str:
    """Describe the machine, settings and versions behind the numbers."""
    there = llvmlite.binding.get_host_cpu_features()
    versions = installed(asked.columns)
    return (
        f"\n{platform.system()} {platform.release().partition('-')[0]}, {processor()} "
        f"({llvmlite.binding.get_host_cpu_name()}: "
        f"{', '.join(name for name in FEATURES if there.get(name))}), {os.cpu_count()} cores, "
        f"{THREADS} threads; Python {platform.python_version()}, "
        f"{', '.join(f'{library} {version}' for library, version in versions.items())}; "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def write() -> None:
    """Measure both tables of docs/performance.md, and write them, the processor and the picture."""
    if word := info.busy():
        raise Refused(f"--write: {word}")
    text, asked = PAGE.read_text(encoding="utf-8"), peers()
    found = lines_of(asked, measure(asked, "", quick=False))
    text = with_peers(text, *found, conditions(asked))
    _, lines = lines_of_bars(bars(), measure(bars(), "", quick=True))
    text = with_bars(text, [line for line in lines if line[2] != MISSING], processor())
    PAGE.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, PAGE.parent / "pictures.py"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=TABLES, default="peers")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no large sizes")
    parser.add_argument("--only", default="", metavar="REGEX", help="lines to measure")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside it")
    parser.add_argument(
        "--write", action="store_true", help="measure docs/performance.md, and write what it found"
    )
    options = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC"):
        os.environ[variable] = str(THREADS)
    asked, of_layers = TABLES[options.table](), options.table == "layers"
    try:
        if options.write:
            write()
            return 0
        with busy(options.busy):
            results = measure(asked, options.only, options.quick, of_layers)
    except Refused as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if of_layers:
        lines = lines_of_layers(results)
    else:
        lines = (lines_of_bars if asked.bars else lines_of)(asked, results)
    print(table(*lines, markdown=True))
    print(conditions(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
