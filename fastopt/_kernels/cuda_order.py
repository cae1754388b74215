"""Sorting of row indices on a CUDA device: blocks sort tiles, which are then merged.

A key is a row index with its position in the list in the last bits. No two keys are equal, so
equal rows keep the order of the list under any sorting method.

Tests: ``tests/gpu/test_cuda_rows.py``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from fastopt._kernels.cuda import compiled
from fastopt._kernels.layout import wide_of
from fastopt._kernels.segments import FOLD
from fastopt._kernels.storage import load, locate, store
from fastopt.kernels.rule import scalar

SORTERS = 1024
"""Threads of a block, one for each position in the list; also the size of a sorted tile."""

TILE_BITS = SORTERS.bit_length() - 1

FOLDERS = 128
"""Maximum threads of a block of :func:`fold`."""

LISTED, UNIQUE, STARTS, ORDER, KEYS, SPARE, VALUES, FOLDED = range(8)
"""Addresses in kernel arguments: the row indices as listed, and int64 arrays for the unique rows,
the start of each one's positions (one more), the sorted positions, and two arrays of keys; then the
values of the rows, and the sums of :func:`fold`."""

ARRAYS = SPARE
"""Number of those int64 arrays; update kernels read the first three."""

OUTSIDE, FOUND = range(2)
"""Places of the answer, the second row of the addresses, which is 0 at first: whether an index is
out of range, and the number of unique rows. Positions in keys are right for any index, so that the
host may look at the answer after the other kernels are launched."""

WAYS = 3
"""Binary logarithm of the number of runs that a launch merges into one."""

INDEX = (np.int64,)


@scalar
def sum_before(shared, t, added):
    """Return the sum of `added` over the threads before `t`; `shared` gets the running sums."""
    shared[t] = added
    step = 1
    while step < len(shared):
        cuda.syncthreads()
        earlier = shared[t - step] if t >= step else 0
        cuda.syncthreads()
        shared[t] += earlier
        step *= 2
    cuda.syncthreads()
    return shared[t] - added


@scalar
def begins(keys, i, bits):
    """Whether the row of a key differs from the row of the previous key."""
    return i == 0 or load(keys, i)[0] >> bits != load(keys, i - 1)[0] >> bits


@scalar
def merged_place(keys, i, size, bits, ways):
    """Return the position of key `i` after groups of ``2**ways`` sorted runs are merged.

    A run has ``2**bits`` keys. The position is that in its own run plus the number of smaller keys
    in each other run of the group, from a binary search.
    """
    key, run, width = keys[i], i >> bits, np.int64(1) << bits
    first = (run >> ways) << ways
    place = (first << bits) + i - (run << bits)
    for other in range(first, first + (np.int64(1) << ways)):
        start = min(other << bits, size)
        low, high = start, min(start + width, size)
        while low < high and other != run:
            middle = (low + high) >> 1
            if keys[middle] < key:
                low = middle + 1
            else:
                high = middle
        place += low - start
    return place


@cache
def sort_tiles(kind: Any) -> Callable:
    """Kernel ``(addresses, size, height, bits)`` that makes sorted keys of rows of type `kind`.

    Each block sorts its own, by merging in shared memory. It answers whether an index is out of
    range.

    A pass for each bit that occurs in the rows of a tile, of which a table of 100,000 rows has 17,
    would take a sum over the threads each, of 10 steps; these are 10 merges of at most 10 steps.
    """
    kinds = (kind,)

    def sort_tiles(addresses, size, height, bits):
        tile = cuda.shared.array(SORTERS, np.int64)
        t, i = np.int64(cuda.threadIdx.x), np.int64(cuda.grid(1))
        first = np.int64(cuda.blockIdx.x) * SORTERS
        count = min(np.int64(SORTERS), size - first)
        key, place = np.int64(0), t
        if t < count:
            ids = locate(addresses, 0, LISTED, 0, kinds)
            row = np.int64(load(ids, i)[0])
            if row < 0 or row >= height:
                addresses[1, OUTSIDE] = 1
            key = (row << bits) | i
        for run_bits in range(TILE_BITS):
            if t < count:
                tile[place] = key
            cuda.syncthreads()
            if t < count:
                key, place = tile[t], merged_place(tile, t, count, run_bits, 1)
            cuda.syncthreads()
        if t < count:
            store(locate(addresses, 0, KEYS, first, INDEX), place, (key,))

    return compiled(sort_tiles, None)


@cache
def merge() -> Callable:
    """Kernel ``(addresses, size, source, target, bits)`` that merges groups of sorted runs.

    A group has ``2**WAYS`` runs of ``2**bits`` keys; see :func:`merged_place`. More runs at once
    take as many comparisons in fewer launches, which cost more time than these.
    """

    def merge(addresses, size, source, target, bits):
        i = np.int64(cuda.grid(1))
        if i < size:
            keys = locate(addresses, 0, source, 0, INDEX)[0]
            place = merged_place(keys, i, size, bits, WAYS)
            store(locate(addresses, 0, target, place, INDEX), 0, (keys[i],))

    return compiled(merge, None)


@cache
def count_rows() -> Callable:
    """Kernel ``(addresses, size, source, target, bits)`` that counts unique rows per block."""

    def count_rows(addresses, size, source, target, bits):
        i = np.int64(cuda.grid(1))
        keys = locate(addresses, 0, source, 0, INDEX)
        count = cuda.syncthreads_count(np.int32(i < size and begins(keys, i, bits)))
        if cuda.threadIdx.x == 0:
            store(locate(addresses, 0, target, cuda.blockIdx.x, INDEX), 0, (np.int64(count),))

    return compiled(count_rows, None)


@cache
def cut_rows() -> Callable:
    """Kernel ``(addresses, size, source, counts, bits)`` that splits sorted keys.

    `counts` are from :func:`count_rows`. The number of unique rows is written to the answer.
    """

    def cut_rows(addresses, size, source, counts, bits):
        shared = cuda.shared.array(SORTERS, np.int64)
        t, block = cuda.threadIdx.x, cuda.blockIdx.x
        earlier = locate(addresses, 0, counts, 0, INDEX)
        added = np.int64(0)
        for k in range(t, block, SORTERS):
            added += load(earlier, k)[0]
        sum_before(shared, t, added)
        before = shared[SORTERS - 1]
        cuda.syncthreads()
        i = np.int64(cuda.grid(1))
        keys = locate(addresses, 0, source, 0, INDEX)
        first = np.int64(i < size and begins(keys, i, bits))
        segment = before + sum_before(shared, t, first)
        if i < size:
            key = load(keys, i)[0]
            row = key >> bits
            store(locate(addresses, 0, ORDER, i, INDEX), 0, (key - (row << bits),))
            if first:
                store(locate(addresses, 0, UNIQUE, segment, INDEX), 0, (row,))
                store(locate(addresses, 0, STARTS, segment, INDEX), 0, (i,))
            if i == size - 1:
                segment += first
                store(locate(addresses, 0, STARTS, segment, INDEX), 0, (size,))
                addresses[1, FOUND] = segment

    return compiled(cut_rows, None)


@cache
def fold(kind: Any) -> Callable:
    """Kernel ``(addresses, width, source, bits)`` that sums values of type `kind` by groups.

    A group is FOLD consecutive sorted positions; block g takes group g. It is summed, in order, if
    all of its positions are of one row: a row that is indexed often has many threads.
    """
    kinds, wide = (kind,), wide_of(kind)

    def fold(addresses, width, source, bits):
        group = np.int64(cuda.blockIdx.x)
        keys = locate(addresses, 0, source, group * FOLD, INDEX)
        row = load(keys, 0)[0] >> bits
        if load(keys, FOLD - 1)[0] >> bits == row:
            values = locate(addresses, 0, VALUES, 0, kinds)
            sums = locate(addresses, 0, FOLDED, group * width, wide)
            for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                total = load(values, (load(keys, 0)[0] - (row << bits)) * width + column)[0]
                for k in range(1, FOLD):
                    place = load(keys, k)[0] - (row << bits)
                    total = total + load(values, place * width + column)[0]
                store(sums, column, (total,))

    return compiled(fold, None)


def order_rows(
    run: Callable[..., None], kind: Any, size: int, height: int, ascend: bool
) -> tuple[int, int]:
    """Sort row indices, without waiting for the device.

    Returns the column of the sorted keys, and the number of bits of a key's position. The answer on
    the device says whether an index is out of range, and how many are unique.

    Parameters
    ----------
    run : callable
        ``run(kernel, *arguments)`` launches a kernel with a thread for each position in the list.
        The kernel's arguments are the addresses, the length of the list, and `arguments`.
    kind : type
        Type of the row indices.
    size : int
        Length of the list, at least 1.
    height : int
        Number of rows of the table.
    ascend : bool
        Whether the indices are known to ascend.
    """
    bits, keys, spare = (size - 1).bit_length(), KEYS, SPARE
    run(sort_tiles(kind), height, bits)
    for run_bits in range(TILE_BITS, 0 if ascend else bits, WAYS):
        run(merge(), keys, spare, run_bits)
        keys, spare = spare, keys
    if size > SORTERS:
        run(count_rows(), keys, spare, bits)
    run(cut_rows(), keys, spare, bits)
    return keys, bits
