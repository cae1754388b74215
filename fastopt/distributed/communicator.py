"""Operations between ranks that sharded updaters and tables need, whatever started the ranks.

Reason: what a library has to do is moving bytes, so that sums have the same bits with each.
"""

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from fastopt.optimizer.optimizer import Array

Parts = tuple[Sequence[int], Sequence[int]]
"""Number of bytes for each rank, and the offset of the first of them."""


class Request(Protocol):
    """An operation that has been started; named like the requests of mpi4py, which are used."""

    def Test(self) -> bool:
        """Whether the operation is complete; may raise an error if it cannot complete.

        Requests of libraries whose own threads work on them have a method `rest`, see :func:`rest`.
        """


@runtime_checkable
class Communicator(Protocol):
    """Ranks that start the same operations in the same order, and no others.

    No method waits, except :meth:`on_node`. Arrays are C-contiguous, of bytes unless stated
    otherwise, and must neither be freed nor changed before the operation is complete.
    """

    rank: int
    size: int
    sends_in_memory: bool
    """Whether bytes are sent within a node by a copy from the memory of one rank to another's."""

    def all_reduce_max(self, values: Array) -> Request:
        """Replace int64 values by the largest of all ranks.

        Parameters
        ----------
        values : numpy.ndarray
            The values, with as many elements on each rank.
        """

    def all_gather(self, data: Array, parts: Parts) -> Request:
        """Fill `data` with the parts of all ranks; the own part is in its place already.

        Parameters
        ----------
        data : numpy.ndarray
            Bytes of all parts.
        parts : tuple of sequence of int
            Number of bytes of each rank, and their offsets.
        """

    def all_to_all(self, source: Array, sent: Parts, target: Array, received: Parts) -> Request:
        """Send a part of `source` to each rank, and receive a part of `target` from each.

        Parameters
        ----------
        source : numpy.ndarray
            Bytes that are sent.
        sent : tuple of sequence of int
            Number of bytes for each rank, and their offsets.
        target : numpy.ndarray
            Memory for the bytes that are received.
        received : tuple of sequence of int
            Number of bytes from each rank, and their offsets.
        """

    def barrier(self) -> Request:
        """Complete once all ranks have called this method."""

    def send(self, rank: int, message: bytes) -> Request:
        """Send a message to one rank, which may or may not receive it.

        Parameters
        ----------
        rank : int
            The other rank.
        message : bytes
            The message.
        """

    def receive(self) -> tuple[int, bytes] | None:
        """Return a rank and its next message, or None if there is no message."""

    def duplicate(self) -> tuple["Communicator", Request]:
        """Start to create another communicator with these ranks; usable once complete."""

    def on_node(self) -> "Communicator":
        """Create a communicator with the ranks on this node; all ranks must call it."""

    def free(self) -> None:
        """Release resources; no operation follows."""


ADAPTERS = {"mpi4py": "fastopt.mpi.communicator", "torch": "fastopt.torch.communicator"}
"""Module with a function `attached` for the communicators of a package."""


def attached(
    comm: object, make: Callable[[Communicator], Any], usable: Callable[[Any], bool], timeout: float
) -> Any:
    """Return the object attached to a user's communicator; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, torch.distributed.ProcessGroup or Communicator
        The user's communicator. None and ``torch.distributed.group.WORLD`` are not the same.
    make : callable
        Function that creates the object from a private communicator with the same ranks. The object
        has a method `free`.
    usable : callable
        Whether an attached object is still usable; otherwise another one replaces it.
    timeout : float
        Seconds to wait for the other ranks.

    Raises
    ------
    TypeError
        `comm` is none of these.
    TimeoutError
        Some rank did not take part within the time limit.
    """
    name = next((ADAPTERS[root] for root in _roots(comm) if root in ADAPTERS), None)
    if name is not None:
        return import_module(name).attached(comm, make, usable, timeout)
    if not isinstance(comm, Communicator):
        raise TypeError(
            "comm must be a communicator of mpi4py or a process group of torch.distributed, got "
            f"{type(comm).__name__}"
        )
    job = vars(comm).get("_attached")
    if job is None or not usable(job):
        copy, request = comm.duplicate()
        wait_for_all(request, comm.rank, comm.size, timeout)
        job = vars(comm)["_attached"] = make(copy)
    return job


def wait_for_all(request: Request, rank: int, size: int, timeout: float) -> None:
    """Wait for the first operation of all ranks, which creates a private communicator.

    Raises
    ------
    TimeoutError
        Some rank did not take part within the time limit.
    """
    end = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > end:
            raise late(rank, size, timeout)
        time.sleep(0.0001)


def late(rank: int, size: int, timeout: float) -> TimeoutError:
    """Error of a rank whose communicator is not created in time."""
    return TimeoutError(
        f"rank {rank} of {size} waited {timeout:g} s for others to create their first updater or "
        "table on this communicator; all of its ranks must do so"
    )


leave_cpu: Any = getattr(os, "sched_yield", lambda: None)
"""Let other processes go first."""


def rest(request: Request | None, seconds: float) -> None:
    """Leave the CPU to others until an operation may have made progress, or some time is over.

    MPI libraries have no such wait: with them, a rank only lets other processes go first.
    """
    wait = getattr(request, "rest", None)
    wait(seconds) if wait is not None else leave_cpu()


def _roots(comm: object) -> list[str]:
    """Packages that define the classes of an object."""
    return [kind.__module__.partition(".")[0] for kind in type(comm).__mro__]
