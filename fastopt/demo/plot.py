"""Plots for light and dark backgrounds, written to files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fastopt._console import Refused, need
from fastopt.reference import Array

GRAY = "#808080"
COLORS = ("#3b8ed0", "#e07b39", "#3aa76d", "#c65fa8", "#c39a1c", "#8078e0", "#d9534f", "#2aa5a0")
"""Colors as bright as the gray of the text, with contrast on both backgrounds."""


def check(path: Path) -> None:
    """Check that a plot can be written to `path`, before anything is measured.

    Raises
    ------
    Refused
        matplotlib is missing, does not support the format, or the file cannot be written.
    """
    (backend,) = need("matplotlib.backend_bases")
    formats = backend.FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise Refused(
            f"cannot write the plot to {str(path)!r}: its name must end in a format, such as .png"
        )
    where = path if path.exists() else path.parent
    if path.is_dir() or not where.exists():
        what = "it is a directory" if path.is_dir() else f"there is no directory {str(where)!r}"
        raise Refused(f"cannot write the plot to {str(path)!r}: {what}")
    if not os.access(where, os.W_OK):
        raise Refused(f"cannot write the plot to {str(path)!r}: permission denied")


@contextmanager
def axes(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield the axes of a figure of this size in inches, and write it to `path` afterwards.

    Raises
    ------
    Refused
        The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    parts = ("text.", "axes.edge", "axes.label", "xtick.", "ytick.", "grid.")
    style: dict[Any, Any] = {f"{part}color": GRAY for part in parts}
    style |= {"savefig.transparent": True, "legend.frameon": False, "grid.alpha": 0.3}
    style |= {"svg.fonttype": "path", "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure.subplots()
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise Refused(f"cannot write the plot to {str(path)!r}: {error}") from None


def race(
    losses: Sequence[Sequence[float]],
    times: Mapping[str, Array],
    title: str,
    label: str,
    path: Path,
) -> None:
    """Plot the mean of each part of `losses` over the time at its end, and compare the times.

    The losses are the same for all names; `times` are the cumulative seconds after each step. The
    first name is emphasized, and the others are compared with it.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    ends = np.cumsum([len(part) for part in losses]) - 1
    means = [fmean(part) for part in losses]
    with axes(path, 7, 4.2) as plot:
        for k, (name, seconds) in enumerate(times.items()):
            words = f"{name}: {float(seconds[-1]):.2f} s"
            look: dict[str, Any] = {"color": COLORS[k % len(COLORS)], "zorder": 9 - k}
            plot.plot(seconds[ends], means, linewidth=1.4 if k else 2.8, label=words, **look)
            plot.plot(seconds[ends[-1:]], means[-1:], "o", markersize=5 if k else 8, **look)
        plot.set(xlabel="seconds of gradients and updates", ylabel=label, yscale="log")
        plot.set_xlim(0)
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
        plot.grid(axis="y")
        plot.legend()
        first, *others = ((name, float(seconds[-1])) for name, seconds in times.items())
        ratios = [f"{name} {total / first[1]:.2f}" for name, total in others]
        statement = f"times as long as {first[0]} to the same loss: {', '.join(ratios)}"
        plot.set_title(statement if ratios else "", loc="left", size=10, color=GRAY)
        plot.figure.suptitle(title, size=13, weight="bold")
