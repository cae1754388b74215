"""What the commands share: refusals in a line, packages that they need, progress bars, tables."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar

__all__ = ["Refused", "duration", "need", "progress", "table"]

T = TypeVar("T")


class Refused(Exception):
    """A command cannot run as asked; the message is one line that says what to do."""


def need(*modules: str, extra: str = "demo") -> list[Any]:
    """Import modules of other packages.

    Raises
    ------
    Refused
        A package is missing, which the `extra` of fastopt installs.
    """
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        raise Refused(
            f'another package is needed ({error}): pip install "fastopt[{extra}]"'
        ) from None


def progress(tasks: Sequence[T], unit: str) -> Iterable[T]:
    """Go through `tasks` with a progress bar on standard error, if tqdm is installed.

    Parameters
    ----------
    tasks : sequence
        What is gone through.
    unit : str
        What one of them is called.

    Examples
    --------
    >>> from fastopt.console import progress
    >>> list(progress([], "task"))
    []
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return tasks
    bar: Iterable[T] = tqdm(tasks, unit=unit, leave=False)
    return bar


def duration(seconds: float) -> str:
    """Time in microseconds or milliseconds.

    Examples
    --------
    >>> from fastopt.console import duration
    >>> duration(1.5e-6), duration(0.0025)
    ('1.5 us', '2.50 ms')
    """
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Lay out a table, its first column to the left and the others to the right.

    Parameters
    ----------
    head : sequence of str
        What the columns hold.
    lines : sequence of sequence of str
        As many cells in each line.
    markdown : bool
        In Markdown instead of with blanks alone. Default False.

    Examples
    --------
    >>> from fastopt.console import table
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
    written = []
    for cells in (head, rule, *lines):
        first, *rest = zip(cells, widths, strict=True)
        aligned = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]
        written.append(f"| {' | '.join(aligned)} |" if markdown else "  ".join(aligned).rstrip())
    return "\n".join(written)
