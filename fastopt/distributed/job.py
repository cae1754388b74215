"""Processes of a job: private communicators, shared memory, threads, and order of compilation.

Reason: speed within nodes, with libraries that do not use shared memory too, and compilation by one
rank of a node.
"""

import importlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import finalize, ref

import numpy as np

from fastopt._kernels.threads import start_layer
from fastopt.distributed.agreement import attempt, of_all, share_texts
from fastopt.distributed.communicator import Communicator, attached
from fastopt.distributed.ranks import LIMIT, Ranks, refuse_forked, time_limit
from fastopt.optimizer.optimizer import Array

numba: Any = importlib.import_module("numba")

ENDED = "has ended: its program is over, or it was left by sys.exit"


@dataclass(frozen=True)
class Layers:
    """Nodes, in the order of their first ranks.

    On each node, one rank stands for each rank of the job: it sums there what that rank owns. It is
    the one in the position that the owner has on its own node, counted round and round on smaller
    nodes; with equal nodes, each rank stands for one rank of each.

    Parameters
    ----------
    node : Ranks
        The ranks on this node, which share memory.
    sources : list of int
        On each node, the rank that stands for this one.
    owners : list of int
        Ranks for which this one stands, itself among them, in order.
    least : int
        Number of ranks of the smallest node.

    Examples
    --------
    Rank 0 of nodes of three and two ranks stands for the first rank of both, and, on the first
    node, for nobody else; on the second node, the first rank stands for two ranks of the first one:

    >>> from fastopt.distributed.job import standing
    >>> standing([[0, 1, 2], [3, 4]], 0), standing([[0, 1, 2], [3, 4]], 3)
    (([0, 3], [0, 3]), ([0, 3], [0, 2, 3]))
    """

    node: Ranks
    sources: list[int]
    owners: list[int]
    least: int

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.sources)


def standing(nodes: Sequence[Sequence[int]], rank: int) -> tuple[list[int], list[int]]:
    """See `sources` and `owners` of :class:`Layers`, for the ranks of each node."""
    mine = next(ranks for ranks in nodes if rank in ranks)
    place = mine.index(rank)
    sources = [ranks[place % len(ranks)] for ranks in nodes]
    return sources, sorted(owner for ranks in nodes for owner in ranks[place :: len(mine)])


@dataclass
class Lease:
    """Communicators of one updater, with all ranks and with those of a node.

    Parameters
    ----------
    comm, node_comm : Communicator
        The communicators.
    owner : weakref.ref
        Reference to the updater.
    """

    comm: Communicator
    node_comm: Communicator
    owner: Any
    pending: bool = False
    """Whether operations may have been started and not completed."""

    @property
    def is_used(self) -> bool:
        """Whether no other updater can use the communicators."""
        return self.pending or self.owner() is not None


class Node:
    """Private communicators with all ranks of the user's communicator, and with those on this node.

    Attributes
    ----------
    ranks : Ranks
        All ranks.
    node : Ranks
        The ranks on this node.
    layers : Layers or None
        The nodes; None if each has a single rank, or one cannot share memory between its ranks.
    updaters : int
        Number of updaters and tables that use the communicators.
    """

    def __init__(self, comm: Communicator) -> None:
        self.ranks, self.node = Ranks(comm), Ranks(comm.on_node())
        self._leases: list[Lease] = []
        self.updaters = 0
        masks = share_texts(self.node, " ".join(map(str, _cpus())))
        threads = threads_of(masks, self.node.rank)
        start_layer()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        self.layers = self._layers()

    def _layers(self) -> Layers | None:
        rank, place, size = self.ranks.rank, self.node.rank, self.node.size
        first = int(of_all(self.node, np.array([rank]))[0, 0])
        _, error = attempt(shared_zeros, self.node, 1)
        every = of_all(self.ranks, np.array([first, place, size, error is not None]))
        if every[:, 3].any() or (every[:, 2] == 1).all():
            return None
        order = np.lexsort((every[:, 1], every[:, 0]))
        ends = np.flatnonzero(np.diff(every[order, 0])) + 1
        nodes = [ranks.tolist() for ranks in np.split(order, ends)]
        return Layers(self.node, *standing(nodes, rank), int(every[:, 2].min()))

    def lease(self, owner: object) -> "Lease":
        """Return communicators that no other object uses while `owner` exists; collective.

        Those of earlier owners that exist on no rank are used again.
        """
        used = np.array([lease.is_used for lease in self._leases], np.int64)
        self.ranks.wait(self.ranks.comm.all_reduce_max(used))
        free = np.flatnonzero(used == 0)
        if len(free):
            lease = self._leases[int(free[0])]
            lease.owner = ref(owner)
            return lease
        comm, request = self.ranks.comm.duplicate()
        node_comm, other = self.node.comm.duplicate()
        for started in (request, other):
            self.ranks.wait(started)
        self._leases.append(Lease(comm, node_comm, ref(owner)))
        return self._leases[-1]

    def end(self) -> None:
        """Notify the other ranks that the program of this one is over."""
        if self.ranks.size > 1:
            self.ranks.leave(ENDED)

    def free(self) -> None:
        """Free the communicators, which no later call can use."""
        free(self.ranks, self.node, self._leases)

    def at_end(self, end: Callable[[Ranks], None]) -> None:
        """Call a function of the ranks when this object is not used any more, then free them."""
        finalize(self, _end, end, self.ranks, self.node, self._leases)


def free(ranks: Ranks, node: Ranks, leases: Sequence[Lease]) -> None:
    """Free communicators, which no later call can use."""
    for members in (ranks, node):
        members.broken = "their communicator was freed"
        members.comm.free()
    for lease in leases:
        lease.comm.free()
        lease.node_comm.free()


def _end(end: Callable[[Ranks], None], ranks: Ranks, node: Ranks, leases: Sequence[Lease]) -> None:
    """See :meth:`Node.at_end`."""
    try:
        end(ranks)
    finally:
        free(ranks, node, leases)


def private(comm: object, timeout: float | None = None) -> Node:
    """Return the private communicators of `comm`, created at the first call; collective.

    They are freed together with `comm`. If a call failed while other ranks were waiting in it, new
    ones are created.

    Raises
    ------
    TypeError
        `comm` is no communicator.
    TimeoutError
        Some rank did not take part within the time limit.
    RuntimeError
        This process was forked from the one of a rank.
    """
    refuse_forked("creation of an updater or table")
    node: Node = attached(comm, Node, lambda old: not old.ranks.out_of_step(), time_limit(timeout))
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

    >>> from fastopt.distributed.job import threads_of
    >>> threads_of(["0 1 2 3 4 5 6 7"] * 4, 0), threads_of(["0 1", "2 3", "4 5", "6 7"], 0)
    (2, 2)
    """
    every = [set(mask.split()) for mask in masks]
    share = sum(1 / sum(cpu in mask for mask in every) for cpu in every[rank])
    return max(int(share + 1e-9), 1)


def leader_first(node: Ranks, work: Callable[[], Any]) -> None:
    """Call `work` on the first rank of a node, then on its other ranks; collective.

    The others sleep meanwhile, so that they do not take CPU time from the compilation, whose time
    does not count: they wait for at least the default limit.
    """
    node.timeout = max(node.timeout, LIMIT)
    if node.rank == 0:
        work()
    node.wait(node.comm.barrier(), sleep=0.001)
    if node.rank != 0:
        work()


def shared_zeros(node: Ranks, nbytes: int) -> Array:
    """Bytes that all ranks of a node read and write; all of them must make this call.

    The memory has no name that a crash could leave behind: it is freed with the last process that
    has an array of it.

    Parameters
    ----------
    node : Ranks
        The ranks on this node.
    nbytes : int
        Number of bytes, the same on all ranks.

    Raises
    ------
    OSError
        Some rank cannot share memory: the system has too little or is not Linux, or the ranks run
        in separate containers. All ranks raise the error.
    """
    file, error = attempt(_created, nbytes) if node.rank == 0 else (None, None)
    try:
        address = None if file is None else [os.getpid(), file, _identity(file)]
        shared = json.loads(share_texts(node, json.dumps(address))[0])
        memory, problem = attempt(_attached, *shared, nbytes) if shared else (None, None)
        error = error or problem
        reasons = share_texts(node, str(error or ""))  # then all have opened the file
    finally:
        if file is not None:
            os.close(file)
    for reason in filter(None, reasons):
        raise OSError(reason) from error
    return np.frombuffer(cast(mmap.mmap, memory), np.uint8)


def _created(nbytes: int) -> int:
    """Descriptor of new memory."""
    if not hasattr(os, "memfd_create"):
        raise OSError("ranks share memory on Linux only")
    file = os.memfd_create("fastopt")
    try:
        os.posix_fallocate(file, 0, nbytes)  # otherwise a write could end the process
    except OSError as error:
        os.close(file)
        raise OSError(f"{nbytes} bytes for the ranks of a node: {error.strerror}") from error
    return file


def _attached(process: int, number: int, identity: list[int], nbytes: int) -> mmap.mmap:
    """Memory of a descriptor of another process."""
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        if _identity(file) != identity:  # the process of that number in another container
            raise OSError(f"process {process} is not the one of the first rank of the node")
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _identity(file: int) -> list[int]:
    status = os.fstat(file)
    return [status.st_dev, status.st_ino]
