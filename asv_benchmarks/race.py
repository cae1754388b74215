"""Steps that are timed in turn, each in its own process."""

import contextlib
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
    """A process that measures one step at a time, on request.

    Parameters
    ----------
    duration : float
        Seconds of a sample, at least one call.
    environment : dict of str to str
        Environment variables of the process.
    """

    def __init__(self, duration: float, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(pipe, duration), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment)
        self._process.start()
        os.environ.clear()
        os.environ.update(before)
        pipe.close()

    def ask(self, request: object) -> object:
        self._pipe.send(request)
        return self._pipe.recv()

    def sample(self) -> float:
        time.sleep(0.02)  # until the threads of the previous process stop spinning
        return self.ask("sample")

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(pipe, duration: float) -> None:
    """Serve requests: create a step and return an error or "", sample it, or release it."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for the table only
    if hasattr(os, "sched_setaffinity"):  # jax has no other way to limit its threads
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[: numba.config.NUMBA_NUM_THREADS])
    sample = None
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            if request == "sample":
                pipe.send(sample())
                continue
            sample, error = None, ""
            gc.collect()
            try:
                sample = request and sampler(request(), duration)
            except NotImplementedError:
                error = UNKNOWN
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}".partition("\n")[0]
            pipe.send(error)


class Race:
    """Processes for the steps of a table, by name; they end with the ``with`` block.

    Parameters
    ----------
    duration : float
        Seconds of a sample, at least one call.
    environments : dict of str to dict
        Environment variables of the process of each name.
    """

    def __init__(
        self, duration: float = 0.01, environments: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._workers: dict[str, Worker] = {}
        self._duration, self._environments = duration, environments or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.stop()

    def run(self, makes: Mapping[str, Make], what: str, rounds: int) -> dict[str, np.ndarray]:
        """Return the seconds of each step by round."""
        racing = {}
        for name, make in makes.items():
            if name not in self._workers:
                self._workers[name] = Worker(self._duration, self._environments.get(name, {}))
            try:
                error = self._workers[name].ask(make)
            except (EOFError, BrokenPipeError):
                error = "its process ended"
            if not error:
                racing[name] = self._workers[name]
            elif error != UNKNOWN:
                note(f"{name}, {what}: skipped, {error}")
        times = interleaved([worker.sample for worker in racing.values()], rounds)
        for worker in racing.values():
            worker.ask(None)  # releases its memory
        return dict(zip(racing, times.T, strict=True))


def note(line: str) -> None:
    print(line, file=sys.stderr)
