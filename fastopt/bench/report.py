"""``fastopt bench``: the memory of this machine, and how near each update comes to it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import fastopt
from fastopt import info, warmup
from fastopt.bench.advice import on_layer, on_threads
from fastopt.bench.measurements import STATES, cells_of, measure, prepare
from fastopt.console import Refused, duration, progress, table
from fastopt.kernels.threads import prefer_tbb

__all__ = ["Options", "run"]

numba: Any = import_module("numba")  # whose type hints leave much out


@dataclass(frozen=True)
class Options:
    """What is measured; None stands for all optimizers, and for all threads."""

    sizes: Sequence[int] = (1_000, 1_000_000, 10_000_000)
    optimizers: Sequence[str] | None = None
    threads: int | None = None
    seconds: float = 30.0


def run(options: Options) -> None:
    """Measure with a progress bar, and print the tables and the advice.

    Raises
    ------
    Refused
        An option does not fit this machine, or there is no such optimizer.
    """
    names = _names(options.optimizers)
    sizes = sorted(set(options.sizes))
    with _threads(options.threads) as count:
        try:
            for name in progress(names, "optimizer compiled"):
                prepare(name, sizes)
            results = measure(cells_of(names, sizes, count), options.seconds)
        except MemoryError:
            raise Refused(f"no memory for {sizes[-1]:,} elements: give smaller --sizes") from None
    layer = numba.threading_layer()
    print(
        f"fastopt {fastopt.__version__}, {info.processor()}, threads: {count} on {layer}; float32"
    )
    by_threads = {size: results["threads", size] for size in sizes if ("threads", size) in results}
    tables = [_traffic_table(results, sizes), _thread_table(by_threads)]
    tables.append(_optimizer_table(results, names, sizes))
    print("\n" + "\n\n".join(filter(None, tables)))
    print(
        "\nlimit: time of a loop that moves the same memory, over that of the update; at 1.00 only "
        "memory\nis left. NumPy: time of plain NumPy code over that of the update. Momentum is 0.9 "
        "where there is one.\n"
    )
    print(f"{on_threads(by_threads)}\n{on_layer(layer)}")


def _names(given: Sequence[str] | None) -> list[str]:
    known = warmup.names()
    names = list(dict.fromkeys(name.lower() for name in given or known))
    for name in names:
        if name not in known:
            raise Refused(f"no {name!r}; there are {', '.join(known)}")
    return names


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Use so many threads meanwhile."""
    if numba.config.DISABLE_JIT:
        raise Refused("nothing is compiled, as NUMBA_DISABLE_JIT=1: unset it")
    prefer_tbb()  # before numba starts its threads
    most, before = numba.config.NUMBA_NUM_THREADS, numba.get_num_threads()
    if count is not None and count > most:
        raise Refused(f"--threads is at most {most} here, NUMBA_NUM_THREADS changes that")
    try:
        numba.set_num_threads(count or before)
        yield count or before
    finally:
        numba.set_num_threads(before)


def _traffic_table(results: Mapping[Any, Any], sizes: Sequence[int]) -> str:
    lines = [
        [f"{2 + slots} read, {1 + slots} written"]
        + [f"{results[slots, size] / 1e9:.1f} GB/s" for size in sizes]
        for slots in STATES
    ]
    return table(["arrays", *(f"{size:,} elements" for size in sizes)], lines)


def _thread_table(times: Mapping[int, Mapping[int, float]]) -> str:
    """Times of Adam by number of threads, if there is anything to compare."""
    counts = list(next(iter(times.values()), ()))
    lines = [
        [str(count), *(duration(by_count[count]) for by_count in times.values())]
        for count in counts
    ]
    head = ["threads", *(f"adam, {size:,}" for size in times)]
    return table(head, lines) if len(counts) > 1 else ""


def _optimizer_table(results: Mapping[Any, Any], names: Sequence[str], sizes: Sequence[int]) -> str:
    head = ["optimizer"]
    for size in sizes:
        head += [f"{size:,}", "limit", "NumPy"]
    lines = [[name] for name in names]
    for line, size in product(lines, sizes):
        standing = results[line[0], size]
        line += [duration(standing.seconds), f"{standing.limit:.2f}", f"{standing.numpy:.1f}"]
    return table(head, lines)
