"""One dense step of Adam and SGD in several libraries, as a Markdown table.

Every library runs in a process of its own, on its own warm memory and with the same number of
threads. The processes take turns; a cell holds the median time of a step and the median ratio to
fastopt's time in the same round. The limit reads and writes the memory that the step must, and
nothing else.
"""

import argparse
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import llvmlite.binding
import numba
import numpy as np
from benchmarks.common import (
    TABLE_SHAPE,
    Call,
    Step,
    against_limit,
    first_steps,
    import_overhead,
    interleaved,
    microseconds,
    names,
    sampler,
)

import fastopt

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(iterable, **_):
        return iterable


THREADS = numba.config.NUMBA_NUM_THREADS
SIZES = (1_000, 100_000, 1_000_000, 20_000_000, 50_000_000)
LR, MOMENTUM, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.9, 0.999, 1e-8
FASTOPT = {
    "adam": {"learning_rate": LR},
    "sgd": {"learning_rate": LR, "momentum": MOMENTUM},
}


# Steps: each function touches all memory that its step uses


def limit_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm]).limit


def fastopt_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm])


def numpy_step(algorithm: str, size: int) -> Call:
    weight, grad, mom, var = np.ones((4, size), np.float32)

    def adam():
        mom[:] = BETA1 * mom + (1 - BETA1) * grad
        var[:] = BETA2 * var + (1 - BETA2) * grad * grad
        weight[:] -= LR * mom / (np.sqrt(var) + EPSILON)

    def sgd():
        mom[:] = MOMENTUM * mom - LR * grad
        weight[:] += mom

    return {"adam": adam, "sgd": sgd}[algorithm]


def torch_step(algorithm: str, size: int, **options: bool) -> Call:
    import torch

    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.ones(size))
    weight.grad = torch.ones(size)
    if algorithm == "adam":
        return torch.optim.Adam([weight], lr=LR, **options).step
    return torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, **options).step


def deepspeed_step(algorithm: str, size: int) -> Call:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.ones(size))
    weight.grad = torch.ones(size)
    return DeepSpeedCPUAdam([weight], lr=LR, adamw_mode=False).step


def optax_step(algorithm: str, size: int) -> Call:
    import jax
    import optax

    optimizer = optax.adam(LR) if algorithm == "adam" else optax.sgd(LR, momentum=MOMENTUM)
    weight, grad = jax.numpy.ones(size), jax.numpy.ones(size)
    state = optimizer.init(weight)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weight, state, grad):
        updates, state = optimizer.update(grad, state, weight)
        return optax.apply_updates(weight, updates), state

    def step():
        nonlocal weight, state
        weight, state = jax.block_until_ready(update(weight, state, grad))

    return step


PEERS: dict[str, tuple[str, Callable[[str, int], Call], tuple[str, ...]]] = {
    # row: (library, step, algorithms); fastopt comes first, the others are compared with it
    "fastopt": ("fastopt", fastopt_step, ("adam", "sgd")),
    "limit": ("fastopt", limit_step, ("adam", "sgd")),
    "NumPy": ("numpy", numpy_step, ("adam", "sgd")),
    "torch, fused": ("torch", partial(torch_step, fused=True), ("adam", "sgd")),
    "torch, foreach": ("torch", partial(torch_step, foreach=True), ("adam", "sgd")),
    "optax, jit": ("optax", optax_step, ("adam", "sgd")),
    "DeepSpeedCPUAdam": ("deepspeed", deepspeed_step, ("adam",)),
}


# Processes


class Worker:
    """A process that measures one step whenever it is asked to."""

    def __init__(self, row: str, algorithm: str, size: int) -> None:
        self.row = row
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(
            target=serve, args=(pipe, row, algorithm, size), daemon=True
        )
        self._process.start()
        pipe.close()
        self.error = self._pipe.recv()

    def sample(self) -> float:
        time.sleep(0.01)  # until the threads of the process before no longer spin
        self._pipe.send(True)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(False)
        self._process.join()


def serve(pipe, row: str, algorithm: str, size: int) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the table alone goes to stdout
    try:
        sample = sampler(PEERS[row][1](algorithm, size))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".partition("\n")[0])
        return
    pipe.send(None)
    while pipe.recv():
        pipe.send(sample())


def race(rows: list[str], algorithm: str, size: int, rounds: int) -> dict[str, str]:
    """Cell of each row in the column of `size`."""
    workers = [Worker(row, algorithm, size) for row in rows]
    for worker in workers:
        if worker.error:
            note(f"{worker.row}, {algorithm}, {size:,}: skipped, {worker.error}")
    workers = [worker for worker in workers if not worker.error]
    times = interleaved([worker.sample for worker in workers], rounds)
    for worker in workers:
        worker.stop()
    return {
        worker.row: f"{duration(np.median(column))} ({np.median(column / times[:, 0]):.2f})"
        for worker, column in zip(workers, times.T, strict=True)
    }


# Tables


def duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def note(line: str) -> None:
    print(line, file=sys.stderr)


def table(head: list[str], lines: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(cells) + " |")


def installed() -> dict[str, str]:
    """Version of every library that is there."""
    versions = {"fastopt": fastopt.__version__, "numba": numba.__version__}
    for library in dict.fromkeys(library for library, _, _ in PEERS.values()):
        if library not in versions and find_spec(library):
            versions[library] = metadata.version(library)
    return versions


def peers(only: str, quick: bool) -> None:
    versions = installed()
    for library in dict.fromkeys(library for library, _, _ in PEERS.values()):
        if library not in versions:
            note(f"{library}: skipped, it is not installed")
    sizes = SIZES[:3] if quick else SIZES
    lines = []
    for algorithm in ("adam", "sgd"):
        rows = [
            row
            for row, (library, _, algorithms) in PEERS.items()
            if library in versions
            and algorithm in algorithms
            and (row == "fastopt" or re.search(only, f"{algorithm} {row}", re.IGNORECASE))
        ]
        if rows == ["fastopt"] and not re.search(only, f"{algorithm} fastopt"):
            continue
        columns = [
            race(rows, algorithm, size, rounds=5 if quick else 15)
            for size in tqdm(sizes, desc=algorithm, leave=False)
        ]
        lines += [[algorithm, row, *(c.get(row, "") for c in columns)] for row in rows]
    table(["float32 elements", "", *(f"{size:,}" for size in sizes)], lines)


Bar = tuple[str, str, Callable[[], str]]


def all_bars(quick: bool) -> Iterator[Bar]:
    """Pairs of what is measured and the bar, with the function that measures it."""
    rounds = 5 if quick else 31

    def share(name: str, shape: int | tuple[int, ...]) -> str:
        return f"{against_limit(Step(name, shape), rounds)[1]:.2f}"

    yield (
        "Adam, 1,000 elements",
        "<= 8 us",
        lambda: f"{microseconds(Step('adam', 1_000), rounds):.1f} us",
    )
    yield "Adam, 1M elements, limit / time", ">= 0.70", lambda: share("adam", 1_000_000)
    yield "Adam, 50M elements, limit / time", ">= 0.95", lambda: share("adam", 50_000_000)
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
    for name in names():
        yield f"{name}, 20M elements, limit / time", ">= 0.90", partial(share, name, TABLE_SHAPE)


def bars(only: str, quick: bool) -> None:
    chosen = [bar for bar in all_bars(quick) if re.search(only, bar[0], re.IGNORECASE)]
    lines = [[what, bar, measure()] for what, bar, measure in tqdm(chosen, leave=False)]
    table(["measurement", "bar", "measured"], lines)


def conditions() -> None:
    """What the numbers above depend on."""
    features = llvmlite.binding.get_host_cpu_features()
    vector = [f for f in ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "neon", "sve")]
    print(
        f"\n{platform.platform()}, {processor()} ({llvmlite.binding.get_host_cpu_name()}: "
        f"{', '.join(f for f in vector if features.get(f))}), {os.cpu_count()} cores, "
        f"{THREADS} threads; Python {platform.python_version()}, "
        f"{', '.join(f'{library} {version}' for library, version in installed().items())}; "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows to measure")
    parser.add_argument("--bars", action="store_true", help="fastopt against its own bars instead")
    options = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC"):
        os.environ[variable] = str(THREADS)
    (bars if options.bars else peers)(options.only, options.quick)
    conditions()


if __name__ == "__main__":
    main()
