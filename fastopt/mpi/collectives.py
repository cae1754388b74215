"""Collective operations on arrays of any dtype and length."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from fastopt.mpi.ranks import Ranks

__all__ = ["exchanged", "gathered", "gathered_together", "share_texts"]

Array = np.ndarray[Any, Any]
Counts = NDArray[np.int64]
"""Numbers of items: a row for each array, a column for each rank."""

MOST = 2**31 - 1
"""Limit on the units in one operation; some MPI libraries have 32-bit counts."""


def gathered(ranks: Ranks, items: Array) -> tuple[Array, Counts]:
    """Concatenate the items of all ranks, in rank order; also return their number for each rank."""
    (result,), counts = gathered_together(ranks, [items])
    return result, counts[0]


def gathered_together(ranks: Ranks, arrays: Sequence[Array]) -> tuple[list[Array], Counts]:
    """Gather several arrays from all ranks in two operations, or more beyond :data:`MOST` units."""
    own = np.array([len(array) for array in arrays], np.int64)
    every = np.empty((ranks.size, len(own)), np.int64)
    ranks.wait(ranks.comm.Iallgather(own, every))
    counts = every.T
    rounds = -(-_units(arrays, counts, _common(arrays)).sum() // MOST)
    if rounds <= 1:
        return _gather(ranks, arrays, counts), counts
    results = _made(arrays, counts)
    starts = np.cumsum(counts, axis=1) - counts
    for k in range(rounds):
        first, last = counts * k // rounds, counts * (k + 1) // rounds
        slices = zip(arrays, first[:, ranks.rank], last[:, ranks.rank], strict=True)
        came = _gather(ranks, [array[begin:end] for array, begin, end in slices], last - first)
        for t, part in enumerate(came):
            ends = np.cumsum(last[t] - first[t])
            for each, begin in zip(np.split(part, ends[:-1]), starts[t] + first[t], strict=True):
                results[t][begin : begin + len(each)] = each
    return results, counts


def _gather(ranks: Ranks, arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Gather several arrays from all ranks in one operation."""
    results = _made(arrays, counts)
    with _unit(arrays) as (size, kind):
        if kind:
            source, target = _packed(arrays, counts[:, [ranks.rank]]), _room(results)
            units = _units(arrays, counts, size).tolist()
            ranks.wait(
                ranks.comm.Iallgatherv([source, units[ranks.rank], kind], [target, units, kind])
            )
            _unpack(target, results, counts)
    return results


def exchanged(ranks: Ranks, arrays: Sequence[Array], sent: Counts, received: Counts) -> list[Array]:
    """Send items of several arrays to other ranks, and receive theirs, in one operation.

    The items of an array are ordered by the target rank; received items by the source rank.
    """
    results = _made(arrays, received)
    with _unit(arrays) as (size, kind):
        if kind:
            source, target = _packed(arrays, sent), _room(results)
            there, here = (_units(arrays, counts, size).tolist() for counts in (sent, received))
            ranks.wait(ranks.comm.Ialltoallv([source, there, kind], [target, here, kind]))
            _unpack(target, results, received)
    return results


def share_texts(ranks: Ranks, text: str) -> list[str]:
    """Gather a string from each rank."""
    data, sizes = gathered(ranks, np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in np.split(data, np.cumsum(sizes)[:-1])]


def _item(array: Array) -> int:
    """Bytes of an item."""
    size: int = array.itemsize * math.prod(array.shape[1:])
    return size


def _common(arrays: Sequence[Array]) -> int:
    """Largest number of bytes that divides the item sizes of all arrays."""
    return math.gcd(*map(_item, arrays))


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _units(arrays: Sequence[Array], counts: Counts, size: int) -> NDArray[np.int64]:
    """Number of units of `size` bytes sent to, or received from, each rank."""
    sizes: NDArray[np.int64] = np.array([_item(array) // max(size, 1) for array in arrays])
    return sizes @ counts


def _made(arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Empty arrays for the items from all ranks, with the item shapes and dtypes of `arrays`."""
    totals = counts.sum(axis=1).tolist()
    return [np.empty((n, *a.shape[1:]), a.dtype) for a, n in zip(arrays, totals, strict=True)]


@contextmanager
def _unit(arrays: Sequence[Array]) -> Iterator[tuple[int, Any]]:
    """Context with the unit size in bytes and its MPI datatype, None if items have no bytes."""
    size = _common(arrays)
    kind: Any = MPI.BYTE.Create_contiguous(size).Commit() if size else None
    try:
        yield size, kind
    finally:
        if kind:
            kind.Free()


def _segments(counts: Counts) -> Iterator[tuple[int, int, int]]:
    """Array, start and stop of each segment, in the order in which segments are sent."""
    ends = np.cumsum(counts, axis=1)
    for rank in range(counts.shape[1]):
        for k in np.flatnonzero(counts[:, rank]).tolist():
            yield k, int(ends[k, rank] - counts[k, rank]), int(ends[k, rank])


def _packed(arrays: Sequence[Array], counts: Counts) -> Array:
    """Bytes of all arrays, in rank order."""
    flat = [_bytes(array) for array in arrays]
    if len(flat) == 1:
        return flat[0]
    sizes = [_item(array) for array in arrays]
    parts = [flat[k][first * sizes[k] : last * sizes[k]] for k, first, last in _segments(counts)]
    return np.concatenate([*parts, np.empty(0, np.uint8)])


def _room(results: Sequence[Array]) -> Array:
    """Receive buffer; the memory of the result itself if there is only one."""
    if len(results) == 1:
        return _bytes(results[0])
    return np.empty(sum(result.nbytes for result in results), np.uint8)


def _unpack(data: Array, results: Sequence[Array], counts: Counts) -> None:
    """Copy the received bytes to the results."""
    if len(results) == 1:
        return
    flat = [_bytes(result) for result in results]
    sizes, at = [_item(result) for result in results], 0
    for k, first, last in _segments(counts):
        size = (last - first) * sizes[k]
        flat[k][first * sizes[k] : last * sizes[k]] = data[at : at + size]
        at += size
