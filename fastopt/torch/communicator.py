"""Process groups of torch.distributed, whose operations gloo performs on the CPU."""

import atexit
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fastopt.distributed.communicator import Parts, Request, wait_for_all
from fastopt.optimizer.optimizer import Array

PATIENT = timedelta(days=365)
"""Time limit of gloo, which does not apply: callers have their own."""


class Works:
    """Operations of torch that are one operation, and what is done once they are complete."""

    def __init__(self, works: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        self.works, self.then = works, then

    def Test(self) -> bool:
        """See :class:`~fastopt.distributed.communicator.Request`."""
        if not all(work.is_completed() for work in self.works):
            return False
        for work in self.works:
            work.wait()  # raises if it has failed
        self.works = ()
        if self.then is not None:
            self.then()
            self.then = None
        return True


class GlooCommunicator:
    """A process group of its own, with the ranks of another one of any backend."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.group: Any = dist.new_group(
            self.ranks, timeout=PATIENT, backend="gloo", use_local_synchronization=True
        )
        self.rank, self.size = dist.get_rank(self.group), len(self.ranks)
        self._store = self.group.get_group_store()
        self._read = 0

    def all_reduce_max(self, values: Array) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        work = dist.all_reduce(
            torch.from_numpy(values), dist.ReduceOp.MAX, self.group, async_op=True
        )
        return Works([work])

    def all_gather(self, data: Array, parts: Parts) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        works = [
            dist.broadcast(part, rank, self.group, async_op=True)
            for part, rank in zip(_slices(data, parts), self.ranks, strict=True)
            if len(part)
        ]
        return Works(works)

    def all_to_all(self, source: Array, sent: Parts, target: Array, received: Parts) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        there, here = _whole(source, sent, self.rank), _whole(target, received, self.rank)
        if there is None or here is None or there[1] != here[1]:
            return self._all_to_copies(source, sent, target, received)
        counts = [[*map(int, parts[0])] for parts in (received, sent)]
        for each in counts:
            each[self.rank] += here[1]
        work = dist.all_to_all_single(here[0], there[0], *counts, self.group, async_op=True)
        return Works([work])

    def _all_to_copies(self, source: Array, sent: Parts, target: Array, received: Parts) -> Request:
        """Like :meth:`all_to_all` for parts that are not consecutive, which torch needs."""
        counts = [[*map(int, parts[0])] for parts in (received, sent)]
        given, came = (
            torch.cat(_slices(source, sent)),
            torch.empty(sum(counts[0]), dtype=torch.uint8),
        )
        work = dist.all_to_all_single(came, given, *counts, self.group, async_op=True)

        def spread() -> None:
            for part, own in zip(_slices(target, received), came.split(counts[0]), strict=True):
                part.copy_(own)

        return Works([work], spread)

    def barrier(self) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        return Works([dist.barrier(self.group, async_op=True)])

    def send(self, rank: int, message: bytes) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        number = self._store.add(f"sent to {rank}", 1)
        self._store.set(f"{number} to {rank}", f"{self.rank} ".encode() + message)
        return Works([])

    def receive(self) -> tuple[int, bytes] | None:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        key = f"{self._read + 1} to {self.rank}"
        if not self._store.check([key]):
            return None
        self._read += 1
        source, _, message = self._store.get(key).partition(b" ")
        self._store.delete_key(key)
        return int(source), message

    def duplicate(self) -> tuple["GlooCommunicator", Request]:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        return GlooCommunicator(self.ranks), Works([])

    def on_node(self) -> "GlooCommunicator":
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        names: list[Any] = [None] * self.size
        dist.all_gather_object(names, socket.gethostname(), self.group)
        here = zip(self.ranks, names, strict=True)
        return GlooCommunicator([rank for rank, name in here if name == names[self.rank]])

    def free(self) -> None:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        dist.destroy_process_group(self.group)


def _slices(data: Array, parts: Parts) -> list[Any]:
    memory = torch.from_numpy(data)
    return [memory[start : start + count] for count, start in zip(*parts, strict=True)]


def _whole(data: Array, parts: Parts, own: int) -> tuple[Any, int] | None:
    """The parts as one tensor in the same memory, and the bytes before the part after `own`'s.

    None if the parts are not consecutive. A part of `own` that stays in place may be left out.
    """
    first = end = gap = 0
    for rank, (count, start) in enumerate(zip(*parts, strict=True)):
        if not count:
            continue
        if end == 0:
            first = start
        elif start != end:
            if parts[0][own] or gap or rank < own:
                return None
            gap = start - end
            if gap < 0:
                return None
        end = start + count
    return torch.from_numpy(data[first:end]), gap


_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Object attached to each process group."""


def attached(
    comm: object, make: Callable[[Any], Any], usable: Callable[[Any], bool], timeout: float
) -> Any:
    """See :func:`fastopt.distributed.communicator.attached`.

    Raises
    ------
    TypeError
        `comm` is not a process group.
    """
    if not isinstance(comm, dist.ProcessGroup):
        kind = type(comm).__name__
        raise TypeError(f"comm must be a process group of torch.distributed, got {kind}")
    found = _groups.get(comm)
    if found is None or not usable(found):
        own = GlooCommunicator(dist.get_process_group_ranks(comm))
        wait_for_all(own.barrier(), own.rank, own.size, timeout)
        found = _groups[comm] = make(own)
        atexit.register(_end, found)
    return found


def _end(found: Any) -> None:
    """Tell the other ranks that this program is over."""
    with suppress(Exception):  # as they may have ended first
        found.end()
