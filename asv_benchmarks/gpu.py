"""Table of updates on a CUDA device: the time of a step, and its speed relative to a copy.

``python gpu.py`` measures Adam on float32 weights of several sizes, half-precision weights with
masters, a thousand small tensors in one launch and indexed rows of a table, each together with
torch's optimizer if torch can use the device. Arrays hold normally distributed values. Times are
medians, measured with CUDA events. The limit is a device copy of half the bytes that a step moves:
it reads and writes as many bytes as the step.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from numba import cuda

from fastopt import optimizer
from fastopt.info import cuda as device_name

Call = Callable[[], Any]

ROWS, WIDTH, LISTED = 10_000_000, 64, 65_536


@dataclass(frozen=True)
class Race:
    """A row of the table: a step, the bytes it moves, and the step of torch."""

    name: str
    make: Callable[[], Call]
    moved: int
    """Bytes that a step reads and writes."""
    torch: Callable[[], Call] | None = None


NUMBERS = np.random.default_rng(0).standard_normal(1 << 20, np.float32)


def filled(shape, dtype=np.float32):
    """Return a device array of normally distributed values, 2**20 of them repeated."""
    return cuda.to_device(np.resize(NUMBERS, shape).astype(dtype))


def dense(shapes, dtype=np.float32, clip=None, **kwargs) -> Call:
    updater = optimizer.Updater(optimizer.Adam(**kwargs), clip_global_norm=clip)
    weights = [filled(shape, dtype) for shape in shapes]
    grads = [filled(shape, dtype) for shape in shapes]
    return partial(updater, list(range(len(shapes))), grads, weights)


def new_gradients(shapes) -> Call:
    """Return a step whose gradients are other objects than in the step before."""
    updater = optimizer.get_updater(optimizer.Adam())
    weights, *sets = ([filled(shape) for shape in shapes] for _ in range(3))
    indices, turns = list(range(len(shapes))), cycle(sets)
    return lambda: updater(indices, next(turns), weights)


def rows(height: int, listed: int) -> Call:
    updater = optimizer.get_updater(optimizer.Adam())
    weight, values = filled((height, WIDTH)), filled((listed, WIDTH))
    ids = cuda.to_device(np.random.default_rng(0).integers(height, size=listed))
    return partial(updater, 0, (values, ids), weight)


def torch_dense(shapes) -> Call:
    import torch

    weights = [torch.nn.Parameter(torch.ones(shape, device="cuda")) for shape in shapes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return torch.optim.Adam(weights, fused=True).step


def torch_rows(height: int, listed: int) -> Call:
    import torch

    weight = torch.nn.Parameter(torch.ones(height, WIDTH, device="cuda"))
    ids = torch.randint(height, (1, listed), device="cuda")
    values = torch.ones(listed, WIDTH, device="cuda")
    weight.grad = torch.sparse_coo_tensor(ids, values, weight.shape)
    return torch.optim.SparseAdam([weight]).step


def races(largest: int, small: int, height: int, listed: int) -> Iterator[Race]:
    for size in (10**power for power in (2, 6, 7, 8) if 10**power <= largest):
        shapes = [(size,)]
        name = f"Adam, {size:,}"
        yield Race(name, partial(dense, shapes), 28 * size, partial(torch_dense, shapes))
    half = partial(dense, [(largest,)], np.float16, multi_precision=True)
    yield Race(f"Adam, {largest:,}, float16 with masters", half, 28 * largest)
    clipped = partial(dense, [(largest,)], clip=1.0)
    yield Race(f"Adam, {largest:,}, norm clip", clipped, 32 * largest)
    many = [(small,)] * small
    name = f"Adam, {small:,} x {small:,}"
    yield Race(name, partial(dense, many), 28 * small**2, partial(torch_dense, many))
    yield Race(f"{name}, new gradients", partial(new_gradients, many), 28 * small**2)
    name, moved = f"lazy Adam, {listed:,} rows of {height:,} x {WIDTH}", 28 * listed * WIDTH
    ours, theirs = (partial(make, height, listed) for make in (rows, torch_rows))
    yield Race(name, ours, moved, theirs)


def copying(size: int) -> Call:
    """Return a device copy that moves `size` bytes in total, reads and writes together."""
    source, target = (filled((max(size // 8, 1),)) for _ in range(2))
    from cuda.bindings import driver

    to, of = (array.device_ctypes_pointer.value for array in (target, source))

    def copy() -> None:  # numba's overhead exceeds the copy of a small array
        (error,) = driver.cuMemcpyDtoDAsync(to, of, source.nbytes, 0)
        assert not error, error
        assert target is not None  # keeps it alive

    return copy


def sample(call: Call, repeats: int) -> float:
    """Return the mean seconds of `repeats` calls, measured with CUDA events."""
    first, last = cuda.event(), cuda.event()
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return cuda.event_elapsed_time(first, last) / 1000 / repeats


def measured(race: Race, rounds: int, repeats: int) -> str:
    """Measure a row of the table; the calls take turns in every round."""
    calls = {"fastopt": race.make(), "copy": copying(race.moved)}
    if race.torch is not None:
        try:
            calls["torch"] = race.torch()
        except Exception as error:
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"{race.name}: torch is left out, {told}", file=sys.stderr)
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(sample(call, repeats))
    step = np.array(times["fastopt"])
    cells = [
        f"{np.median(step) * 1e6:.1f} us",
        f"{race.moved / np.median(step) / 1e9:.0f} GB/s",
        f"{np.median(np.array(times['copy']) / step):.2f}",
        f"{np.median(np.array(times['torch']) / step):.2f}" if "torch" in times else "",
    ]
    return f"| {race.name} | {' | '.join(cells)} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small arrays, few repeats")
    arguments = parser.parse_args()
    if not cuda.is_available():
        print(f"nothing to measure: {device_name()}", file=sys.stderr)
        return 1
    sizes = (100, 5, 20, 4) if arguments.quick else (10**8, 1000, ROWS, LISTED)
    rounds, repeats = (2, 1) if arguments.quick else (21, 20)
    print(f"{device_name()}\n")
    print("| update | time | traffic | of a copy's rate | torch takes |\n|---|---|---|---|---|")
    for race in races(*sizes):
        print(measured(race, rounds, repeats), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
