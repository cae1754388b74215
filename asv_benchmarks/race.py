"""Steps that take turns, each in a process of its own."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping

import numba
import numpy as np

from fastopt.bench.clock import Call, interleaved, sampler

__all__ = ["Make", "note", "race"]

UNKNOWN = "a library has no such step"

Make = Callable[[], Call]


class Worker:
    """A process that measures one step whenever it is asked to."""

    def __init__(self, row: str, make: Make) -> None:
        self.row = row
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(pipe, make), daemon=True)
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


def serve(pipe, make: Make) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the table alone goes to stdout
    try:
        if hasattr(os, "sched_setaffinity"):  # jax has no other setting of its threads
            usable = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, usable[: numba.config.NUMBA_NUM_THREADS])
        sample = sampler(make())
    except NotImplementedError:
        pipe.send(UNKNOWN)
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".partition("\n")[0])
        return
    pipe.send(None)
    while pipe.recv():
        pipe.send(sample())


def race(makes: Mapping[str, Make], what: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each step, and the median of its ratio to the first one's in a round."""
    workers = [Worker(row, make) for row, make in makes.items()]
    for worker in workers:
        if worker.error and worker.error != UNKNOWN:
            note(f"{worker.row}, {what}: skipped, {worker.error}")
    workers = [worker for worker in workers if not worker.error]
    times = interleaved([worker.sample for worker in workers], rounds)
    for worker in workers:
        worker.stop()
    return {
        worker.row: (float(np.median(column)), float(np.median(column / times[:, 0])))
        for worker, column in zip(workers, times.T, strict=True)
    }


def note(line: str) -> None:
    print(line, file=sys.stderr)
