"""What fastopt's measurements have to reach."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec

import list_steps
import row_steps
from benchmarks.common import TABLE_SHAPE, first_steps, import_overhead
from benchmarks.half import LARGE, slowdown, speedup_over_casts
from benchmarks.rows import HEIGHT, over_heights, resident_share
from benchmarks.tables import ListStep, against_flat
from race import Race

from fastopt.bench.clock import microseconds
from fastopt.bench.steps import Step, against_limit
from fastopt.warmup import names

__all__ = ["all_bars"]

Peers = Mapping[str, tuple[str, Callable]]
Bar = tuple[str, str, Callable[[], str]]
"""What is measured, the bar, and the function that measures it."""


def all_bars(quick: bool) -> Iterator[Bar]:
    """Every bar; `quick` takes fewer rounds and smaller tables."""
    rounds = 5 if quick else 31
    yield from dense_bars(rounds)
    yield from start_bars(quick)
    for name in names():
        step = partial(share, name, TABLE_SHAPE, rounds)
        yield f"{name}, 20M elements, limit / time", ">= 0.90", step
    yield from list_bars(rounds)
    yield from row_bars(rounds)
    yield from table_bars(quick)
    yield from half_bars(rounds)


def dense_bars(rounds: int) -> Iterator[Bar]:
    yield (
        "Adam, 1,000 elements",
        "<= 8 us",
        lambda: f"{microseconds(Step('adam', 1_000), rounds):.1f} us",
    )
    for size, bar in ((1_000_000, ">= 0.70"), (50_000_000, ">= 0.95")):
        what = f"Adam, {size // 1_000_000}M elements, limit / time"
        yield what, bar, partial(share, "adam", size, rounds)


def share(name: str, shape: int | tuple[int, ...], rounds: int) -> str:
    return f"{against_limit(Step(name, shape), rounds)[1]:.3f}"


def start_bars(quick: bool) -> Iterator[Bar]:
    yield (
        "import, over that of numba",
        "<= 0.15 s",
        lambda: f"{import_overhead(5 if quick else 11):.3f} s",
    )
    yield (
        "first step, kernels cached",
        "<= 0.3 s",
        lambda: f"{first_steps(1_000_000, 1 if quick else 5)[1]:.3f} s",
    )


def list_bars(rounds: int) -> Iterator[Bar]:
    """Adam on many tensors in one call."""
    small = list(list_steps.CASES.items())[:2]
    for (what, arguments), most, least in zip(small, (300, 900), (12, 4), strict=True):
        step = partial(ListStep, *arguments)
        yield (
            what,
            f"<= {most} us",
            lambda step=step: f"{microseconds(step(), rounds):.0f} us",
        )
        rival = "torch fused"
        measure = partial(against, list_steps.PEERS, rival, arguments, rounds)
        yield f"{what}, time of {rival} / time", f">= {least}", measure
    yield (
        "Adam, ResNet-50's 161 weights, time / one flat weight",
        "<= 1.05",
        lambda: f"{against_flat(rounds):.3f}",
    )


def row_bars(rounds: int) -> Iterator[Bar]:
    """Lazy Adam against other ways to step, on rows that are not in the caches."""
    for kind, rival, bar in (
        ("sorted", "torch SparseAdam", ">= 8"),
        ("sorted", "limit", ">= 0.6"),
        ("permuted", "torch SparseAdam", ">= 6"),
        ("zipf", "torch SparseAdam", ">= 4"),
    ):
        what = f"lazy Adam, {kind} ids, time of {rival} / time"
        yield what, bar, partial(against, row_steps.PEERS, rival, (kind, True), rounds)


def against(peers: Peers, rival: str, arguments: tuple, rounds: int) -> str:
    library, _ = peers[rival]
    if not find_spec(library):
        return f"{library} is not installed"
    makes = {row: partial(peers[row][1], *arguments) for row in ("fastopt", rival)}
    with Race() as race:
        return f"{race.run(makes, rival, rounds)[rival][1]:.2f}"


def table_bars(quick: bool) -> Iterator[Bar]:
    heights = (100_000, 1_000_000) if quick else (100_000, 1_000_000, 10_000_000)
    yield (
        f"lazy Adam, {heights[0]:,} to {heights[-1]:,} rows, slowest / fastest",
        "<= 2",
        lambda: f"{over_heights(heights, 5 if quick else 31):.2f}",
    )
    if sys.platform != "linux":
        return
    for order, bar in (("random", "<= 20%"), ("contiguous", "<= 5%")):
        yield (
            f"state in memory after 1% of the rows, {order}",
            bar,
            lambda order=order: f"{resident_share(order, HEIGHT if quick else heights[-1]):.1%}",
        )


def half_bars(rounds: int) -> Iterator[Bar]:
    """Adam with weights or state of half precision."""
    for dtype in ("float16", "bfloat16"):
        yield (
            f"Adam, {dtype} with masters, 20M elements, time / float32's",
            "<= 1.25",
            lambda dtype=dtype: f"{slowdown(f'{dtype}, masters', rounds=rounds):.3f}",
        )
    yield (
        "Adam, float16, 20M elements, casts with NumPy / masters",
        ">= 8",
        lambda: f"{speedup_over_casts('float16', min(rounds, 5)):.1f}",
    )
    yield (
        "Adam, 50M elements, float32 state / bfloat16 state",
        ">= 1.25",
        lambda: f"{1 / slowdown('float32, bfloat16 state', LARGE, rounds):.3f}",
    )
