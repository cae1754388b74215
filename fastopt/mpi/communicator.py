"""Communicators of mpi4py, and how a job of MPI ends.

Reason: MPI moves the bytes, by nonblocking collectives; the end of one rank is an error of the
others, which would wait for it for ever.

An uncaught error of one rank ends the job, and ranks tell each other when their programs end.
"""

import atexit
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, TextIO, cast

from mpi4py import MPI

from fastopt._kernels.threads import thread_count
from fastopt.distributed.communicator import Parts, wait_for_all
from fastopt.distributed.job import Node, private
from fastopt.distributed.ranks import is_forked
from fastopt.optimizer.optimizer import Array

PATIENCE = 0.2
"""Seconds within which ranks normally end together."""

MOST = 2**31 - 1
"""Largest count and offset; some MPI libraries have 32-bit integers."""

TAG = 77


class MPICommunicator:
    """A communicator of mpi4py that nothing else uses."""

    sends_in_memory = True

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def all_reduce_max(self, values: Array) -> Any:
        """See :class:`~fastopt.distributed.Communicator`."""
        return self.comm.Iallreduce(MPI.IN_PLACE, values, MPI.MAX)

    def all_gather(self, data: Array, parts: Parts) -> Any:
        """See :class:`~fastopt.distributed.Communicator`."""
        parts, kind = _in_units(parts)
        return self.comm.Iallgatherv(MPI.IN_PLACE, [data, parts, kind])

    def all_to_all(self, source: Array, sent: Parts, target: Array, received: Parts) -> Any:
        """See :class:`~fastopt.distributed.Communicator`."""
        there, here = _in_units(sent), _in_units(received)
        return self.comm.Ialltoallv([source, *there], [target, *here])

    def barrier(self) -> Any:
        """See :class:`~fastopt.distributed.Communicator`."""
        return self.comm.Ibarrier()

    def send(self, rank: int, message: bytes) -> Any:
        """See :class:`~fastopt.distributed.Communicator`."""
        return self.comm.Isend([message, MPI.BYTE], rank, TAG)

    def receive(self) -> tuple[int, bytes] | None:
        """See :class:`~fastopt.distributed.Communicator`."""
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
            return None
        source, data = status.Get_source(), bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv([data, MPI.BYTE], source, TAG)
        return source, bytes(data)

    def duplicate(self) -> tuple["MPICommunicator", Any]:
        """See :class:`~fastopt.distributed.Communicator`."""
        copy, request = self.comm.Idup()
        return MPICommunicator(copy), request

    def on_node(self) -> "MPICommunicator":
        """See :class:`~fastopt.distributed.Communicator`."""
        return MPICommunicator(self.comm.Split_type(MPI.COMM_TYPE_SHARED))

    def free(self) -> None:
        """See :class:`~fastopt.distributed.Communicator`."""
        self.comm.Free()


def _in_units(parts: Parts) -> tuple[Parts, Any]:
    """Counts and offsets in units whose numbers MPI can hold, and the datatype of a unit."""
    if max(map(max, parts)) <= MOST:
        return parts, MPI.BYTE
    unit = math.gcd(*parts[0], *parts[1])
    counts, starts = ([number // unit for number in numbers] for numbers in parts)
    return (counts, starts), _unit(unit)


@cache
def _unit(size: int) -> Any:
    """Datatype of some bytes."""
    return MPI.BYTE.Create_contiguous(size).Commit()


class Attached:
    """What is attached to a communicator of the user, and a communicator for the farewell."""

    def __init__(self, node: Node, farewell: MPI.Comm) -> None:
        self.node, self.farewell = node, farewell

    def free(self) -> None:
        """Free all communicators, since the user frees theirs."""
        if self in _everything:
            _everything.remove(self)
            self.node.free()
            self.farewell.Free()


_everything: list[Attached] = []
"""Attached objects that have not been freed."""

_keyval: int = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, attachment: attachment.free())
"""Attribute key of the :class:`Attached` of a communicator."""


def attached(
    comm: object, make: Callable[[Any], Node], usable: Callable[[Node], bool], timeout: float
) -> Node:
    """See :func:`fastopt.distributed.communicator.attached`.

    Raises
    ------
    TypeError
        `comm` is not an intracommunicator.
    """
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be a communicator of mpi4py, got {type(comm).__name__}")
    attachment = cast(Attached | None, comm.Get_attr(_keyval))
    if attachment is None or not usable(attachment.node):
        if MPI.COMM_WORLD.size > 1:
            _end_all_with_one()
        copy, request = comm.Idup()
        wait_for_all(request, comm.rank, comm.size, timeout)
        node = make(MPICommunicator(copy))
        attachment = Attached(node, comm.Dup())  # all ranks are here
        _everything.append(attachment)
        comm.Set_attr(_keyval, attachment)
    return attachment.node


@cache
def _end_all_with_one() -> None:
    """Install hooks so that an uncaught error in any thread, or the end of a rank, ends the job.

    Otherwise the other ranks would wait forever.
    """
    before, in_thread = sys.excepthook, threading.excepthook

    def end(
        kind: type[BaseException], error: BaseException | None, show: Callable[[], object]
    ) -> None:
        if is_forked():
            show()
            return
        world = MPI.COMM_WORLD
        try:
            show()
            who = f"rank {world.rank} of {world.size}"
            print(f"{who} ends the job: {kind.__name__}: {error}", file=sys.stderr)
            for file in (sys.stdout, sys.stderr):
                await_reader(file)
        finally:  # even if printing fails
            world.Abort(1)

    def of_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        end(kind, error, lambda: before(kind, error, trace))

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if issubclass(arguments.exc_type, SystemExit):
            in_thread(arguments)
        else:
            end(arguments.exc_type, arguments.exc_value, lambda: in_thread(arguments))

    sys.excepthook, threading.excepthook = of_program, of_thread
    atexit.register(_say_farewell)
    # MPI deletes this attribute first in MPI.Finalize(), which a program may call itself
    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _say_farewell())
    MPI.COMM_SELF.Set_attr(key, None)


@cache
def _say_farewell() -> None:
    """Wait for all ranks to end, and notify ranks that still make calls that this one has ended.

    Those ranks raise an error instead of waiting forever.
    """
    if is_forked() or MPI.Is_finalized():
        return
    several = [attachment for attachment in _everything if attachment.node.ranks.size > 1]
    waiting = [attachment.farewell.Ibarrier() for attachment in several]
    patient = time.monotonic() + PATIENCE
    warned = False
    while not all(map(MPI.Request.Test, waiting)):
        if not warned and time.monotonic() > patient:
            warned = True
            for attachment in several:
                attachment.node.end()
        for attachment in several:
            attachment.node.ranks.read()
        time.sleep(0.001)


def await_reader(file: TextIO, limit: float = 10.0) -> None:
    """Wait at most `limit` seconds until all data written to a pipe has been read.

    A launcher that is notified of the end of a job does not read the rest of the pipes.
    """
    try:
        file.flush()
        number = file.fileno()
        piped = stat.S_ISFIFO(os.fstat(number).st_mode)
    except (OSError, ValueError):  # closed, or not a real file, for instance in notebooks
        return
    end = time.monotonic() + limit
    while piped and _unread(number) and time.monotonic() < end:
        time.sleep(0.01)


def _unread(pipe: int) -> int:
    """Number of unread bytes in a pipe, queried at the writing end."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def describe() -> str:
    """Describe the MPI library, this rank and the threads of each rank; collective."""
    world = MPI.COMM_WORLD
    name, numbers = MPI.get_vendor()
    beside, threads = private(world).node.size, thread_count()
    return (
        f"{name} {'.'.join(map(str, numbers))}; rank {world.rank} of {world.size}, {beside} on "
        f"this node, threads of each: {threads}"
    )
