"""Find performance regressions between two commits: ``python regressions.py BASE [HEAD]``.

Each commit runs in its own process, and the two take turns: other programs on the machine slow
both alike, so that ratios within a round are steadier than times. The benchmarks are the asv
suites in this directory. HEAD defaults to the working tree.

Benchmarks that look slower are measured again in new processes. The exit status is 1 if any is
slower both times.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

HERE = Path(__file__).parent
QUICK = r"^(dispatch|small|rows\.Few)\.|^tables\.Small\.|^norms\.Clip\..*\(1000\)$"
"""Benchmarks of calls on small arrays, where overhead around the kernels dominates."""


@dataclass(frozen=True)
class Comparison:
    """Times of two commits in the same rounds."""

    times: np.ndarray
    """Seconds of base and head, one row per round."""

    @cached_property
    def ratios(self) -> np.ndarray:
        """Ratio of head to base in each round, sorted."""
        return np.sort(self.times[:, 1] / self.times[:, 0])

    @property
    def ratio(self) -> float:
        """Median ratio of head to base."""
        return float(np.median(self.ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval of the median, at least 95%, by the sign test."""
        count = len(self.ratios)
        left = 0  # ratios dropped at each end
        tail = 1  # number of outcomes with fewer ratios below the median
        while tail <= 0.025 * 2**count:
            left += 1
            tail += comb(count, left)
        if not left:
            raise ValueError(f"an interval needs 6 rounds, got {count}")
        return float(self.ratios[left - 1]), float(self.ratios[count - left])

    def is_slower(self, factor: float) -> bool:
        """Whether the median ratio is above `factor`, and its interval above 1."""
        return self.ratio > factor and self.interval[0] > 1


class Side:
    """A process that runs the benchmarks with fastopt imported from `tree`.

    Parameters
    ----------
    tree : Path
        Root of a checkout.
    """

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "regressions.py"), "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = Path(self.ask("where"))
        if not found.is_relative_to(tree):
            raise RuntimeError(f"fastopt was imported from {found}, expected it in {tree}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call the method `what` of :class:`Server` in the process, and return its result."""
        print(json.dumps([what, *arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a benchmark's process ended with status {self._process.wait()}")
        return json.loads(answer)


class Server:
    """Methods that the process of a :class:`Side` serves; results are JSON-serializable."""

    def __init__(self) -> None:
        self.benchmark: Any = None

    @cached_property
    def known(self) -> dict[str, tuple[Any, int]]:
        """Benchmarks and their parameter index, by name."""
        from asv_runner.discovery import disc_benchmarks

        with contextlib.redirect_stderr(io.StringIO()):  # suites that this commit cannot import
            found = [b for b in disc_benchmarks("benchmarks", True) if b.type == "track"]
        known = {}
        for benchmark in found:
            for index in range(prod(map(len, benchmark.params))):
                benchmark.set_param_idx(index)
                values = ", ".join(map(repr, benchmark._current_params))
                name = f"{benchmark.name}({values})" if values else benchmark.name
                known[name] = benchmark, index
        return known

    def where(self) -> str:
        import fastopt

        return fastopt.__file__

    def names(self) -> list[str]:
        return list(self.known)

    def begin(self, name: str) -> str | None:
        """Set up a benchmark; return why that is impossible, or None."""
        self.benchmark, index = self.known[name]
        self.benchmark.set_param_idx(index)
        try:
            return "it does not apply" if self.benchmark.do_setup() else None
        except Exception as error:  # the commit may lack the measured feature
            return f"{type(error).__name__}: {error}"

    def measure(self) -> float:
        return float(self.benchmark.do_run())

    def end(self) -> None:
        self.benchmark.do_teardown()
        self.benchmark = None


def serve() -> None:
    """Serve requests, one line of JSON each, until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(HERE))
    server = Server()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(server, what)(*arguments)), file=answers, flush=True)


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Yield a directory with the files of a commit, or the working tree."""
    root = HERE.resolve().parent
    if commit is None:
        yield root
        return
    with TemporaryDirectory() as folder:
        command = ["git", "archive", "--format=tar", commit, "fastopt"]
        archive = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder).resolve()


def compared(sides: Sequence[Side], name: str, rounds: int) -> Comparison | str:
    """Measure a benchmark on both sides; return the times, or why that is impossible."""
    for side in sides:
        if why := side.ask("begin", name):
            return why
    for side in sides:
        side.ask("measure")  # warm-up: compiles kernels that setup did not
    times = np.empty((rounds, 2))
    for k in range(rounds):
        for side in (0, 1) if k % 2 else (1, 0):
            times[k, side] = sides[side].ask("measure")
    for side in sides:
        side.ask("end")
    return Comparison(times)


def line(name: str, found: Comparison | str, slower: bool) -> str:
    """Format a line of the table."""
    if isinstance(found, str):
        return f"{'':>30}  {name}: not measured, {found}"
    base, head = np.median(found.times, axis=0)
    low, high = found.interval
    mark = "slower" if slower else ""
    return f"{base:9.4g} {head:9.4g}  {found.ratio:5.2f} ({low:.2f} to {high:.2f})  {name}  {mark}"


def compare(sides: Sequence[Side], names: Sequence[str], rounds: int, factor: float) -> list[str]:
    """Print a line for each benchmark; return the names of the slower ones."""
    slower = []
    for number, name in enumerate(names, 1):
        if sys.stderr.isatty():
            print(f"\r\033[K{number} of {len(names)}: {name}", end="", file=sys.stderr)
        found = compared(sides, name, rounds)
        if not isinstance(found, str) and found.is_slower(factor):
            slower.append(name)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        print(line(name, found, name in slower[-1:]), flush=True)
    return slower


def chosen(sides: Sequence[Side], pattern: re.Pattern[str]) -> list[str]:
    """Return the benchmark names that match `pattern`; report and skip those new in the head."""
    before, names = (side.ask("names") for side in sides)
    names = [name for name in names if pattern.search(name)]
    new = [name for name in names if name not in before]
    if new:
        print(f"not in the base: {', '.join(new)}")
    return [name for name in names if name in before]


def expression(text: str) -> re.Pattern[str]:
    """Compile a regular expression from the command line."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="commit to compare with, such as HEAD~1 or main")
    parser.add_argument("head", nargs="?", help="the other commit; default: the working tree")
    parser.add_argument(
        "--bench",
        type=expression,
        default=re.compile(QUICK),
        metavar="REGEX",
        help="names of benchmarks, '.' for all; default: those of small arrays",
    )
    parser.add_argument("--rounds", type=int, default=9, help="at least 6; default 9")
    parser.add_argument("--factor", type=float, default=1.1, help="what is slower; default 1.1")
    options = parser.parse_args(argv)
    if options.rounds < 6:
        parser.error(f"--rounds must be at least 6, got {options.rounds}")
    if not options.factor >= 1:
        parser.error(f"--factor must be at least 1, got {options.factor}")
    with contextlib.ExitStack() as stack:
        try:
            trees = [stack.enter_context(checkout(c)) for c in (options.base, options.head)]
        except subprocess.CalledProcessError as error:
            parser.error(f"git has no such commit: {error.cmd[-2]}")
        with Side(trees[0]) as base, Side(trees[1]) as head:
            names = chosen([base, head], options.bench)
            if not names:
                parser.error(f"no benchmark matches {options.bench.pattern!r}")
            print(f"{'base':>9} {'head':>9}  ratio of the rounds, its 95% interval")
            slower = compare([base, head], names, options.rounds, options.factor)
        if slower:
            print("\nagain, in new processes:")
            with Side(trees[0]) as base, Side(trees[1]) as head:
                slower = compare([base, head], slower, options.rounds, options.factor)
    print(
        f"\n{len(slower)} of {len(names)} benchmarks are slower by more than "
        f"{100 * (options.factor - 1):.0f}%" + "".join(f"\n  {name}" for name in slower)
    )
    return int(bool(slower))


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
