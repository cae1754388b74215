"""Helpers of the commands: one-line errors, optional packages, progress bars and tables."""

import os
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from shutil import get_terminal_size
from typing import Any, TypeVar

from fastopt._advice import choices, closest

T = TypeVar("T")

EXTRAS = {
    "demo": ("scikit-learn", "tqdm", "matplotlib"),
    "bfloat16": ("ml_dtypes",),
    "mpi": ("mpi4py", "mpich"),
}
"""Optional dependencies, by the extra that installs them."""

STARTERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Environment variables that MPI launchers set to the rank; each launcher sets one of them."""


def is_first_rank() -> bool:
    """Whether this process is rank 0 of an MPI job, or not in an MPI job."""
    return next((os.environ[name] for name in STARTERS if name in os.environ), "0") == "0"


class Refused(Exception):
    """A command cannot run as requested; the message is one line that says what to do."""


def unknown(name: str, known: Sequence[str]) -> str:
    """Return a message about a name that is not in `known`.

    Examples
    --------
    >>> from fastopt._console import unknown
    >>> unknown("adma", ["adam", "sgd"])
    "no 'adma'; did you mean 'adam'? The names are adam, sgd"
    """
    return f"no {name!r}; {choices(closest(name, known), known)}"


def need(*modules: str, extra: str = "demo") -> list[Any]:
    """Import modules of optional packages.

    Raises
    ------
    Refused
        A package is missing; the message names the packages that `extra` installs.
    """
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        raise Refused(
            f"another package is needed ({error}): pip install {' '.join(EXTRAS[extra])}"
        ) from None


def progress(tasks: Sequence[T], unit: str, what: str | None = None) -> Iterable[T]:
    """Iterate over `tasks` with a progress bar, if tqdm is installed.

    It is shown if standard error is a terminal, and removed at the end.

    Parameters
    ----------
    tasks : sequence
        The items.
    unit : str
        Name of one item in the progress bar.
    what : str, optional
        Text before the bar.

    Examples
    --------
    >>> from fastopt._console import progress
    >>> list(progress([], "task"))
    []
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return tasks
    bar: Iterable[T] = tqdm(tasks, what, unit=unit, leave=False, dynamic_ncols=True, disable=None)
    return bar


def say(text: str) -> None:
    """Print text in lines that fit the terminal.

    Examples
    --------
    >>> from fastopt._console import say
    >>> say("3 s")
    3 s
    """
    for line in text.splitlines():
        print(textwrap.fill(line, min(get_terminal_size().columns, 100)), flush=True)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Pad cells to the column widths; the first is left-aligned, the others right-aligned."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return [f"{cell:>{width}}" if k else f"{cell:<{width}}" for k, (cell, width) in pairs]


def duration(seconds: float) -> str:
    """Format a time in microseconds or milliseconds.

    Examples
    --------
    >>> from fastopt._console import duration
    >>> duration(1.5e-6), duration(0.0025)
    ('1.5 us', '2.50 ms')
    """
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Format a table with the first column left-aligned and the others right-aligned.

    Parameters
    ----------
    head : sequence of str
        Column titles.
    lines : sequence of sequence of str
        The rows, each with as many cells as `head`.
    markdown : bool
        Use Markdown syntax instead of plain text. Default False.

    Examples
    --------
    >>> from fastopt._console import table
    >>> print(table(["name", "size"], [["a", "10"], ["b", "7"]]))
    name  size
    ----  ----
    a       10
    b        7
    """
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    if markdown:
        rule = [rule[0], *(f"{dashes[:-1]}:" for dashes in rule[1:])]
    written = [_aligned(cells, widths) for cells in (head, rule, *lines)]
    if markdown:
        return "\n".join(f"| {' | '.join(cells)} |" for cells in written)
    return "\n".join("  ".join(cells).rstrip() for cells in written)
