"""Pictures of the documentation, each in a light and a dark version.

``python docs/pictures.py`` redraws the comparison with other libraries from the tables of
``docs/performance.md`` into ``docs/_static``. The documentation build draws the schedules, the
errors of 8-bit state, the layers of ``architecture.md``, and the comparison of optimizers from the
results in ``which-optimizer.json``.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastopt import lr_scheduler as schedules

__all__ = [
    "Row",
    "axes",
    "described",
    "draw_codes",
    "draw_compared",
    "draw_comparison",
    "draw_layers",
    "draw_schedules",
    "layers",
    "rows",
    "schedule_files",
]

DOCS = Path(__file__).parent
STATIC = DOCS / "_static"
THEMES = {
    "light": {"text": "#222832", "soft": "#5a6370", "bar": "#2b7bba", "pale": "#a9cbe6"},
    "dark": {"text": "#e2e6ea", "soft": "#a8b1bb", "bar": "#4fa3e3", "pale": "#2f5878"},
}


@dataclass(frozen=True)
class Row:
    """An alternative to fastopt, and its step time relative to fastopt by workload."""

    name: str
    ratios: dict[str, float]


SMALL, LARGE = "1,000 elements", "20 million elements"
TABLE = "8,192 rows of a table of 1,000,000 x 64"
COLUMNS = {"NumPy": "NumPy", "torch.optim, fused": "torch fused", "optax, jitted": "optax"}
WRITTEN = "Adam, {} elements, time of written loop / time"


def rows(page: str) -> list[Row]:
    """Return the rows of the picture, from the tables of a page.

    Raises
    ------
    KeyError
        A table, row or column is missing from the page.
    """
    table, bars = _table(page, "step"), _table(page, "measurement")
    sizes = {SMALL: "1,000", LARGE: "20,000,000"}
    found = {
        name: {size: float(table[f"Adam, {n}"][column]) for size, n in sizes.items()}
        for name, column in COLUMNS.items()
    }
    loop = {size: float(bars[WRITTEN.format(n)]["AMD"]) for size, n in sizes.items()}
    sparse = {TABLE: float(table["lazy Adam, zipf ids, cold"]["torch SparseAdam"])}
    numpy, fused, optax = (Row(name, ratios) for name, ratios in found.items())
    written = Row("a loop of your own with numba.njit", loop)
    return [numpy, written, fused, optax, Row("torch.optim.SparseAdam", sparse)]


def _table(page: str, first: str) -> dict[str, dict[str, str]]:
    """Return cells by row and column of the first table whose first column is named `first`."""
    match = re.search(rf"^\| {first} +\|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    if match is None:
        raise KeyError(first)
    head, _, *lines = ([c.strip() for c in line.split("|")[1:-1]] for line in match[0].splitlines())
    return {cells[0]: dict(zip(head, cells, strict=True)) for cells in lines}


@contextmanager
def axes(path: Path, theme: str, width: float, height: float, size: float) -> Iterator[Any]:
    """Yield axes that fill a figure of this size in inches, and write it to `path` afterwards."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = THEMES[theme]
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text is not converted to paths
        "svg.hashsalt": path.stem,  # equal pictures give equal files
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "font.size": size,
        "text.color": colors["text"],
        "savefig.transparent": True,
    }
    for part in ("axes.edge", "axes.label", "xtick.", "ytick."):
        style[f"{part}color"] = colors["soft"]
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="none")
        yield figure.add_axes((0, 0, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def draw_comparison(found: Sequence[Row], directory: Path = STATIC) -> None:
    """Draw bars of times relative to fastopt's."""
    for theme, colors in THEMES.items():
        path = directory / f"comparison-{theme}.svg"
        with axes(path, theme, 5.4, 4.4, 9.5) as plot:
            _bars(plot, found, colors)


def _bars(plot: Any, found: Sequence[Row], colors: dict[str, str]) -> None:
    longest = max(ratio for row in found for ratio in row.ratios.values())
    top = 0.0
    for row in found:
        plot.text(0, top, row.name, va="center", weight="bold")
        top += 0.95
        ends = [top - 0.45, top + 0.8 * len(row.ratios) - 0.35]
        plot.plot([1, 1], ends, color=colors["text"], linewidth=1, zorder=3)
        for size, ratio in row.ratios.items():
            plot.barh(top, ratio, 0.62, color=colors["pale" if size == LARGE else "bar"])
            plot.text(ratio + longest / 80, top, f"{ratio:.1f}", va="center", weight="bold")
            label = longest / 80 * (10 if ratio >= 10 else 8)
            plot.text(ratio + label, top, size, va="center", color=colors["soft"])
            top += 0.8
        top += 0.35
    title = "Time of a step of Adam, relative to fastopt"
    plot.text(0, -2.2, title, va="center", size=11, weight="bold")
    words = "float32, two cores; the line is at 1, the time of fastopt; lower is better"
    plot.text(0, -1.3, words, va="center", color=colors["soft"])
    plot.set(xlim=(-longest / 100, 1.42 * longest), ylim=(top - 0.6, -2.8))
    plot.set_axis_off()


def drawn_schedules() -> dict[str, schedules.LRScheduler]:
    """Return an example of each schedule for 120 updates, by class name."""
    plateau = schedules.PlateauScheduler(factor=0.5, patience=10, base_lr=0.4)
    warm = schedules.FactorScheduler(step=1000, base_lr=0.4, warmup_steps=30)
    cosine = schedules.CosineScheduler(max_update=60, base_lr=0.4)
    examples = (
        schedules.FactorScheduler(step=20, factor=0.5, base_lr=0.4),
        schedules.ExponentialScheduler(step=20, factor=0.5, base_lr=0.4),
        schedules.MultiFactorScheduler(step=[50, 90], factor=0.3, base_lr=0.4),
        schedules.PolyScheduler(max_update=100, base_lr=0.4, warmup_steps=10),
        schedules.CosineScheduler(max_update=100, base_lr=0.4, warmup_steps=10),
        schedules.CosineRestartsScheduler(period=17, base_lr=0.4, period_mult=2),
        schedules.WSDScheduler(100, 40, base_lr=0.4, cooldown="1-sqrt", warmup_steps=10),
        schedules.InverseRootScheduler(base_lr=0.4, warmup_steps=10),
        schedules.OneCycleScheduler(max_update=100, base_lr=0.4),
        plateau,
        schedules.JoinedScheduler([warm, cosine], boundaries=[60]),
    )
    return {type(schedule).__name__: schedule for schedule in examples}


def schedule_files(theme: str = "light") -> list[str]:
    """Return the paths of the pictures of schedules, relative to ``docs``."""
    return [f"_static/schedules/{name}-{theme}.svg" for name in drawn_schedules()]


def draw_schedules(directory: Path = DOCS) -> None:
    """Draw the learning rate of each schedule over the number of updates."""
    for theme, colors in THEMES.items():
        for name, schedule in drawn_schedules().items():
            path = directory / f"_static/schedules/{name}-{theme}.svg"
            with axes(path, theme, 2.9, 1.9, 9) as plot:
                plot.plot(range(121), _rates(schedule), color=colors["bar"], linewidth=2)
                plot.set_position((0.13, 0.21, 0.8, 0.63))
                plot.set(ylim=(-0.02, 0.44), xlim=(0, 120), xlabel="updates")
                plot.set_yticks([0, 0.2, 0.4])
                plot.set_xticks([0, 40, 80, 120])
                plot.spines[["top", "right"]].set_visible(False)
                plot.set_title(name, size=10, loc="left", color=colors["text"], weight="bold")


def _rates(schedule: schedules.LRScheduler) -> list[float]:
    """Return 121 learning rates; the metric of PlateauScheduler stalls from step 40 on."""
    found = []
    for n in range(121):
        if isinstance(schedule, schedules.PlateauScheduler):
            schedule.step(-min(n, 40))
        found.append(schedule(n))
    return found


LINES = {
    "m alone, linear": ("int8", 1),
    "√v, as stored": ("uint8", 2),
}
"""8-bit state: dtype of the codes, and the power of the plotted value that is stored."""


def code_errors() -> dict[str, tuple[Any, Any]]:
    """Return values as shares of the largest in a block and their relative errors in 8 bits.

    Values that become zero have an error of 1.
    """
    import numpy as np

    from fastopt._kernels.codes import decoded, encoded

    shares = np.logspace(-6, 0, 3001)
    found = {}
    for name, (kind, power) in LINES.items():
        rows = np.ones((len(shares), 2), np.float32)
        rows[:, 0] = shares**power
        kept = decoded(*encoded(rows, np.dtype(kind)))[:, 0].astype(float) ** (1 / power)
        found[name] = shares, abs(kept / shares - 1)
    linear = np.rint(shares * 255) / 255
    found["√v, linear"] = shares, abs(linear / shares - 1)
    return found


def code_files(theme: str = "light") -> list[str]:
    """Return the path of the picture of 8-bit errors, relative to ``docs``."""
    return [f"_static/schedules/codes-{theme}.svg"]


def draw_codes(directory: Path = DOCS) -> None:
    """Draw the largest 8-bit error near each value, as a share of the block's largest."""
    import numpy as np

    for theme, colors in THEMES.items():
        (path,) = code_files(theme)
        with axes(directory / path, theme, 6.2, 3.2, 9) as plot:
            styles = zip(
                (colors["bar"], colors["text"], colors["soft"]), ("-", "-", ":"), strict=True
            )
            for (name, (shares, errors)), (color, line) in zip(
                code_errors().items(), styles, strict=True
            ):
                around = np.lib.stride_tricks.sliding_window_view(errors, 61).max(axis=1)
                plot.loglog(shares[30:-30], around, line, color=color, linewidth=2, label=name)
            plot.set_position((0.1, 0.17, 0.87, 0.7))
            plot.set(xlim=(1e-6, 1), ylim=(1e-3, 1.5), xlabel="share of the block's largest")
            plot.spines[["top", "right"]].set_visible(False)
            plot.legend(frameon=False, labelcolor=colors["text"], loc="lower left")
            title = "relative error in 8 bits; 1: the number becomes 0"
            plot.set_title(title, size=10, loc="left", color=colors["text"], weight="bold")


def layers(page: str) -> dict[str, list[str]]:
    """Return the modules of each layer of the package, top first, from the table of a page."""
    table = _table(page, "layer").items()
    return {name: re.findall(r"`([\w.]+)`", cells["modules"]) for name, cells in table}


def layer_files(theme: str = "light") -> list[str]:
    """Return the path of the picture of the layers, relative to ``docs``."""
    return [f"_static/schedules/layers-{theme}.svg"]


def draw_layers(directory: Path = DOCS) -> None:
    """Draw the layers of the package as a stack of boxes."""
    found = layers((DOCS / "architecture.md").read_text(encoding="utf-8"))
    for theme, colors in THEMES.items():
        (path,) = layer_files(theme)
        with axes(directory / path, theme, 6.6, 0.42 * len(found), 9) as plot:
            for height, (name, modules) in enumerate(reversed(found.items())):
                color = colors["bar" if name in ("engine", "kernels") else "pale"]
                plot.barh(height, 1, 0.86, color=color, alpha=0.35)
                plot.text(0.02, height, name, va="center", weight="bold")
                plot.text(0.19, height, "   ".join(modules), va="center")
            plot.set(xlim=(0, 1), ylim=(-0.5, len(found) - 0.5))
            plot.set_axis_off()


COMPARED = DOCS / "which-optimizer.json"
DRAWN = ("AdamW", "Muon", "SOAP")
"""Optimizers whose losses are plotted."""

NAMED = 4
"""Number of optimizers with the highest scores that are named in a picture of profiles."""


def compared_files(theme: str = "light") -> list[str]:
    """Return the paths of the pictures that compare optimizers, relative to ``docs``."""
    return [f"_static/schedules/{name}-{theme}.svg" for name in ("losses", "profiles")]


def draw_compared(directory: Path = DOCS, path: Path = COMPARED) -> None:
    """Draw the losses and profiles of the comparison of optimizers."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for theme, colors in THEMES.items():
        losses, profiles = (directory / file for file in compared_files(theme))
        with axes(losses, theme, 6.6, 3.3, 9) as plot:
            _losses(plot, found, colors)
        with axes(profiles, theme, 7.2, 3.9, 9) as plot:
            _profiles(plot, found, colors)


def steps_to_target(found: Any, name: str, model: str) -> float:
    """Return the median steps to the target, infinite if most seeds do not reach it."""
    steps = found["optimizers"][name][model]["steps"]
    return median(float("inf") if n is None else n for n in steps)


def losses_title(found: Any) -> str:
    """Return the title of the picture of losses."""
    base, *others = (
        [steps_to_target(found, name, model) for model in _drawn_models(found)] for name in DRAWN
    )
    first, second = (list(map(_share, own, base)) for own in others)
    return (
        f"{DRAWN[1]} takes {first[0]} of {DRAWN[0]}'s steps on digits, {first[1]} on characters; "
        f"{DRAWN[2]} {second[0]}, {second[1]}"
    )


def _share(own: float, theirs: float) -> str:
    return f"{100 * own / theirs:.0f}%" if own < float("inf") else "more than 100%"


def _drawn_models(found: Any) -> list[str]:
    return [model for model in found["models"] if model in ("digits", "characters")]


def _losses(plot: Any, found: Any, colors: dict[str, str]) -> None:
    models = _drawn_models(found)
    styles = ((colors["soft"], "-"), (colors["bar"], "-"), (colors["text"], "--"))
    figure = plot.figure
    figure.text(0.03, 0.93, losses_title(found), size=9.5, weight="bold")
    for k, model in enumerate(models):
        facts = found["models"][model]
        panel = figure.add_axes((0.08 + 0.49 * k, 0.14, 0.4, 0.64))
        steps = range(found["every"], facts["steps"] + 1, found["every"])
        for name, (color, line) in zip(DRAWN, styles, strict=True):
            low, middle, high = (
                [float("nan") if loss is None else loss for loss in losses]
                for losses in found["curves"][model][name]
            )
            panel.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
            panel.plot(steps, middle, line, color=color, linewidth=1.6, label=name)
        panel.axhline(facts["target"], color=colors["soft"], linewidth=0.8, linestyle=":")
        middles = [found["curves"][model][name][1] for name in DRAWN]
        least = min(loss for each in middles for loss in each if loss is not None)
        panel.set(xlim=(0, facts["steps"]), xlabel="steps", yscale="log")
        panel.set_ylim(0.9 * least, 1.05 * middles[0][0])
        panel.minorticks_off()
        panel.set_yticks(
            [tick for tick in TICKS if panel.get_ylim()[0] < tick < panel.get_ylim()[1]]
        )
        panel.set_yticklabels([f"{tick:g}" for tick in panel.get_yticks()])
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{model}, held-out loss", size=9, loc="left", color=colors["soft"])
        if not k:
            panel.legend(frameon=False, labelcolor=colors["text"], loc="upper right")
    plot.set_axis_off()


TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 2.5, 3, 3.5, 4)


def profiles_title(found: Any) -> str:
    """Return the title of the picture of profiles."""
    best = {
        measure: max(found[measure]["scores"], key=found[measure]["scores"].get)
        for measure in ("steps", "seconds")
    }
    if best["steps"] == best["seconds"]:
        return f"{best['steps']} is ahead by steps and by seconds"
    return f"{best['steps']} is ahead by steps, {best['seconds']} by seconds"


def _profiles(plot: Any, found: Any, colors: dict[str, str]) -> None:
    figure = plot.figure
    figure.text(0.03, 0.94, profiles_title(found), size=10.5, weight="bold")
    words = (
        "share of runs in which an optimizer takes at most so many times the least; grey: others"
    )
    figure.text(0.03, 0.89, f"{words}; score", color=colors["soft"])
    for k, measure in enumerate(("steps", "seconds")):
        panel = figure.add_axes((0.06 + 0.49 * k, 0.1, 0.25, 0.68))
        scores, bounds = found[measure]["scores"], found[measure]["bounds"]
        names = sorted(scores, key=lambda name: -scores[name])
        chosen = [*names[:NAMED], *[name for name in DRAWN if name not in names[:NAMED]]]
        for name in names[NAMED:]:
            if name not in chosen:
                own = found[measure]["profiles"][name]
                panel.plot(bounds, own, color=colors["soft"], linewidth=0.5, alpha=0.6)
        kinds = iter(("bar-", "bar--", "bar:", "pale-", "pale--", "pale:"))
        for name in chosen:
            kind = "text-" if name == DRAWN[0] else next(kinds)
            color, line = colors[kind.rstrip("-:")], kind.lstrip("abelprtx")
            own, label = (
                found[measure]["profiles"][name],
                f"{name.removesuffix(' AdamW')} {scores[name]:.2f}",
            )
            panel.plot(bounds, own, line, color=color, linewidth=1.8, label=label, zorder=3)
        legend = {"frameon": False, "labelcolor": colors["text"], "fontsize": 8}
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), handlelength=1.5, **legend)
        panel.set(xlim=(1, bounds[-1]), ylim=(0, 1.02), xscale="log")
        panel.minorticks_off()
        panel.set_xticks([1, 2, 3, 4])
        panel.set_xticklabels(["1", "2", "3", "4"])
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{measure} to the target", size=9, loc="left", color=colors["soft"])
    plot.set_axis_off()


def described(text: str, found: Sequence[Row]) -> str:
    """Return a page with the numbers of the comparison in the words that stand for its picture."""
    numbers = iter([f"{ratio:.1f}" for row in found for ratio in row.ratios.values()])
    words = re.compile(r"relative\sto\sfastopt:\s[^\"\]]*")
    number = re.compile(r"\d+\.\d")
    return words.sub(lambda part: number.sub(lambda _: next(numbers), part[0]), text, count=1)


def main() -> int:
    """Redraw the comparison with other libraries, and write its numbers where it is shown."""
    found = rows((DOCS / "performance.md").read_text(encoding="utf-8"))
    draw_comparison(found)
    for page in (DOCS.parent / "README.md", DOCS / "index.md"):
        page.write_text(described(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
