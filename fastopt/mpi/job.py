"""Processes of a job: threads per rank, order of compilation, and joint termination."""

import atexit
import importlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, TextIO

from mpi4py import MPI

from fastopt._kernels.threads import start_layer, thread_count
from fastopt.mpi.collectives import share_texts
from fastopt.mpi.ranks import Ranks, is_forked, refuse_forked, time_limit

__all__ = ["await_reader", "describe", "leader_first", "private", "threads_of"]

numba: Any = importlib.import_module("numba")

PATIENCE = 0.2
"""Seconds within which ranks normally end together."""

ENDED = "has ended: its program is over, or it was left by sys.exit"


class Node:
    """Private communicators with all ranks of the user's communicator, and with those on this node.

    Attributes
    ----------
    ranks : Ranks
        All ranks.
    node : Ranks
        The ranks on this node.
    updaters : int
        Number of updaters and tables that use the communicators.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        if MPI.COMM_WORLD.size > 1:
            _end_all_with_one()
        self.ranks = Ranks(_duplicate(comm, timeout))
        self.node = Ranks(comm.Split_type(MPI.COMM_TYPE_SHARED))  # now all ranks are here
        self.farewell = comm.Dup()
        self._more: list[Any] = []
        self.updaters = 0
        _nodes.append(self)
        masks = share_texts(self.node, " ".join(map(str, _cpus())))
        threads = threads_of(masks, self.node.rank)
        start_layer()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def another(self) -> Any:
        """Create one more communicator with all ranks; collective."""
        copy, request = self.ranks.comm.Idup()
        self.ranks.wait(request)
        self._more.append(copy)
        return copy

    def free(self) -> None:
        """Free the communicators."""
        _nodes.remove(self)
        for comm in (self.ranks.comm, self.node.comm, self.farewell, *self._more):
            comm.Free()


def _duplicate(comm: Any, timeout: float) -> Any:
    """Duplicate the user's communicator; collective.

    Raises
    ------
    TimeoutError
        Some rank did not take part within the time limit.
    """
    copy, request = comm.Idup()
    end = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank {comm.rank} of {comm.size} waited {timeout:g} s for others to create their "
                "first updater or table on this communicator; all of its ranks must do so"
            )
        time.sleep(0.0001)
    return copy


_nodes: list[Node] = []
"""Nodes whose communicators have not been freed."""


def _free(comm: Any, keyval: int, node: Node) -> None:
    if node in _nodes:
        node.free()


_keyval: int = MPI.Comm.Create_keyval(delete_fn=_free)
"""Attribute key of the :class:`Node` of a communicator, which is freed with the communicator."""


def private(comm: Any, timeout: float | None = None) -> Node:
    """Return the private communicators of `comm`, created at the first call; collective.

    They are freed together with `comm`. If a call failed while other ranks were waiting in it, new
    ones are created.

    Raises
    ------
    TypeError
        `comm` is not an intracommunicator of mpi4py.
    TimeoutError
        Some rank did not take part within the time limit.
    RuntimeError
        This process was forked from the one of a rank.
    """
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be a communicator of mpi4py, got {type(comm).__name__}")
    refuse_forked("creation of an updater or table")
    found: Any = comm.Get_attr(_keyval)
    if found is None or found.ranks.out_of_step():
        found = Node(comm, time_limit(timeout))
        comm.Set_attr(_keyval, found)
    node: Node = found
    return node


def _cpus() -> list[int]:
    """Numbers of the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def threads_of(masks: list[str], rank: int) -> int:
    """Number of threads of a rank: its CPUs, each divided by the number of ranks that may use it.

    Parameters
    ----------
    masks : list of str
        Numbers of the CPUs that each rank of the node may use.
    rank : int
        Rank on the node.

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


def leader_first(node: Ranks, work: Callable[[], Any]) -> None:
    """Call `work` on the first rank of a node, then on its other ranks; collective.

    The others sleep meanwhile, so that they do not take CPU time from the compilation.
    """
    if node.rank == 0:
        work()
    node.wait(node.comm.Ibarrier(), sleep=0.001)
    if node.rank != 0:
        work()


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


def _say_farewell() -> None:
    """Wait for all ranks to end, and notify ranks that still make calls that this one has ended.

    Those ranks raise an error instead of waiting forever.
    """
    if is_forked() or MPI.Is_finalized():
        return
    nodes = [node for node in _nodes if node.ranks.size > 1]
    waiting = [node.farewell.Ibarrier() for node in nodes]
    patient = time.monotonic() + PATIENCE
    warned = False
    while not all(map(MPI.Request.Test, waiting)):
        if not warned and time.monotonic() > patient:
            warned = True
            for node in nodes:
                node.ranks.leave(ENDED)
        for node in nodes:
            node.ranks.read()
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
