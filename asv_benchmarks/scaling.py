"""Time of a step of Adam on several ranks of this machine.

    python scaling.py            a sharded step by its parts, compared to a model of memory and
                                 network, and predictions for more ranks
    python scaling.py ways       a step, in turn with handwritten MPI code
    python scaling.py backward   a simulated backward pass and a step
    python scaling.py nodes      predictions for several ranks per node, without measurement

A parent process starts ``mpiexec`` for each number of ranks. In each job, the measured functions
take turns, on all ranks at once, so that disturbances affect them alike.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.mpi import job, mpiexec
from benchmarks.tables import SMALL, Shapes, elements, gpt2, resnet50

MODELS: dict[str, Shapes] = {"ResNet-50": resnet50(), "1,000 x 1,000": SMALL}
PARTIAL: dict[str, Shapes] = {
    f"an eighth of {name}": [(-(-shape[0] // 8), *shape[1:]) for shape in shapes]
    for name, shapes in (("ResNet-50", resnet50()), ("GPT-2", gpt2()))
}
"""Models with fewer rows in each array, for the comparison with other ways."""
Ways = dict[str, Callable[[], object]]
BACKWARD = 0.1
"""Seconds of a simulated backward pass."""

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
    """Barriers of the buckets, whose gradients and weights are in memory of the node."""
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


def communication(
    size: int, ranks: int, bucket: int, per_node: int = 1, hierarchical: bool = True
) -> tuple[float, float]:
    """Return the seconds of bytes and of messages in a step, on the assumed network.

    All ranks of a node share its network card. Sums of gradients and new weights are sent between
    equal ranks of the nodes; without sums within nodes, gradients are sent from each rank to each
    other one, and weights in a ring of all ranks.
    """
    nodes, buckets = ranks // per_node, math.ceil(BYTES * size / bucket)
    if hierarchical:
        times, senders = 2 * (nodes - 1) / nodes, nodes
    else:
        gradients = per_node * (ranks - per_node) / ranks if nodes > 1 else 0.0
        weights = (ranks - 1) / ranks if nodes > 1 else 0.0
        times, senders = gradients + weights, ranks
    return BYTES * size * times / NETWORK, 2 * (senders - 1) * buckets * LATENCY


def predicted(costs: Costs, size: int, ranks: int, bucket: int) -> dict[str, float]:
    """Predict the seconds of the parts, with one rank per node like this machine."""
    parts = costs.step(size, ranks)
    parts["communication"] = sum(communication(size, ranks, bucket))
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
    slots = np.ones((4 * (comm.size + 1), share * comm.size), np.float32)  # as a node has
    buckets = math.ceil(size / slots.shape[1])
    slices = np.ones((2, max(size // comm.size, 1)), np.float32)
    alone = optimizer.get_updater(optimizer.Adam())

    def copy():
        for k, first in enumerate(range(0, size, slots.shape[1])):
            part = source[first : first + slots.shape[1]]
            packed = slots[k % len(slots), : len(part)]
            packed[:] = part
            target[first : first + len(part)] = slots[(k + 1) % len(slots), : len(part)]

    def exchange():
        for _ in range(buckets):
            wait(comm.Ibarrier())  # gradients and weights are in shared memory
            wait(comm.Ibarrier())

    works = {"copy": copy, "exchange": exchange, "update": partial(alone, 0, slices[1], slices[0])}
    counts = {"copy": 2 * size, "exchange": buckets * slots.shape[1], "update": slices.shape[1]}
    return works, counts


def arrays(shapes, one: bool):
    """Return weights and gradients of these shapes, separate or each in one flat buffer."""
    from fastopt.mpi import flat_like

    draw = np.random.default_rng(0).standard_normal
    found = []
    for _ in range(2):
        each = [draw(shape, np.float32) for shape in shapes]
        for flat, array in zip(memory := flat_like(each), each, strict=True):
            flat[...] = array
        found.append(memory if one else each)
    return found


def by_hand(comm, size: int) -> Ways:
    """Return handwritten steps: one with sharded state, and one with a full update on each rank."""
    from mpi4py import MPI

    from fastopt import optimizer

    weights, grads, sums = np.ones((3, size), np.float32)
    ends = [size * rank // comm.size for rank in range(comm.size + 1)]
    counts = np.diff(ends).tolist()
    own = slice(ends[comm.rank], ends[comm.rank + 1])
    share = np.empty(counts[comm.rank], np.float32)
    one, other = (optimizer.get_updater(optimizer.Adam()) for _ in range(2))

    def flat():
        comm.Reduce_scatter(grads, share, counts, MPI.SUM)
        one(0, share, weights[own])
        comm.Allgatherv(MPI.IN_PLACE, [weights, counts])

    def full():
        comm.Allreduce(grads, sums)
        other(0, sums, weights)

    return {"flat loop": flat, "Allreduce, full update": full}


def steps(comm, shapes) -> Ways:
    """Return all variants of a step, by hand too."""
    from fastopt import optimizer
    from fastopt.mpi import ShardedUpdater

    ways: Ways = {}
    indices = list(range(len(shapes)))
    for name, one in (("fastopt", False), ("fastopt, flat_like", True)):
        weights, grads = arrays(shapes, one)
        updater = ShardedUpdater(optimizer.Adam(), comm)
        ways[name] = lambda u=updater, g=grads, w=weights: u(indices, g, w)
    return ways | by_hand(comm, elements(shapes))


def passes(comm, shapes) -> Ways:
    """Return variants of a simulated backward pass of BACKWARD seconds, followed by a step."""
    from fastopt import optimizer
    from fastopt.mpi import ShardedUpdater

    size, work = elements(shapes), np.ones(100_000, np.float32)

    def sleep(until: float) -> None:
        time.sleep(max(until - time.perf_counter(), 0))

    def compute(until: float) -> None:
        while time.perf_counter() < until:
            np.add(work, 1, out=work)

    ways: Ways = {}
    indices = list(range(len(shapes)))
    for spends in (sleep, compute):
        for one in (False, True):
            for begins in (False, True):
                weights, grads = arrays(shapes, one)
                updater = ShardedUpdater(optimizer.Adam(), comm, overlap=begins)

                def step(w=weights, g=grads, u=updater, spends=spends, begins=begins):
                    begin, done = time.perf_counter(), 0
                    for k in reversed(indices):
                        done += math.prod(shapes[k])
                        spends(begin + BACKWARD * done / size)
                        if begins:
                            u.begin(k, g[k])
                    u(indices, g, w)

                memory, calls = "flat_like" if one else "apart", "begin()" if begins else "call"
                ways[f"{spends.__name__}, {memory}, {calls}"] = step
    return ways


def timed(ways: Ways, comm, rounds: int) -> Iterator[tuple[str, float]]:
    """Time all in turn, and yield their names and seconds, but those of the first two rounds."""
    for turn in range(rounds + 2):
        for name, work in ways.items():
            seconds = clocked(comm, work)
            if turn >= 2:
                yield name, seconds


def measured_parts(comm, shapes: Shapes, rounds: int) -> dict[str, object]:
    """Return medians of a step, its parts and its costs, on the ranks of this job."""
    updater, step = sharded(comm, shapes)
    _, tiny = sharded(comm, [(1,)] * len(shapes))
    works, counts = probes(comm, elements(shapes), updater.bucket_bytes)
    times: dict[str, list[float]] = defaultdict(list)
    for key, seconds in timed({"step": step, "call": tiny, **works}, comm, rounds):
        times[key].append(seconds)
        if key == "step":
            for part in PARTS:
                times[part].append(updater.seconds[part])
    medians = {key: float(np.median(column)) for key, column in times.items()}
    costs = {key: medians[key] / count for key, count in counts.items()}
    return {
        "step": medians["step"],
        "parts": {part: medians[part] for part in PARTS},
        "costs": {**costs, "call": medians["call"]},
    }


def measured_ways(make, comm, shapes: Shapes, rounds: int) -> dict[str, list[float]]:
    """Return median and minimum seconds of each variant."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, seconds in timed(make(comm, shapes), comm, rounds):
        times[name].append(seconds)
    return {name: [float(np.median(each)), min(each)] for name, each in times.items()}


MEASURES = {
    "parts": measured_parts,
    "ways": partial(measured_ways, steps),
    "backward": partial(measured_ways, passes),
}


def row(name: str, ranks: int, parts: dict[str, float], step: float | None = None) -> str:
    """Format a line of the table, in milliseconds."""
    columns = [*(parts[part] for part in PARTS), sum(parts.values()) if step is None else step]
    return f"| {name} | {ranks} | " + " | ".join(f"{1e3 * each:.2f}" for each in columns) + " |"


def bucket_of(ranks: int, per_node: int = 1, hierarchical: bool = True) -> int:
    """Return the default of bucket_bytes."""
    from fastopt.distributed.transport import default_buckets

    within = hierarchical and per_node > 1
    return default_buckets(*((ranks // per_node, per_node) if within else (ranks,)))[0]


def print_parts(name: str, shapes: Shapes, of_ranks: Callable[[int], dict]) -> None:
    size, costs = elements(shapes), {}
    print(f"| {name} | ranks | {' | '.join(PARTS)} | step |\n|---|---|---|---|---|---|")
    for ranks in (1, 2, 4):
        found = of_ranks(ranks)
        costs[ranks] = Costs(**found["costs"])
        print(row("measured", ranks, found["parts"], found["step"]))
        print(row("model", ranks, costs[ranks].step(size, ranks)), flush=True)
    for ranks in (64, 1024):
        print(row("prediction", ranks, predicted(costs[1], size, ranks, bucket_of(ranks))))
    print(f"costs on one rank: {costs[1]}\n")


def print_nodes() -> None:
    """Print the predicted milliseconds of bytes and messages for several ranks per node."""
    ways = [(1, True), (8, False), (8, True), (64, False), (64, True)]
    names = [f"{n} per node{', in rank order' * (not within)}" for n, within in ways]
    print(f"| | ranks | {' | '.join(names)} |\n|---|---|{'---|' * len(ways)}")
    for name, size in (("ResNet-50", elements(resnet50())), ("1e9 elements", 10**9)):
        for ranks in (64, 1024, 16_384):
            times = [
                " / ".join(
                    f"{1e3 * each:.1f}"
                    for each in communication(size, ranks, bucket_of(ranks, n, within), n, within)
                )
                if n < ranks
                else "one node"
                for n, within in ways
            ]
            print(f"| {name} | {ranks:,} | {' | '.join(times)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=[*MEASURES, "nodes"], default="parts")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--name", choices=MODELS | PARTIAL, help="measure this on the ranks of this job"
    )
    args = parser.parse_args()
    if args.name:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        found = MEASURES[args.what](comm, (MODELS | PARTIAL)[args.name], args.rounds)
        if comm.rank == 0:
            print(json.dumps(found))
        return
    if args.what == "nodes":
        print_nodes()
        return
    if mpiexec() is None:
        sys.exit("scaling.py needs mpiexec, as of pip install mpich")
    for name, shapes in (MODELS | PARTIAL if args.what == "ways" else MODELS).items():
        options = name, args.what, "--rounds", str(args.rounds)
        if args.what == "parts":
            print_parts(name, shapes, lambda ranks, o=options: job(ranks, Path(__file__), *o))
            continue
        for ranks in [2] if args.what == "backward" else [1, 2, 4]:
            print(f"| {name}, {ranks} ranks | median, ms | minimum, ms |\n|---|---|---|")
            for way, (median, least) in job(ranks, Path(__file__), *options).items():
                print(f"| {way} | {1e3 * median:.1f} | {1e3 * least:.1f} |", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
