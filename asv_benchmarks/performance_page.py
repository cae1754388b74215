"""The measured parts of docs/performance.md: tables and processor."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fastopt._console import Refused, table

__all__ = ["PAGE", "with_bars", "with_peers"]

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PEERS = re.compile(r"^\| step +\|.*\n(?:\|.*\n)+\n(?:.+\n)+\n", re.MULTILINE)
BARS = re.compile(r"^\| measurement \| bar \| AMD \|.*\n(?:\|.*\n)+", re.MULTILINE)
MAKERS = "AMD", "Intel"
"""Makers of processors, of which the table of bars has a column each."""


def with_peers(
    page: str, head: Sequence[str], lines: Sequence[Sequence[str]], conditions: str
) -> str:
    """Return the page with another table of libraries and its conditions in the paragraph below.

    Raises
    ------
    Refused
        A column of the page was not measured, because its library is not installed.
    """
    (old,) = PEERS.findall(page)
    columns = [cell.strip() for cell in old.partition("\n")[0].split("|")[1:-1]]
    if missing := [column for column in columns if column not in head]:
        raise Refused(f"--write: the page also has {', '.join(missing)}; install these libraries")
    below = textwrap.fill(conditions.strip(), 100, break_on_hyphens=False)
    return page.replace(old, f"{table(head, lines, markdown=True)}\n\n{below}\n\n")


def with_bars(page: str, lines: Sequence[Sequence[str]], processor: str) -> str:
    """Return the page with other numbers in the column of the maker of this processor.

    Raises
    ------
    Refused
        The page has no column of this maker.
    """
    (old,) = BARS.findall(page)
    head, rule, *rows = (_cells(line) for line in old.splitlines())
    maker = next((maker for maker in MAKERS if maker in processor), "")
    if maker not in head:
        raise Refused(f"--write: the table of bars has no column for {processor}")
    known = {row[0]: row for row in rows}
    for what, bar, measured in lines:
        row = known.setdefault(what, [what, *[""] * (len(head) - 1)])
        row[head.index("bar")], row[head.index(maker)] = bar, measured
    return page.replace(
        old, "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *known.values()))
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]
