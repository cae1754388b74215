"""The plot of the demo."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._console import Refused, need


def check(path: Path) -> None:
    """Check that a plot can be written to `path`, before anything is measured.

    Raises
    ------
    Refused
        matplotlib is missing, does not support the format, or the file cannot be written.
    """
    (backend,) = need("matplotlib.backend_bases")
    if path.suffix[1:].lower() not in backend.FigureCanvasBase.get_supported_filetypes():
        raise _refused(path, "its name must end in a format, such as .png")
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise _refused(path, error.strerror) from None
    if new:
        path.unlink(missing_ok=True)  # another rank may have


def race(
    losses: Sequence[Sequence[float]], times: Mapping[str, NDArray[Any]], title: str, path: Path
) -> None:
    """Plot the mean loss of each epoch over the time at its end.

    The losses are the same for all names; `times` are the cumulative seconds after each step.

    Raises
    ------
    Refused
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    ends = np.cumsum([len(epoch) for epoch in losses]) - 1
    means = [fmean(epoch) for epoch in losses]
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes: Any = figure.subplots()
    for name, seconds in times.items():
        axes.plot(seconds[ends], means, "o-", label=f"{name}: {float(seconds[-1]):.2f} s")
    axes.set(xlabel="seconds of gradients and updates", ylabel="mean loss of an epoch")
    axes.set(title=title, yscale="log", xlim=(0, None))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None


def _refused(path: Path, reason: object) -> Refused:
    return Refused(f"cannot write the plot to {str(path)!r}: {reason}")
