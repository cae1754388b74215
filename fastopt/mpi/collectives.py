"""Collective operations on arrays of any dtype and length."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from fastopt.mpi.ranks import Ranks

__all__ = ["gathered", "items_as_bytes", "share_texts"]

Array = np.ndarray[Any, Any]


def gathered(ranks: Ranks, items: Array) -> tuple[Array, NDArray[np.int64]]:
    """Items of all ranks in their order, along the first axis, and how many each rank has."""
    counts = np.empty(ranks.size, np.int64)
    ranks.wait(ranks.comm.Iallgather(np.array([len(items)]), counts))
    result = np.empty((int(counts.sum()), *items.shape[1:]), items.dtype)
    with items_as_bytes(items, result) as (sent, received, kind):
        if kind:
            request = ranks.comm.Iallgatherv([sent, len(items), kind], [received, counts, kind])
            ranks.wait(request)
    return result, counts


def share_texts(ranks: Ranks, text: str) -> list[str]:
    """Return the texts of all ranks."""
    data, sizes = gathered(ranks, np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in np.split(data, np.cumsum(sizes)[:-1])]


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
