"""Operations of all ranks, which wait without keeping other processes from their work."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

__all__ = ["gathered", "items_as_bytes", "wait"]

Array = np.ndarray[Any, Any]

_let_others: Any = getattr(os, "sched_yield", lambda: None)


def wait(request: Any) -> None:
    """Wait until an operation has ended; a CPU that another process waits for is given to it.

    MPI libraries wait in a loop that never lets go, which takes the time of the very ranks that
    are waited for wherever there are more of them than CPUs.
    """
    while not request.Test():
        _let_others()


def gathered(comm: Any, items: Array) -> tuple[Array, NDArray[np.int64]]:
    """Items of all ranks in their order, along the first axis, and how many each rank has."""
    counts = np.empty(comm.size, np.int64)
    wait(comm.Iallgather(np.array([len(items)]), counts))
    result = np.empty((int(counts.sum()), *items.shape[1:]), items.dtype)
    with items_as_bytes(items, result) as (sent, received, kind):
        if kind:
            wait(comm.Iallgatherv([sent, len(items), kind], [received, counts, kind]))
    return result, counts


@contextmanager
def items_as_bytes(sent: Array, received: Array) -> Iterator[tuple[Array, Array, Any]]:
    """Memory of two arrays, and a datatype for one item of them; None if items have no bytes."""
    size = sent.itemsize * math.prod(sent.shape[1:])
    source, target = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (sent, received))
    kind: Any = MPI.BYTE.Create_contiguous(size).Commit() if size else None
    try:
        yield source, target, kind
    finally:
        if kind:
            kind.Free()
