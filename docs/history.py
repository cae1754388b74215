"""The history of benchmark results, as asv stores them, and its picture.

The documentation build draws the times of LINES over the commits in ``asv_benchmarks/results``,
each relative to the oldest commit.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from pictures import DOCS, THEMES, axes

__all__ = ["LINES", "Commit", "commits", "draw_history", "history_files", "value"]

RESULTS = DOCS.parent / "asv_benchmarks" / "results"

LINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "import": ("imports.track_overhead", ()),
    "1 x 1,000": ("dispatch.Dispatch.track_update", ("'adam'",)),
    "4 x 1,000, new gradients": ("small.Few.track_time", ("'4 x 1,000'", "'adam'", "'new'")),
    "1,000 x 1,000, new gradients": ("tables.Small.track_update", ("'fresh'",)),
    "64 rows in any order": ("rows.Few.track_time", ("'permuted'", "64")),
    "512 rows in any order": ("rows.Few.track_time", ("'permuted'", "512")),
}
"""What is drawn: a name, the benchmark, and its parameters. All are steps of Adam, and times."""

Commit = tuple[datetime, str, Mapping[str, Any]]
"""Date, hash and results of a commit."""


def commits(results: Path = RESULTS) -> list[Commit]:
    """Return the commits with results, oldest first."""
    found = []
    for path in sorted(results.glob("*/*-*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        date = datetime.fromtimestamp(stored["date"] / 1000, UTC)
        found.append((date, stored["commit_hash"], stored["results"]))
    return sorted(found, key=lambda commit: commit[:2])


def value(results: Mapping[str, Any], benchmark: str, chosen: tuple[str, ...]) -> float | None:
    """Return a benchmark's result for parameters, or None if it has none."""
    if benchmark not in results:
        return None
    values, parameters = results[benchmark][:2]
    place = list(product(*parameters)).index(chosen)
    return None if values is None else values[place]


def history_files(theme: str = "light") -> list[str]:
    """Return the paths of the pictures of the history, relative to ``docs``."""
    return [f"_static/schedules/history-{theme}.svg"]


def draw_history(directory: Path = DOCS, results: Path = RESULTS) -> None:
    """Draw the time of each of LINES over the commits, relative to the oldest with a result."""
    found = commits(results)
    for theme, colors in THEMES.items():
        (path,) = history_files(theme)
        with axes(directory / path, theme, 6.8, 3.6, 9) as plot:
            plot.set_position((0.06, 0.13, 0.56, 0.84))
            ends: list[tuple[float, str, str, str]] = []
            reached: list[float] = []
            for number, (name, (benchmark, chosen)) in enumerate(LINES.items()):
                times = [value(results, benchmark, chosen) for _, _, results in found]
                points = [(k, time) for k, time in enumerate(times) if time is not None]
                if not points:
                    continue
                first = points[0][1]
                places = [k for k, _ in points]
                shares = [time / first for _, time in points]
                color = colors["bar" if number % 2 else "text"]
                style = ("-", "--", ":")[number // 2]
                plot.plot(places, shares, style, color=color, marker=".", lw=1.4)
                ends.append((shares[-1], name, color, style))
                reached += shares
            ticks = [date.strftime("%d %b\n%H:%M") for date, _, _ in found]
            plot.set_xticks(range(len(found)), ticks, fontsize=7)
            plot.set_yscale("log")
            shown = (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
            low, high = min(reached, default=1.0), max(reached, default=1.0)
            plot.set_yticks(shown, [f"{share:g}" for share in shown], minor=False)
            plot.minorticks_off()
            plot.set_ylim(low / 1.5, high * 1.2)
            _label(plot, ends, len(found) - 1)
            plot.spines[["top", "right"]].set_visible(False)


def _label(plot: Any, ends: list[tuple[float, str, str, str]], last: int) -> None:
    """Write the names beside the ends of their lines, apart from each other."""
    low = float("inf")
    for share, name, color, _ in sorted(ends, reverse=True):
        low = min(share, low / 1.28)
        plot.annotate(
            f"{name}: {share:.2g}",
            (last, share),
            (last * 1.06 + 0.1, low),
            va="center",
            color=color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5},
        )
