"""Plots that can be read on light and on dark backgrounds, written to files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from fastopt.console import Refused, need

__all__ = ["COLORS", "GRAY", "axes", "check", "curves"]

GRAY = "#808080"
COLORS = ("#3b8ed0", "#e07b39", "#3aa76d", "#c65fa8", "#c39a1c", "#8078e0", "#d9534f", "#2aa5a0")
"""Colors as bright as the gray of the text, which both backgrounds set off."""


def check(path: Path) -> None:
    """See that a plot can be written to `path`, before there is anything to draw.

    Raises
    ------
    Refused
        matplotlib is missing, knows no such format, or the file cannot be written.
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
    """Axes of a figure of so many inches, which is written to `path` afterwards.

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


def curves(losses: Mapping[str, Sequence[Sequence[float]]], label: str, path: Path) -> None:
    """Draw the losses of the steps of each optimizer, as means over a part of an epoch."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with axes(path, 7, 4) as plot:
        for (name, epochs), color in zip(losses.items(), cycle(COLORS), strict=False):
            loss = np.concatenate(epochs)
            window = max(len(epochs[0]) // 2, 1)
            mean = np.convolve(loss, np.full(window, 1 / window), "valid")
            steps = np.arange(window, len(loss) + 1)
            plot.plot(steps, mean, color=color, linewidth=1.4, label=name)
        plot.set(xlabel="step", ylabel=label, yscale="log")
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
        plot.grid(axis="y")
        plot.legend()
