"""Steps that are timed in turn, each in its own process."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

import numba
import numpy as np

from fastopt.bench.clock import Call, interleaved, sampler

__all__ = ["Make", "Race", "note"]

UNKNOWN = "a library has no such step"

Make = Callable[[], Call]


class Worker:
    """A process that measures one step at a time, on request."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(pipe,), daemon=True)
        self._process.start()
        pipe.close()

    def begin(self, make: Make) -> str:
        """Create a step; return why that is impossible, or an empty string."""
        try:
            self._pipe.send(make)
            return self._pipe.recv()
        except (EOFError, BrokenPipeError):
            return "its process ended"

    def sample(self) -> float:
        time.sleep(0.01)  # until the threads of the previous process stop spinning
        self._pipe.send("sample")
        return self._pipe.recv()

    def end(self) -> None:
        """Release the memory of the step."""
        self._pipe.send("end")

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(pipe) -> None:
    """Serve requests: create a step, sample it, or release it."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for the table only
    if hasattr(os, "sched_setaffinity"):  # jax has no other way to limit its threads
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[: numba.config.NUMBA_NUM_THREADS])
    sample = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request == "sample":
            pipe.send(sample())
        elif request == "end":
            sample = None
            gc.collect()
        else:
            sample, error = attempt(request)
            pipe.send(error)


def attempt(make: Make) -> tuple[Callable[[], float] | None, str]:
    """Return the sampler of a step and an empty string, or None and the error."""
    try:
        return sampler(make()), ""
    except NotImplementedError:
        return None, UNKNOWN
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


class Race:
    """Processes for the steps of a table, by name; they end with the ``with`` block."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.stop()

    def run(
        self, makes: Mapping[str, Make], what: str, rounds: int
    ) -> dict[str, tuple[float, float]]:
        """Return the median seconds of each step, and its median ratio to the first step."""
        racing = {}
        for name, make in makes.items():
            if name not in self._workers:
                self._workers[name] = Worker()
            error = self._workers[name].begin(make)
            if not error:
                racing[name] = self._workers[name]
            elif error != UNKNOWN:
                note(f"{name}, {what}: skipped, {error}")
        times = interleaved([worker.sample for worker in racing.values()], rounds)
        for worker in racing.values():
            worker.end()
        return {
            name: (float(np.median(column)), float(np.median(column / times[:, 0])))
            for name, column in zip(racing, times.T, strict=True)
        }


def note(line: str) -> None:
    print(line, file=sys.stderr)
