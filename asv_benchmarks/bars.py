"""Performance targets of fastopt ("bars") and the functions that measure them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec

import list_steps
import row_steps
import small_steps
from benchmarks import small
from benchmarks.common import TABLE_SHAPE, first_steps, import_overhead
from benchmarks.half import LARGE, slowdown, speedup_over_casts
from benchmarks.norms import SIZE, Clip
from benchmarks.rows import HEIGHT, Loop, RowStep, over_heights, resident_share
from benchmarks.tables import Shapes, against_flat
from race import Race

from fastopt.bench.clock import ratio
from fastopt.bench.steps import Step, against_limit
from fastopt.warmup import names

__all__ = ["all_bars"]

Peers = Mapping[str, tuple[str, Callable]]
Bar = tuple[str, str, Callable[[], str]]
"""Description of a measurement, its bar, and the function that measures it."""


def all_bars(quick: bool) -> Iterator[Bar]:
    """Yield all bars; `quick` uses fewer rounds and smaller tables."""
    rounds = 5 if quick else 31
    yield from call_bars(rounds)
    yield from few_bars(rounds)
    yield from frame_bars()
    yield from dense_bars(rounds)
    yield from start_bars(quick)
    for name in names():
        step = partial(share, name, TABLE_SHAPE, rounds)
        yield f"{name}, 20M elements, limit / time", ">= 0.90", step
    yield from norm_bars(rounds)
    yield from list_bars(rounds)
    yield from row_bars(rounds)
    yield from table_bars(quick)
    yield from half_bars(rounds)


def call_bars(rounds: int) -> Iterator[Bar]:
    """Bars of a call on one weight."""
    for algorithm, size, bars in (
        ("adam", 10, {"NumPy in place": 3.5, "torch fused": 12}),
        ("adam", 1_000, {"NumPy in place": 4, "torch fused": 12, "written loop": 0.9}),
        ("sgd", 1_000, {"NumPy in place": 1.5}),
        ("adam", 100_000, {"written loop": 0.85}),
        ("adam", 1_000_000, {"written loop": 0.95}),
        ("adam", 20_000_000, {"written loop": 0.95}),
    ):
        yield from small_bars(f"{size:,} elements", algorithm, [(size,)], False, bars, rounds)


def few_bars(rounds: int) -> Iterator[Bar]:
    """Bars of a call on a list of small weights, with new gradient arrays in each call."""
    for words, algorithm, shapes, bars in (
        ("4 x 1,000", "adam", [(1_000,)] * 4, {"NumPy in place": 5, "torch fused": 7}),
        ("the demo's network", "adam", small.DEMO, {"NumPy in place": 3.5}),
        ("the demo's network", "sgd", small.DEMO, {"NumPy in place": 1.5}),
        ("20 x 1,000", "adam", [(1_000,)] * 20, {"NumPy in place": 9, "torch fused": 7}),
    ):
        yield from small_bars(f"{words}, new gradients", algorithm, shapes, True, bars, rounds)
    for count in (4, 20):
        yield (
            f"Adam, {count} x 1,000, time with new gradients / the same",
            "<= 1.3",
            partial(of_new_gradients, [(1_000,)] * count, rounds),
        )
    yield (
        "Adam, 20 x 1,000, new gradients, loss scaler, clip_global_norm and schedule, "
        "time of NumPy in place without them / time",
        ">= 6",
        partial(guarded, [(1_000,)] * 20, rounds),
    )


def small_bars(
    words: str,
    algorithm: str,
    shapes: Shapes,
    fresh: bool,
    bars: Mapping[str, float],
    rounds: int,
) -> Iterator[Bar]:
    rule = {"adam": "Adam", "sgd": "SGD with momentum"}[algorithm]
    arguments = algorithm, shapes, fresh
    for rival, bar in bars.items():
        measure = partial(against, small_steps.PEERS, rival, arguments, rounds)
        yield f"{rule}, {words}, time of {rival} / time", f">= {bar:g}", measure


def of_new_gradients(shapes: Shapes, rounds: int) -> str:
    new, same = (small.fastopt_step("adam", shapes, fresh) for fresh in (True, False))
    return f"{ratio(new, same, rounds):.2f}"


def guarded(shapes: Shapes, rounds: int) -> str:
    makes = small.numpy_step, small.guarded_step
    plain, step = (make("adam", shapes, True) for make in makes)
    return f"{ratio(plain, step, rounds):.2f}"


def frame_bars() -> Iterator[Bar]:
    """Bars of the number of Python functions that a warm call enters."""
    for words, shapes, bar in (("one call", [(10,)], 10), ("a list", small.DEMO, 12)):
        for kind, make in (
            ("Adam", small.fastopt_step),
            ("Adam with loss scaler, clip and schedule", small.guarded_step),
        ):
            measure = partial(frames, make, shapes)
            yield f"{kind}, {words}, Python frames", f"<= {bar}", measure


def frames(make: Callable, shapes: Shapes) -> str:
    step, entered = make("adam", shapes, False), 0
    for _ in range(3):
        step()

    def count(frame: object, event: str, _: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return f"{entered - 1}"  # without the benchmark's own function


def dense_bars(rounds: int) -> Iterator[Bar]:
    for size, bar in ((1_000_000, ">= 0.70"), (50_000_000, ">= 0.95")):
        what = f"Adam, {size // 1_000_000}M elements, limit / time"
        yield what, bar, partial(share, "adam", size, rounds)


def share(name: str, shape: int | tuple[int, ...], rounds: int) -> str:
    return f"{against_limit(Step(name, shape), rounds)[1]:.3f}"


def start_bars(quick: bool) -> Iterator[Bar]:
    yield (
        "import, over that of numba",
        "<= 0.08 s",
        lambda: f"{import_overhead(5 if quick else 11):.3f} s",
    )
    yield (
        "first step, kernels cached",
        "<= 0.25 s",
        lambda: f"{first_steps(1_000_000, 1 if quick else 5)[1]:.3f} s",
    )


def norm_bars(rounds: int) -> Iterator[Bar]:
    """Bars of updates that need a reduction over all elements, at 20M elements."""

    def clipped() -> str:
        clip = Clip()
        clip.setup(SIZE)
        return f"{ratio(clip.bounded, clip.free, rounds):.3f}"

    yield "Adam with clip_global_norm, 20M elements, time / Adam's", "<= 1.20", clipped
    yield (
        "LAMB, 20M elements, time / Adam's",
        "<= 1.60",
        lambda: f"{ratio(Step('lamb', SIZE), Step('adam', SIZE), rounds):.3f}",
    )


def list_bars(rounds: int) -> Iterator[Bar]:
    """Bars of Adam on many tensors in one call."""
    for (what, arguments), least in zip(list(list_steps.CASES.items())[:2], (12, 9), strict=True):
        measure = partial(against, list_steps.PEERS, "torch fused", arguments, rounds)
        yield f"{what}, time of torch fused / time", f">= {least}", measure
    yield (
        "Adam, ResNet-50's 161 weights, time / one flat weight",
        "<= 1.05",
        lambda: f"{against_flat(rounds):.3f}",
    )


def row_bars(rounds: int) -> Iterator[Bar]:
    """Bars of lazy Adam against other implementations, on rows that are not in the caches."""
    for kind, rival, bar in (
        ("sorted", "torch SparseAdam", ">= 8"),
        ("sorted", "limit", ">= 0.6"),
        ("permuted", "limit", ">= 0.6"),
        ("permuted", "torch SparseAdam", ">= 6"),
        ("zipf", "torch SparseAdam", ">= 4"),
    ):
        what = f"lazy Adam, {kind} ids, time of {rival} / time"
        yield what, bar, partial(against, row_steps.PEERS, rival, (kind, True), rounds)
    yield (
        "lazy Adam, 512 sorted ids, time / limit",
        "<= 2",
        lambda: f"{ratio(*few_ids(512), rounds):.2f}",
    )


def few_ids(listed: int) -> tuple[RowStep, Loop]:
    arguments = "sorted", True, HEIGHT, listed
    return RowStep(*arguments), Loop(*arguments)


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
    """Bars of Adam with half-precision weights or state."""
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
