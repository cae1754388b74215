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

from fastopt._kernels.cuda import SIMULATED, compiled
from fastopt._kernels.layout import wide_of
from fastopt._kernels.segments import FOLD
from fastopt._kernels.storage import load, locate, store
from fastopt.kernels.rule import scalar

__all__ = ["ARRAYS", "FOLDERS", "SORTERS", "fold", "order_rows"]

SORTERS = 8 if SIMULATED else 1024
"""Threads of a block, one for each position in the list; also the size of a sorted tile."""

TILE_BITS = SORTERS.bit_length() - 1

FOLDERS = 8 if SIMULATED else 128
"""Maximum threads of a block of :func:`fold`."""

LISTED, UNIQUE, STARTS, ORDER, KEYS, SPARE, VALUES, FOLDED = range(8)
"""Addresses in kernel arguments: the row indices as listed, and int64 arrays for the unique rows,
the start of each one's positions (one more), the sorted positions, and two arrays of keys; then the
values of the rows, and the sums of :func:`fold`."""

ARRAYS = SPARE
"""Number of those int64 arrays; update kernels read the first three."""

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


@cache
def survey(kind: Any) -> Callable:
    """Kernel ``(addresses, size, height, bits, answer)`` that makes keys of rows of type `kind`.

    It sets ``answer[0]`` if a row is outside of the table, and ``answer[1]`` if rows do not ascend.
    """
    kinds = (kind,)

    def survey(addresses, size, height, bits, answer):
        i = np.int64(cuda.grid(1))
        if i < size:
            ids = locate(addresses, 0, LISTED, 0, kinds)
            row = np.int64(load(ids, i)[0])
            last = np.int64(load(ids, i - 1)[0]) if i else np.int64(-1)
            if row < 0 or row >= height:
                answer[0] = 1
            if row <= last:
                answer[1] = 1
            store(locate(addresses, 0, KEYS, i, INDEX), 0, ((row << bits) | i,))

    return compiled(survey, None)


@scalar
def merged_place(keys, i, size, bits):
    """Return the position of key `i` after pairs of sorted runs of ``2**bits`` keys are merged.

    It is the position in its own run plus the number of smaller keys in the other run, from a
    binary search.
    """
    key, run, width = keys[i], i >> bits, np.int64(1) << bits
    own, other = run << bits, min((run ^ 1) << bits, size)
    low, high = other, min(other + width, size)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return min(own, other) + (i - own) + (low - other)


@cache
def sort_tiles() -> Callable:
    """Kernel ``(addresses, size)`` that sorts the keys of each block, by merging in shared memory.

    A pass for each bit that occurs in the rows of a tile, of which a table of 100,000 rows has 17,
    would take a sum over the threads each, of 10 steps; these are 10 merges of at most 10 steps.
    """

    def sort_tiles(addresses, size):
        tile = cuda.shared.array(SORTERS, np.int64)
        t = np.int64(cuda.threadIdx.x)
        first = np.int64(cuda.blockIdx.x) * SORTERS
        count = min(np.int64(SORTERS), size - first)
        keys = locate(addresses, 0, KEYS, first, INDEX)
        key, place = np.int64(0), t
        if t < count:
            key = load(keys, t)[0]
        for bits in range(TILE_BITS):
            if t < count:
                tile[place] = key
            cuda.syncthreads()
            if t < count:
                key, place = tile[t], merged_place(tile, t, count, bits)
            cuda.syncthreads()
        if t < count:
            store(keys, place, (key,))

    return compiled(sort_tiles, None)


@cache
def merge() -> Callable:
    """Kernel ``(addresses, size, source, target, bits)`` that merges pairs of sorted runs.

    Each run has ``2**bits`` keys; see :func:`merged_place`.
    """

    def merge(addresses, size, source, target, bits):
        i = np.int64(cuda.grid(1))
        if i < size:
            keys = locate(addresses, 0, source, 0, INDEX)[0]
            place = merged_place(keys, i, size, bits)
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
    """Kernel ``(addresses, size, source, counts, bits, answer)`` that splits sorted keys.

    `counts` are from :func:`count_rows`. The number of unique rows is written to ``answer[2]``.
    """

    def cut_rows(addresses, size, source, counts, bits, answer):
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
                answer[2] = segment

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
    run: Callable[..., None],
    answer: Any,
    fetch: Callable[[Any], Any],
    kind: Any,
    size: int,
    height: int,
) -> tuple[int, int] | None:
    """Sort row indices; return None if one is out of range.

    The number of unique rows is written to ``answer[2]``, on the device: the host waits for the
    check of the indices only. Returns the column of the sorted keys, 0 if the indices ascend, and
    the number of bits of a key's position.

    Parameters
    ----------
    run : callable
        ``run(kernel, *arguments)`` launches a kernel with a thread for each position in the list.
        The kernel's arguments are the addresses, the length of the list, and `arguments`.
    answer : device array
        Three int64 zeros.
    fetch : callable
        Copies `answer` to the host.
    kind : type
        Type of the row indices.
    size : int
        Length of the list, at least 1.
    height : int
        Number of rows of the table.
    """
    bits = (size - 1).bit_length()
    run(survey(kind), height, bits, answer)
    outside, mixed, _ = fetch(answer)
    if outside:
        return None
    keys, spare = KEYS, SPARE
    if mixed:
        run(sort_tiles())
        for run_bits in range(TILE_BITS, bits):
            run(merge(), keys, spare, run_bits)
            keys, spare = spare, keys
    run(count_rows(), keys, spare, bits)
    run(cut_rows(), keys, spare, bits, answer)
    return keys if mixed else 0, bits
