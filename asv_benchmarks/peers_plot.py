"""Plot of peers.py: times of other libraries relative to fastopt for the same step."""

from collections.abc import Mapping
from pathlib import Path

from fastopt.demo.plot import COLORS, GRAY, axes, check

__all__ = ["check", "draw"]

MARKERS = "|os^DvPX"


def draw(ratios: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw a row of dots for each case from its ratios by column, and write it to `path`."""
    columns = list(dict.fromkeys(column for times in ratios.values() for column in times))
    with axes(path, 8, 1.2 + 0.25 * len(ratios)) as plot:
        for k, column in enumerate(columns):
            points = [
                (times[column], y) for y, times in enumerate(ratios.values()) if column in times
            ]
            color = GRAY if column == "limit" else COLORS[k % len(COLORS)]
            marker = MARKERS[k % len(MARKERS)]
            size = 9 if column == "limit" else 5.5
            plot.plot(
                *zip(*points, strict=True), marker, color=color, label=column, markersize=size
            )
        plot.axvline(1, color=GRAY, linewidth=1)
        plot.set(xscale="log", xlabel="time of a step / fastopt's time")
        plot.set_yticks(range(len(ratios)), list(ratios))
        plot.set_ylim(len(ratios) - 0.5, -0.5)
        plot.xaxis.set_major_formatter("{x:g}")
        plot.grid(axis="both")
        plot.figure.legend(loc="outside lower center", ncols=4)
