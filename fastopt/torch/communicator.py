"""Process groups of torch.distributed, whose operations gloo performs on the CPU.

Reason: gloo moves the bytes; waits and messages, which torch lacks, make the end of one rank an
error of the others in time.

Each object here has a process group of gloo that torch does not list, with a name that its ranks
have agreed on in the store of the user's group: other groups of the program do not matter, and
memory and connections are freed with the object.

Tests: ``tests/distributed/test_torch.py``.
"""

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import torch.distributed as dist

from fastopt.distributed.agreement import of_all
from fastopt.distributed.communicator import Parts, Request, late
from fastopt.distributed.counters import ROOM, SharedCounters, shared_counters
from fastopt.distributed.job import ENDED, Node
from fastopt.distributed.ranks import Ranks, is_forked
from fastopt.optimizer.optimizer import Array

Result = TypeVar("Result")

PATIENT = timedelta(days=365)
"""Time limit of gloo's operations, which does not apply: callers have their own."""

ANSWER = 0.2
"""Seconds in which a store answers, unless its process is stopped."""

MARGIN = 1.0
"""Seconds in which torch reports that its own time limit is over."""

STORE = "the store of torch has ended, which is in the process of rank 0, or of the launcher"

HOST = 256
"""Bytes of the name of a machine."""


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

    def rest(self, seconds: float) -> None:
        """See :func:`fastopt.distributed.communicator.rest`."""
        for work in self.works:
            if not work.is_completed():
                with suppress(RuntimeError):  # out of time, or a failure that Test() raises
                    work.wait(timedelta(seconds=seconds))
                return


class StoreThread:
    """Thread that operates on a store of torch, which blocks while the store does not answer.

    Parameters
    ----------
    store : torch.distributed.Store
        The store.
    limit : float
        Seconds to wait for other ranks.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self.store, self.limit = store, limit
        tasks: SimpleQueue[Any] = SimpleQueue()
        self._tasks = tasks
        threading.Thread(target=_work, args=(tasks,), name="fastopt store", daemon=True).start()
        finalize(self, tasks.put, None)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Start some work, after what was submitted before."""
        future: Future[Result] = Future()
        self._tasks.put((future, work))
        return future

    def result(self, work: Callable[[], Result]) -> Result:
        """Do work that waits for other ranks, and return its result.

        Raises
        ------
        TimeoutError
            It takes longer than it may.
        """
        try:
            return self.submit(work).result(self.limit + MARGIN)
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error


def _work(tasks: "SimpleQueue[Any]") -> None:
    """Do the work of a :class:`StoreThread`."""
    while (task := tasks.get()) is not None:
        future, work = task
        try:
            future.set_result(work())
        except dist.DistNetworkError as error:
            future.set_exception(RuntimeError(f"{STORE}: {error}"))
        except BaseException as error:
            future.set_exception(error)
        del future, work, task


class GlooCommunicator:
    """A process group that nothing else uses.

    Its ranks meet in shared memory if they are on one node, see :class:`SharedCounters`.

    Parameters
    ----------
    thread : StoreThread
        Thread of the store in which the ranks meet.
    name : str
        Name of the group in the store, which no other group has had.
    rank, size : int
        This rank, and the number of ranks.
    """

    sends_in_memory = False

    def __init__(self, thread: StoreThread, name: str, rank: int, size: int) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._thread, self._copies, self._read = thread, 0, 0
        self._store = store = dist.PrefixStore(name, thread.store)
        limit = timedelta(seconds=max(thread.limit, 1e-3))
        self.group: Any = thread.result(lambda: dist.ProcessGroupGloo(store, rank, size, limit))
        self._counters: SharedCounters | None = None
        self._looking: Future[bytes | None] | None = None
        self._started: Sequence[Any] = ()
        """The last operation, which keeps connections alive."""

    def all_reduce_max(self, values: Array) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        if self._counters is not None and len(values) <= ROOM:
            return self._counters.all_reduce_max(values)
        options = _patient(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MAX
        return self._start([self.group.allreduce([torch.from_numpy(values)], options)])

    def all_gather(self, data: Array, parts: Parts) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        works = []
        for rank, part in enumerate(_slices(data, parts)):
            options = _patient(dist.BroadcastOptions())
            options.rootRank, options.rootTensor = rank, 0
            if len(part):
                works.append(self.group.broadcast([part], options))
        return self._start(works)

    def all_to_all(self, source: Array, sent: Parts, target: Array, received: Parts) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        there, here = _whole(source, sent, self.rank), _whole(target, received, self.rank)
        counts = [[*map(int, parts[0])] for parts in (received, sent)]
        options = _patient(dist.AllToAllOptions())
        if there is not None and here is not None and there[1] == here[1]:
            for part_counts in counts:
                part_counts[self.rank] += here[1]
            return self._start([self.group.alltoall_base(here[0], there[0], *counts, options)])
        # Parts that are not consecutive, which torch needs, are copied.
        packed = torch.cat(_slices(source, sent))
        came = torch.empty(sum(counts[0]), dtype=torch.uint8)

        def spread() -> None:
            for part, piece in zip(_slices(target, received), came.split(counts[0]), strict=True):
                part.copy_(piece)

        return self._start([self.group.alltoall_base(came, packed, *counts, options)], spread)

    def barrier(self) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        if self._counters is not None:
            return self._counters.barrier()
        return self._start([self.group.barrier(_patient(dist.BarrierOptions()))])

    def _start(self, works: Sequence[Any], then: Callable[[], None] | None = None) -> Works:
        self._started = works
        return Works(works, then)

    def send(self, rank: int, message: bytes) -> Request:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        store, data = self._store, f"{self.rank} ".encode() + message

        def post() -> None:
            store.set(f"{store.add(f'sent to {rank}', 1)} to {rank}", data)

        return Posted(self._thread.submit(post))

    def receive(self) -> tuple[int, bytes] | None:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        store, key = self._store, f"{self._read + 1} to {self.rank}"

        def look() -> bytes | None:
            if not store.check([key]):
                return None
            message: bytes = store.get(key)
            store.delete_key(key)
            return message

        if self._looking is None:
            self._looking = self._thread.submit(look)
        try:
            answer = self._looking.result(ANSWER)
        except TimeoutError:  # the next call looks for the answer
            return None
        self._looking = None
        if answer is None:
            return None
        self._read += 1
        source, _, message = answer.partition(b" ")
        return int(source), message

    def duplicate(self) -> tuple["GlooCommunicator", Request]:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        self._copies += 1
        name = f"{self.name}.{self._copies}"
        copy = GlooCommunicator(self._thread, name, self.rank, self.size)
        if self._counters is not None:
            copy._counters = self._counters.of_copy(self._copies)
        return copy, Works([])

    def on_node(self) -> "GlooCommunicator":
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        ranks, host = Ranks(self), np.zeros(HOST, np.uint8)
        ranks.timeout = self._thread.limit
        name = socket.gethostname().encode()[:HOST]
        host[: len(name)] = np.frombuffer(name, np.uint8)
        here = np.flatnonzero((of_all(ranks, host) == host).all(axis=1)).tolist()
        group = f"{self.name}.node of {here[0]}"
        node = GlooCommunicator(self._thread, group, here.index(self.rank), len(here))
        if node.size > 1:
            beside = Ranks(node)
            beside.timeout = self._thread.limit
            node._counters = shared_counters(beside, here)
        if node.size == self.size > 1:
            self._counters = shared_counters(ranks, here)
        return node

    def flush(self) -> None:
        """Wait until messages are in the store, if it answers."""
        self._thread.submit(lambda: None).result(ANSWER)

    def free(self) -> None:
        """See :class:`~fastopt.distributed.communicator.Communicator`."""
        attributes = vars(self)
        self._counters = None  # their memory has a descriptor
        started, group = attributes.pop("_started", ()), attributes.pop("group", None)
        attributes.pop("_thread", None), attributes.pop("_store", None)
        if group is not None and not all(work.is_completed() for work in started):
            # The group would wait for its operations, which a rank that is stopped never ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def __del__(self) -> None:
        self.free()


class Posted:
    """A message on its way to the store."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def Test(self) -> bool:
        """See :class:`~fastopt.distributed.communicator.Request`."""
        return self.future.done()


def _patient(options: Any) -> Any:
    """Options of an operation without a time limit of its own."""
    options.timeout = PATIENT
    return options


def _slices(data: Array, parts: Parts) -> list[Any]:
    memory = torch.from_numpy(data)
    return [memory[start : start + count] for count, start in zip(*parts, strict=True)]


def _whole(data: Array, parts: Parts, mine: int) -> tuple[Any, int] | None:
    """The parts as one tensor in the same memory, and the bytes of the gap between them.

    None if they are not consecutive. The part of rank `mine`, which stays in place, may be the gap.
    """
    first = end = gap = 0
    for rank, (count, start) in enumerate(zip(*parts, strict=True)):
        if not count:
            continue
        if end == 0:
            first = start
        elif start != end:
            if parts[0][mine] or gap or rank < mine:
                return None
            gap = start - end
            if gap < 0:
                return None
        end = start + count
    return torch.from_numpy(data[first:end]), gap


_groups: WeakKeyDictionary[Any, Node] = WeakKeyDictionary()
"""Object attached to each process group."""


def attached(
    comm: object, make: Callable[[Any], Node], usable: Callable[[Node], bool], timeout: float
) -> Node:
    """See :func:`fastopt.distributed.communicator.attached`.

    Raises
    ------
    TypeError
        `comm` is not a process group.
    """
    if not isinstance(comm, dist.ProcessGroup):
        kind = type(comm).__name__
        raise TypeError(f"comm must be a process group of torch.distributed, got {kind}")
    node = _groups.get(comm)
    if node is None or not usable(node):
        node = _groups[comm] = make(joined(comm, timeout))
        node.at_end(_say_farewell)
    return node


def _say_farewell(ranks: Ranks) -> None:
    """Tell other ranks that this one makes no more calls: its program or its job is over."""
    if ranks.size > 1 and not is_forked():
        with suppress(Exception):  # as they may have ended first
            ranks.leave(ENDED)
            cast(GlooCommunicator, ranks.comm).flush()


def joined(comm: dist.ProcessGroup, timeout: float) -> GlooCommunicator:
    """Create a communicator with the ranks of a process group of any backend; collective.

    Raises
    ------
    TimeoutError
        Some rank did not take part within the time limit, or the store does not answer.
    """
    rank, size = comm.rank(), comm.size()
    thread = StoreThread(comm.get_group_store(), timeout)
    try:
        name = thread.result(lambda: _meet(thread.store, rank, size, time.monotonic() + timeout))
        return GlooCommunicator(thread, name, rank, size)
    except TimeoutError as error:
        raise late(rank, size, timeout) from error


def _meet(store: Any, rank: int, size: int, end: float) -> str:
    """Return a new name that all ranks get, once all of them are here.

    The first rank waits for a word of each other one, and answers it; a word that was given up is
    not answered.
    """
    word = uuid4().hex
    if rank:
        place = f"fastopt {rank}"
        store.set(place, word)
        try:
            return _taken(store, f"{place} {word}", end)
        except TimeoutError:
            store.delete_key(place)
            raise
    words = [_taken(store, f"fastopt {other}", end) for other in range(1, size)]
    for other, came in enumerate(words, 1):
        store.set(f"fastopt {other} {came}", word)
    return word


def _taken(store: Any, key: str, end: float) -> str:
    """Wait for a text in a store, and remove it."""
    while not store.check([key]):
        if time.monotonic() > end:
            raise TimeoutError(key)
        time.sleep(0.001)
    text: str = store.get(key).decode()
    store.delete_key(key)
    return text
