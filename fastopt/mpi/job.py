"""The processes of a job: their threads, who compiles first, and how one ends them all."""

import importlib
import os
import stat
import sys
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, TextIO

from mpi4py import MPI

from fastopt.kernels.threads import start_layer, thread_count
from fastopt.mpi.agreement import share_texts

__all__ = ["await_reader", "describe", "leader_first", "private", "threads_of"]

numba: Any = importlib.import_module("numba")

_keyval: int = MPI.Comm.Create_keyval()
"""Where a communicator keeps the :class:`Node` that was made of it."""


class Node:
    """A communicator of our own with the ranks of another, and the ranks of this node."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm.Dup()
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        masks = share_texts(self.node, " ".join(map(str, _cpus())))
        threads = threads_of(masks, self.node.rank)
        start_layer()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        if MPI.COMM_WORLD.size > 1:
            _end_all_with_one()


def private(comm: Any) -> Node:
    """Communicator for calls that must not meet those of others, made once; all ranks call.

    Raises
    ------
    TypeError
        `comm` is not a communicator of mpi4py within one group of ranks.
    """
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be a communicator of mpi4py, got {type(comm).__name__}")
    found: Any = comm.Get_attr(_keyval)
    if found is None:
        found = Node(comm)
        comm.Set_attr(_keyval, found)
    node: Node = found
    return node


def _cpus() -> list[int]:
    """Numbers of the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def threads_of(masks: list[str], rank: int) -> int:
    """Threads for one rank of a node: its CPUs, each shared among the ranks that may use it.

    Parameters
    ----------
    masks : list of str
        Numbers of the CPUs that each rank of the node may use.
    rank : int
        The rank.

    Examples
    --------
    Four ranks on eight CPUs, as MPICH starts them, and bound to one core each:

    >>> from fastopt.mpi.job import threads_of
    >>> threads_of(["0 1 2 3 4 5 6 7"] * 4, 0), threads_of(["0 1", "2 3", "4 5", "6 7"], 0)
    (2, 2)
    """
    every = [set(mask.split()) for mask in masks]
    share = sum(1 / sum(cpu in mask for mask in every) for cpu in every[rank])
    return max(int(share + 1e-9), 1)


def leader_first(node: Any, work: Callable[[], Any]) -> None:
    """Let the first rank of a node do some work, then the others; all ranks call.

    Others sleep meanwhile: they would take the time that the first needs to compile.
    """
    if node.rank == 0:
        work()
    waiting = node.Ibarrier()
    while not waiting.Test():
        time.sleep(0.001)
    if node.rank != 0:
        work()


@cache
def _end_all_with_one() -> None:
    """Have an error that nothing catches end the job, as the other ranks would wait forever."""
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = MPI.COMM_WORLD
        try:
            before(kind, error, trace)
            who = f"rank {world.rank} of {world.size}"
            print(f"{who} ends the job: {kind.__name__}: {error}", file=sys.stderr)
            for file in (sys.stdout, sys.stderr):
                await_reader(file)
        finally:  # even if nobody can be told
            world.Abort(1)

    sys.excepthook = end


def await_reader(file: TextIO, limit: float = 10.0) -> None:
    """Wait until what was written to a pipe has been read, at most for `limit` seconds.

    A launcher that learns of the end of a job no longer reads what is left in the pipes.
    """
    try:
        file.flush()
        number = file.fileno()
        piped = stat.S_ISFIFO(os.fstat(number).st_mode)
    except (OSError, ValueError):  # closed, or a stand-in for a file, as notebooks have
        return
    end = time.monotonic() + limit
    while piped and _unread(number) and time.monotonic() < end:
        time.sleep(0.01)


def _unread(pipe: int) -> int:
    """Number of bytes that wait in a pipe, asked at the end that writes."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def describe() -> str:
    """The MPI library, this rank, and the threads of each rank; all ranks of the job call."""
    world = MPI.COMM_WORLD
    name, numbers = MPI.get_vendor()
    beside, threads = private(world).node.size, thread_count()
    return (
        f"{name} {'.'.join(map(str, numbers))}; rank {world.rank} of {world.size}, {beside} on "
        f"this node, threads of each: {threads}"
    )
