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

UNIT = 64
"""Bytes of a unit of several arrays, to whose multiple the data for each rank is padded: with
:data:`MOST` units, a rank can send and receive 128 GiB."""


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
    rounds = -(-_units(arrays, counts, _size(arrays)).sum() // MOST)
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
            units = _units(arrays, counts, size).tolist()
            source = _packed(arrays, counts[:, [ranks.rank]], size)
            target = _room(results, sum(units) * size)
            ranks.wait(
                ranks.comm.Iallgatherv([source, units[ranks.rank], kind], [target, units, kind])
            )
            _unpack(target, results, counts, size)
    return results


def exchanged(ranks: Ranks, arrays: Sequence[Array], sent: Counts, received: Counts) -> list[Array]:
    """Send items of several arrays to other ranks, and receive theirs, in one operation.

    The items of an array are ordered by the target rank; received items by the source rank.
    """
    results = _made(arrays, received)
    with _unit(arrays) as (size, kind):
        if kind:
            there, here = (_units(arrays, counts, size).tolist() for counts in (sent, received))
            source, target = _packed(arrays, sent, size), _room(results, sum(here) * size)
            ranks.wait(ranks.comm.Ialltoallv([source, there, kind], [target, here, kind]))
            _unpack(target, results, received, size)
    return results


def share_texts(ranks: Ranks, text: str) -> list[str]:
    """Gather a string from each rank."""
    data, sizes = gathered(ranks, np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in np.split(data, np.cumsum(sizes)[:-1])]


def _item(array: Array) -> int:
    """Bytes of an item."""
    size: int = array.itemsize * math.prod(array.shape[1:])
    return size


def _size(arrays: Sequence[Array]) -> int:
    """Bytes of a unit: an item of a single array, else UNIT; 0 if no item has bytes."""
    items = [_item(array) for array in arrays]
    return items[0] if len(items) == 1 else UNIT * any(items)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _units(arrays: Sequence[Array], counts: Counts, size: int) -> NDArray[np.int64]:
    """Number of units of `size` bytes sent to, or received from, each rank."""
    items: NDArray[np.int64] = np.array([_item(array) for array in arrays])
    return -(-(items @ counts) // max(size, 1))


def _made(arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Empty arrays for the items from all ranks, with the item shapes and dtypes of `arrays`."""
    totals = counts.sum(axis=1).tolist()
    return [np.empty((n, *a.shape[1:]), a.dtype) for a, n in zip(arrays, totals, strict=True)]


@contextmanager
def _unit(arrays: Sequence[Array]) -> Iterator[tuple[int, Any]]:
    """Context with the unit size in bytes and its MPI datatype, None if items have no bytes."""
    size = _size(arrays)
    kind: Any = MPI.BYTE.Create_contiguous(size).Commit() if size else None
    try:
        yield size, kind
    finally:
        if kind:
            kind.Free()


def _segments(
    arrays: Sequence[Array], counts: Counts, size: int
) -> Iterator[tuple[Array, int, int]]:
    """Bytes of each segment, and start and stop of its place in the data that is sent."""
    flat, items = [_bytes(array) for array in arrays], [_item(array) for array in arrays]
    ends = np.cumsum(counts, axis=1)
    units = _units(arrays, counts, size)
    for rank, start in enumerate((size * (np.cumsum(units) - units)).tolist()):
        at = start
        for k in np.flatnonzero(counts[:, rank]).tolist():
            last = int(ends[k, rank]) * items[k]
            segment = flat[k][last - int(counts[k, rank]) * items[k] : last]
            yield segment, at, at + segment.size
            at += segment.size


def _packed(arrays: Sequence[Array], counts: Counts, size: int) -> Array:
    """Bytes of all arrays, in rank order."""
    if len(arrays) == 1:
        return _bytes(arrays[0])
    data = np.zeros(int(_units(arrays, counts, size).sum()) * size, np.uint8)
    for segment, first, last in _segments(arrays, counts, size):
        data[first:last] = segment
    return data


def _room(results: Sequence[Array], nbytes: int) -> Array:
    """Receive buffer; the memory of the result itself if there is only one."""
    return _bytes(results[0]) if len(results) == 1 else np.empty(nbytes, np.uint8)


def _unpack(data: Array, results: Sequence[Array], counts: Counts, size: int) -> None:
    """Copy the received bytes to the results."""
    if len(results) > 1:
        for segment, first, last in _segments(results, counts, size):
            segment[...] = data[first:last]
