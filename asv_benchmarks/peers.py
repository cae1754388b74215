"""One step in several libraries, as Markdown tables: dense, of many tensors, row-sparse.

Every library runs in a process of its own, on its own warm memory and with the same number of
threads. The processes take turns; a cell holds the median time of a step and the median ratio to
fastopt's time in the same round. The limit reads and writes the memory that the step must, and
nothing else; so does the gather/scatter loop for the rows that a gradient lists.
"""

import argparse
import os
import platform
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import list_steps
import llvmlite.binding
import numba
import row_steps
import steps
from bars import all_bars
from race import note, race

import fastopt

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(iterable, **_):
        return iterable


SIZES = (1_000, 100_000, 1_000_000, 20_000_000, 50_000_000)


def duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def table(head: list[str], lines: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(cells) + " |")


def installed() -> dict[str, str]:
    """Version of every library that is there."""
    versions = {"fastopt": fastopt.__version__, "numba": numba.__version__}
    for library in steps.LIBRARIES:
        if library not in versions and find_spec(library):
            versions[library] = metadata.version(library)
    return versions


def peers(only: str, quick: bool) -> None:
    versions = installed()
    for library in steps.LIBRARIES:
        if library not in versions:
            note(f"{library}: skipped, it is not installed")
    sizes = {f"{size:,}": size for size in (SIZES[:3] if quick else SIZES)}
    lines = []
    for algorithm in ("adam", "sgd"):
        makes = {
            row: partial(make, algorithm)
            for row, (library, make, algorithms) in steps.PEERS.items()
            if library in versions and algorithm in algorithms
        }
        lines += race_all(algorithm, makes, {c: (size,) for c, size in sizes.items()}, only, quick)
    tables = [(sizes, lines)]
    for algorithm, module in (("adam, lists", list_steps), ("lazy adam", row_steps)):
        known = module.PEERS.items()
        makes = {row: make for row, (library, make) in known if library in versions}
        tables.append((module.COLUMNS, race_all(algorithm, makes, module.COLUMNS, only, quick)))
    for number, (columns, lines) in enumerate(filled for filled in tables if filled[1]):
        print("\n" * bool(number), end="")
        table(["step", "library", *columns], lines)


def race_all(
    algorithm: str,
    makes: Mapping[str, Callable],
    columns: Mapping[str, tuple],
    only: str,
    quick: bool,
) -> list[list[str]]:
    """Lines of a table: `makes` by row, called with the arguments in `columns`."""
    rows = [row for row in makes if re.search(only, f"{algorithm} {row}", re.IGNORECASE)]
    if not rows:
        return []
    rows = list(dict.fromkeys(["fastopt", *rows]))
    cells = []
    for name, arguments in tqdm(columns.items(), desc=algorithm, leave=False):
        raced = {row: partial(makes[row], *arguments) for row in rows}
        times = race(raced, f"{algorithm}, {name}", rounds=5 if quick else 15)
        cells.append(
            {row: f"{duration(time)} ({ratio:.2f})" for row, (time, ratio) in times.items()}
        )
    return [[algorithm, row, *(column.get(row, "") for column in cells)] for row in rows]


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
        f"{steps.THREADS} threads; Python {platform.python_version()}, "
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
        os.environ[variable] = str(steps.THREADS)
    (bars if options.bars else peers)(options.only, options.quick)
    conditions()


if __name__ == "__main__":
    main()
