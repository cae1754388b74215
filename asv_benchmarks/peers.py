"""One step in several libraries, as one table: dense, lists, row-sparse, half precision, rules.

Each library runs in its own process, on warm memory and with the same number of threads and CPUs.
The processes take turns. The first number of a line is fastopt's median time of a step; the others
are the median ratio of a library's time to fastopt's in the same round: more than 1 means slower
than fastopt. The limit is a loop that only reads and writes the memory that the step must; for a
row-sparse gradient, it reads and writes each indexed row once.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import half_steps
import list_steps
import llvmlite.binding
import numba
import row_steps
import rule_steps
import steps
from bars import all_bars
from race import Make, Race, note

import fastopt
from fastopt._console import Refused, duration, progress, table
from fastopt.info import FEATURES, processor

COLUMNS = {
    column: library
    for module in (steps, row_steps, list_steps, half_steps, rule_steps)
    for column, (library, _) in module.PEERS.items()
}
"""Library by column of the table."""

OURS = "fastopt"
Times = dict[str, tuple[float, float]]
"""Seconds and ratio to fastopt by column of the table."""


def installed() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    versions = {OURS: fastopt.__version__, "numba": numba.__version__}
    for library in COLUMNS.values():
        if library not in versions and find_spec(library):
            versions[library] = metadata.version(library)
    return versions


def cases(quick: bool) -> Iterator[tuple[str, dict[str, Make]]]:
    """Yield the label of each case, and the steps by column."""
    for module in (steps, list_steps, row_steps, half_steps, rule_steps):
        for words, arguments in module.CASES.items():
            if not (quick and any(isinstance(a, int) and a > 1_000_000 for a in arguments)):
                yield words, {c: partial(make, *arguments) for c, (_, make) in module.PEERS.items()}


def measure(only: str, quick: bool) -> dict[str, Times]:
    """Measure all cases; `quick` uses fewer rounds and skips large cases."""
    versions = installed()
    for library in dict.fromkeys(COLUMNS.values()):
        if library not in versions:
            note(f"{library}: skipped, it is not installed")
    chosen = [case for case in cases(quick) if re.search(only, case[0], re.IGNORECASE)]
    if not chosen:
        raise Refused(
            f"--only: no case matches {only!r}; there are {', '.join(dict(cases(quick)))}"
        )
    results = {}
    with Race() as race:
        for words, makes in progress(chosen, "case"):
            there = {column: make for column, make in makes.items() if COLUMNS[column] in versions}
            results[words] = race.run(there, words, rounds=5 if quick else 15)
    return results


def lines_of(results: dict[str, Times]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of the table, without empty columns."""
    columns = [column for column in COLUMNS if any(column in times for times in results.values())]
    head = ["step", *(f"{column}, time" if column == OURS else column for column in columns)]
    lines = []
    for words, times in results.items():
        cells = [f"{times[column][1]:.2f}" if column in times else "" for column in columns]
        cells[columns.index(OURS)] = duration(times[OURS][0])
        lines.append([words, *cells])
    return head, lines


def bars(only: str, quick: bool, markdown: bool) -> None:
    chosen = [bar for bar in all_bars(quick) if re.search(only, bar[0], re.IGNORECASE)]
    lines = [[what, bar, measure()] for what, bar, measure in progress(chosen, "bar")]
    print(table(["measurement", "bar", "measured"], lines, markdown))


def conditions() -> None:
    """Print the machine, settings and versions behind the numbers."""
    there = llvmlite.binding.get_host_cpu_features()
    print(
        f"\n{platform.system()} {platform.release().partition('-')[0]}, {processor()} "
        f"({llvmlite.binding.get_host_cpu_name()}: "
        f"{', '.join(name for name in FEATURES if there.get(name))}), {os.cpu_count()} cores, "
        f"{steps.THREADS} threads; Python {platform.python_version()}, "
        f"{', '.join(f'{library} {version}' for library, version in installed().items())}; "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def run(options: argparse.Namespace) -> None:
    if options.bars:
        bars(options.only, options.quick, options.markdown)
    else:
        if options.plot:
            from peers_plot import check, draw

            check(options.plot)
        results = measure(options.only, options.quick)
        print(table(*lines_of(results), options.markdown))
        if options.plot:
            draw({words: ratios(times) for words, times in results.items()}, options.plot)
    conditions()


def ratios(times: Times) -> dict[str, float]:
    return {column: ratio for column, (_, ratio) in times.items() if column != OURS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no large sizes")
    parser.add_argument("--only", default="", metavar="REGEX", help="lines to measure")
    parser.add_argument("--bars", action="store_true", help="fastopt against its own bars instead")
    parser.add_argument("--markdown", action="store_true", help="write the table in Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC"):
        os.environ[variable] = str(steps.THREADS)
    try:
        run(parser.parse_args())
    except Refused as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
