"""Barriers and maxima of few numbers in memory that the ranks of a node share.

Reason: speed, as a message of gloo passes through threads of both processes: a step over gloo takes
a third of the time within a node (``docs/scaling.md``). MPI libraries have operations like these.

*Order of memory.* A rank writes, enters its counter, and others read what it wrote once they have
seen the counter: :func:`fastopt._kernels.copying.meet` has a fence on both sides. *Lifetime.* The
array of the counters keeps the memory, and each operation keeps the array.

Tests: ``tests/distributed/test_torch.py``.
"""

import os
import select
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fastopt._kernels import copying
from fastopt._kernels.compiling import bind
from fastopt.distributed.agreement import attempt, of_all
from fastopt.distributed.communicator import leave_cpu
from fastopt.distributed.job import shared_zeros
from fastopt.distributed.ranks import LOOK, Ranks
from fastopt.optimizer.optimizer import Array

COPIES = 32
"""Number of communicators of the same ranks that have counters."""

ROOM = 24
"""Words of a maximum, of 8 bytes. A rank has two places for them, in turn: it writes to one when
all ranks have entered the maximum before, and so have read the one before that."""

WORDS = 2 * ROOM + 16
"""Words of a rank: the numbers of barriers and maxima that it has entered, apart in cache lines
from what other ranks write, and two maxima."""

BARRIERS, MAXIMA, VALUES = 0, 8, 16

SPINS = 200
"""Tests of an operation, about a millisecond, before a rank that waits sleeps."""

NAP = 0.0002
"""Seconds of sleep between later tests."""


class SharedCounters:
    """Counters of the ranks of a communicator, all of them on one node.

    Parameters
    ----------
    words : numpy.ndarray
        Memory that the ranks share: for each communicator and rank, :data:`WORDS` words.
    rank : int
        This rank.
    processes : dict of int to int
        Process of each rank, by the rank's number in the job.
    number : int
        Number of the communicator.
    """

    def __init__(self, words: Array, rank: int, processes: dict[int, int], number: int = 0) -> None:
        self.words, self.rank, self.processes = words, rank, processes
        self.own = words[number]
        self._entered = {BARRIERS: 0, MAXIMA: 0}

    def of_copy(self, number: int) -> "SharedCounters | None":
        """Counters of a copy of the communicator, whose number is the same on all ranks."""
        if number >= COPIES:
            return None
        return SharedCounters(self.words, self.rank, self.processes, number)

    def barrier(self) -> "Meeting":
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        return self._enter(BARRIERS)

    def all_reduce_max(self, values: Array) -> "Meeting":
        """See :class:`~fastopt.distributed.communicator.Communicator`; one at a time."""
        start = VALUES + ROOM * (self._entered[MAXIMA] % 2)
        places = self.own[:, start : start + len(values)]
        places[self.rank] = values
        return self._enter(MAXIMA, values, places)

    def _enter(self, counter: int, *maximum: Array) -> "Meeting":
        self._entered[counter] += 1
        return Meeting(self, counter, self._entered[counter], *maximum)


class Meeting:
    """An operation that is complete once the counters of all ranks have its number."""

    def __init__(
        self,
        counters: SharedCounters,
        counter: int,
        number: int,
        values: Array | None = None,
        places: Array | None = None,
    ) -> None:
        self._counters, self._values, self._places = counters, values, places
        self._arguments = counters.own, counter, counters.rank, number
        self._tests, self._look = 0, time.monotonic() + LOOK

    def Test(self) -> bool:
        """See :class:`~fastopt.distributed.communicator.Request`."""
        if meet()(*self._arguments):
            if self._values is not None and self._places is not None:
                self._values[...] = self._places.max(axis=0)
                self._values = None
            return True
        if (now := time.monotonic()) > self._look:
            self._look = now + LOOK
            for rank, process in self._counters.processes.items():
                if has_ended(process):
                    raise RuntimeError(f"process {process} of rank {rank} has ended")
        return False

    def rest(self, seconds: float) -> None:
        """See :func:`fastopt.distributed.communicator.rest`."""
        self._tests += 1
        leave_cpu() if self._tests < SPINS else time.sleep(min(NAP, seconds))


@cache
def meet() -> Any:
    """Compiled :func:`fastopt._kernels.copying.meet`."""
    return bind(copying.meet(), np.empty((0, 0), np.int64), 0, 0, 0)


def has_ended(process: int) -> bool:
    """Whether a process has ended, on Linux."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(descriptor)


def shared_counters(ranks: Ranks, numbers: Sequence[int]) -> SharedCounters | None:
    """Counters of the ranks of a node, with these numbers in the job; all of them must ask for it.

    None if they cannot share memory or see each other's processes.
    """
    processes = of_all(ranks, np.array([os.getpid()]))[:, 0].tolist()
    unseen, error = attempt(lambda: any(map(has_ended, processes)))
    if of_all(ranks, np.array([bool(unseen or error)])).any():
        return None
    memory, error = attempt(shared_zeros, ranks, 8 * COPIES * ranks.size * WORDS)
    if error is not None:  # on all ranks
        return None
    words = memory.view(np.int64).reshape(COPIES, ranks.size, WORDS)
    return SharedCounters(words, ranks.rank, dict(zip(numbers, processes, strict=True)))
