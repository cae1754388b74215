"""Collective operations on arrays of any dtype and length."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastopt.distributed.communicator import Parts
from fastopt.distributed.packing import copier
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array

Counts = NDArray[np.int64]
"""Numbers of items: a row for each array, a column for each rank."""

MOST = 2**31 - 1
"""Limit on the units in one operation; some MPI libraries have 32-bit counts."""

UNIT = 64
"""Bytes of a unit of several arrays, to whose multiple the data for each rank is padded: with
:data:`MOST` units, a rank can send and receive 128 GiB."""

APART_FROM = 1 << 20
"""Bytes of the arrays of all ranks from which no rank receives all of them to sum them."""


def gathered_together(ranks: Ranks, arrays: Sequence[Array]) -> tuple[list[Array], Counts]:
    """Concatenate the items of all ranks, in rank order, for each of several arrays.

    Also return their number for each rank. This takes two operations, or more beyond :data:`MOST`
    units.
    """
    counts = of_all(ranks, np.array([len(array) for array in arrays], np.int64)).T
    rounds = -(-_units(arrays, counts, _size(arrays)).sum() // MOST)
    if rounds <= 1:
        return _gather(ranks, arrays, counts), counts
    results = _allocated(arrays, counts)
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
    results, size = _allocated(arrays, counts), _size(arrays)
    if size:
        parts = _parts(_units(arrays, counts, size) * size)
        target = _buffer(results, sum(parts[0]))
        count, start = parts[0][ranks.rank], parts[1][ranks.rank]
        target[start : start + count] = _packed(arrays, counts[:, [ranks.rank]], size)
        ranks.wait(ranks.comm.all_gather(target, parts))
        _unpack(target, results, counts, size)
    return results


def exchanged(ranks: Ranks, arrays: Sequence[Array], sent: Counts, received: Counts) -> list[Array]:
    """Send items of several arrays to other ranks, and receive theirs, in one operation.

    The items of an array are ordered by the target rank; received items by the source rank.
    """
    results, size = _allocated(arrays, received), _size(arrays)
    if size:
        there, here = (_parts(_units(arrays, each, size) * size) for each in (sent, received))
        source, target = _packed(arrays, sent, size), _buffer(results, sum(here[0]))
        ranks.wait(ranks.comm.all_to_all(source, there, target, here))
        _unpack(target, results, received, size)
    return results


def of_all(ranks: Ranks, own: Array) -> Array:
    """The arrays of all ranks, which have one shape and dtype, stacked in rank order."""
    every = np.empty((ranks.size, *own.shape), own.dtype)
    every[ranks.rank] = own
    ranks.wait(ranks.comm.all_gather(_bytes(every), _parts([own.nbytes] * ranks.size)))
    return every


def added(ranks: Ranks, own: Array) -> Array:
    """The sum of the float64 arrays of all ranks, in rank order, so that all have the same bits.

    Each rank sums an equal part of the arrays and sends it to all, if :data:`APART_FROM` says so.
    """
    if ranks.size * own.nbytes < APART_FROM:
        return _in_order(of_all(ranks, own))
    numbers = np.arange(ranks.size + 1) * own.size // ranks.size
    first, last = numbers[ranks.rank : ranks.rank + 2]
    counts = np.diff(numbers)
    parts = np.full((1, ranks.size), last - first)
    (every,) = exchanged(ranks, [own.reshape(-1)], counts[None], parts)
    total = np.empty(own.shape)
    total.reshape(-1)[first:last] = _in_order(every.reshape(ranks.size, -1))
    ranks.wait(ranks.comm.all_gather(_bytes(total), _parts(counts * own.itemsize)))
    return total


def _in_order(every: Array) -> Array:
    total = np.zeros(every.shape[1:])
    for part in every:
        total += part
    return total


def transposed(ranks: Ranks, sent: Array) -> Array:
    """Item `k` of each rank, for this rank's number `k`, stacked in rank order."""
    sent = np.ascontiguousarray(sent)
    came, parts = np.empty_like(sent), _parts([sent[0].nbytes] * ranks.size)
    ranks.wait(ranks.comm.all_to_all(_bytes(sent), parts, _bytes(came), parts))
    return came


def share_texts(ranks: Ranks, text: str) -> list[str]:
    """Gather a string from each rank."""
    (data,), (sizes,) = gathered_together(ranks, [np.frombuffer(text.encode(), np.uint8)])
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


def _allocated(arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Empty arrays for the items from all ranks, with the item shapes and dtypes of `arrays`."""
    totals = counts.sum(axis=1).tolist()
    return [np.empty((n, *a.shape[1:]), a.dtype) for a, n in zip(arrays, totals, strict=True)]


def _parts(counts: Sequence[int] | Counts) -> Parts:
    """Consecutive parts with these numbers of bytes."""
    ends = np.cumsum(counts)
    return [*map(int, counts)], (ends - counts).tolist()


def _segments(arrays: Sequence[Array], counts: Counts, data: Array, size: int) -> Counts:
    """Address of each segment in the arrays and in the data that is sent, and its bytes."""
    items = np.array([[_item(array)] for array in arrays], np.int64)
    nbytes, units = counts * items, _units(arrays, counts, size)
    inside = np.array([[array.ctypes.data] for array in arrays]) + np.cumsum(nbytes, 1) - nbytes
    outside = data.ctypes.data + size * (np.cumsum(units) - units) + np.cumsum(nbytes, 0) - nbytes
    return np.stack([inside, outside, nbytes], axis=2)[nbytes > 0]


def _packed(arrays: Sequence[Array], counts: Counts, size: int) -> Array:
    """Bytes of all arrays, in rank order."""
    if len(arrays) == 1:
        return _bytes(arrays[0])
    data = np.zeros(int(_units(arrays, counts, size).sum()) * size, np.uint8)
    arrays = [*map(np.ascontiguousarray, arrays)]
    copier(False)(_segments(arrays, counts, data, size), 0)
    return data


def _buffer(results: Sequence[Array], nbytes: int) -> Array:
    """Receive buffer; the memory of the result itself if there is only one."""
    return _bytes(results[0]) if len(results) == 1 else np.empty(nbytes, np.uint8)


def _unpack(data: Array, results: Sequence[Array], counts: Counts, size: int) -> None:
    """Copy the received bytes to the results."""
    if len(results) > 1:
        segments = _segments(results, counts, data, size)
        copier(False)(segments[:, [1, 0, 2]].copy(), 0)
