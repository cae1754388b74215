"""Time of a sharded step of Adam by its parts, compared to a model of memory and network.

    python scaling.py            1, 2 and 4 ranks on this machine, then predictions for more

A parent process starts ``mpiexec`` for each number of ranks. In each job, steps and probes of the
model's costs take turns, on all ranks at once, so that disturbances affect them alike.
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.mpi import job, mpiexec
from benchmarks.tables import SMALL, Shapes, elements, resnet50

MODELS: dict[str, Shapes] = {"ResNet-50": resnet50(), "1,000 x 1,000": SMALL}
PARTS = ("packing", "communication", "update")
BYTES = 4
"""Bytes of one element of a gradient or weight."""

NETWORK, LATENCY = 12.5e9, 2e-6
"""Assumed network of the predictions: bytes per second each way, and seconds per message."""


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a step, in seconds; the first three are per element."""

    copy: float
    """Copy of an element in memory."""
    exchange: float
    """All-to-all of gradients and all-gather of weights."""
    update: float
    """Update on one rank."""
    call: float
    """Overhead of a call, measured with as many tensors of one element."""

    def step(self, size: int, ranks: int) -> dict[str, float]:
        """Return the seconds of the parts of a step.

        On several ranks, packing is three copies per element: packing the gradient, adding a
        received one, and copying a weight back.
        """
        several = ranks > 1
        return {
            "packing": 3 * several * size * self.copy,
            "communication": several * size * self.exchange,
            "update": size / ranks * self.update,
            "call": self.call,
        }


def sent(size: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a step, and the same number it receives."""
    return 2 * BYTES * size * (ranks - 1) / ranks


def predicted(costs: Costs, size: int, ranks: int, bucket: int) -> dict[str, float]:
    """Predict the seconds of the parts, with one rank per node like this machine.

    The network is the assumed one. All-to-all and all-gather send one message to each other rank,
    one after the other, for each bucket.
    """
    messages = 2 * (ranks - 1) * math.ceil(BYTES * size / bucket)
    parts = costs.step(size, ranks)
    parts["communication"] = sent(size, ranks) / NETWORK + messages * LATENCY
    return parts


def clocked(comm, work) -> float:
    """Return the seconds until the slowest rank has finished work that all start together."""
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    work()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)


def sharded(comm, shapes: Shapes):
    """Return a sharded updater and a step with it."""
    from fastopt import optimizer
    from fastopt.mpi import ShardedUpdater

    updater = ShardedUpdater(optimizer.Adam(), comm)
    draw = np.random.default_rng(0).standard_normal
    weights, grads = ([draw(shape, np.float32) for shape in shapes] for _ in range(2))
    indices = list(range(len(shapes)))
    return updater, lambda: updater(indices, grads, weights)


def probes(comm, size: int, bucket: int):
    """Return work that measures a copy, an exchange and an update, with its element counts."""

    from fastopt import optimizer
    from fastopt.distributed.ranks import Ranks
    from fastopt.mpi.communicator import MPICommunicator

    wait = Ranks(MPICommunicator(comm)).wait
    source, target = np.ones((2, size), np.float32)
    share = max(bucket // BYTES // comm.size, 1)
    wholes, parts = np.ones((2, 3, share * comm.size), np.float32)  # three, as exchanges overlap
    owns = np.ones((3, share), np.float32)
    buckets = math.ceil(size / wholes.shape[1])
    slices = np.ones((2, max(size // comm.size, 1)), np.float32)
    alone = optimizer.get_updater(optimizer.Adam())

    def copy():
        for first in range(0, size, wholes.shape[1]):
            part = source[first : first + wholes.shape[1]]
            packed = wholes[0, : len(part)]
            packed[:] = part
            target[first : first + len(part)] = packed

    def exchange():
        pending = deque()
        for k in range(buckets):
            own, whole = owns[k % 3], wholes[k % 3]
            wait(comm.Ialltoall(whole, parts[k % 3]))
            pending.append(comm.Iallgather(own, whole))
            if len(pending) == 2:
                wait(pending.popleft())
        wait(pending.popleft())

    works = {
        "copy": copy,
        "exchange": exchange,
        "update": lambda: alone(0, slices[1], slices[0]),
    }
    counts = {"copy": 2 * size, "exchange": buckets * wholes.shape[1], "update": slices.shape[1]}
    return works, counts


def measure(name: str, rounds: int) -> dict[str, object]:
    """Return medians of a step, its parts and its costs, on the ranks of this job."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    shapes = MODELS[name]
    updater, step = sharded(comm, shapes)
    _, tiny = sharded(comm, [(1,)] * len(shapes))
    works, counts = probes(comm, elements(shapes), updater.bucket_bytes)
    works = {"step": step, "call": tiny, **works}
    times: dict[str, list[float]] = {key: [] for key in works}
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for turn in range(rounds + 2):
        for key, work in works.items():
            seconds = clocked(comm, work)
            if turn >= 2:
                times[key].append(seconds)
                if key == "step":
                    for part in PARTS:
                        parts[part].append(updater.seconds[part])
    medians = {key: float(np.median(column)) for key, column in times.items()}
    costs = {key: medians[key] / count for key, count in counts.items()}
    return {
        "step": medians["step"],
        "parts": {part: float(np.median(column)) for part, column in parts.items()},
        "costs": {**costs, "call": medians["call"]},
    }


def row(name: str, ranks: int, parts: dict[str, float], step: float | None = None) -> str:
    """Format a line of the table, in milliseconds."""
    columns = [parts[part] for part in PARTS]
    columns += [step if step is not None else sum(parts.values())]
    return f"| {name} | {ranks} | " + " | ".join(f"{1e3 * each:.2f}" for each in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--name", choices=MODELS, help="measure this on the ranks of this job")
    args = parser.parse_args()
    if args.name:
        from mpi4py import MPI

        measured = measure(args.name, args.rounds)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(measured))
        return
    from fastopt.checkpoint.placement import line_bytes

    if mpiexec() is None:
        sys.exit("scaling.py needs mpiexec, as of pip install mpich")
    for name, shapes in MODELS.items():
        size = elements(shapes)
        print(f"| {name} | ranks | {' | '.join(PARTS)} | step |\n|---|---|---|---|---|---|")
        costs: dict[int, Costs] = {}
        for ranks in (1, 2, 4):
            found = job(ranks, Path(__file__), name, "--rounds", str(args.rounds))
            costs[ranks] = Costs(**found["costs"])
            print(row("measured", ranks, found["parts"], found["step"]))
            print(row("model", ranks, costs[ranks].step(size, ranks)), flush=True)
        for ranks in (64, 1024):
            print(row("prediction", ranks, predicted(costs[1], size, ranks, line_bytes(ranks))))
        print(f"costs on one rank: {costs[1]}\n")


if __name__ == "__main__":
    main()
