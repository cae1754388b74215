"""Steps of Adam on several ranks, in turn with handwritten MPI code.

    python ranks.py             1, 2 and 4 ranks on this machine: a step, medians and minima
    python ranks.py --backward  2 ranks: a simulated backward pass and a step

A parent process starts ``mpiexec`` for each number of ranks. In each job, all variants take turns,
on all ranks at once, so that disturbances affect them alike.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.mpi import job
from benchmarks.tables import elements
from scaling import MODELS, clocked

Ways = dict[str, Callable[[], object]]


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
    """Return all variants of a step."""
    from fastopt import optimizer
    from fastopt.mpi import ShardedUpdater

    ways: Ways = {}
    indices = list(range(len(shapes)))
    for name, one in (("fastopt", False), ("fastopt, flat_like", True)):
        weights, grads = arrays(shapes, one)
        updater = ShardedUpdater(optimizer.Adam(), comm)
        ways[name] = lambda u=updater, g=grads, w=weights: u(indices, g, w)
    return ways | by_hand(comm, elements(shapes))


def passes(comm, shapes, seconds: float) -> Ways:
    """Return variants of a simulated backward pass of `seconds`, followed by a step."""
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
                        spends(begin + seconds * done / size)
                        if begins:
                            u.begin(k, g[k])
                    u(indices, g, w)

                memory, calls = "flat_like" if one else "apart", "begin()" if begins else "call"
                ways[f"{spends.__name__}, {memory}, {calls}"] = step
    return ways


def measure(ways: Ways, comm, rounds: int) -> dict[str, list[float]]:
    """Return median and minimum seconds of each variant."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, work in ways.items():
            seconds = clocked(comm, work)
            if turn >= 2:
                times[name].append(seconds)
    return {name: [float(np.median(each)), min(each)] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.1, help="of the backward pass")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--name", choices=MODELS, help="measure this on the ranks of this job")
    args = parser.parse_args()
    if args.name:
        from mpi4py import MPI

        comm, shapes = MPI.COMM_WORLD, MODELS[args.name]
        ways = passes(comm, shapes, args.seconds) if args.backward else steps(comm, shapes)
        found = measure(ways, comm, args.rounds)
        if comm.rank == 0:
            print(json.dumps(found))
        return
    options = ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    options += ["--backward"] if args.backward else []
    for name in MODELS:
        for ranks in args.ranks or ([2] if args.backward else [1, 2, 4]):
            print(f"| {name}, {ranks} ranks | median, ms | minimum, ms |\n|---|---|---|")
            for way, (median, least) in job(ranks, Path(__file__), name, *options).items():
                print(f"| {way} | {1e3 * median:.1f} | {1e3 * least:.1f} |", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
