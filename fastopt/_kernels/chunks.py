"""Chunks of work: rows ``(tensor, start, size)`` of an array, which kernels run over."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.threads import thread_count

CHUNK = 32_768
"""Maximum elements of a chunk: 128 KB of float32, so that four arrays stay in a core's cache."""

LINE = 64
"""Chunk sizes are a multiple of this many elements, at least a cache line of any dtype."""

PARALLEL_FROM = 65_536
"""Number of elements from which threads save more than starting them costs.

If NumPy's own threads still spin after a matrix product, starting threads costs ten times as much.
"""

ROW_COST = 4
"""Cost of an element of an indexed row relative to a dense one: rows come from main memory."""

Chunks = NDArray[np.int64]


@lru_cache(maxsize=1024)
def chunks_of(*tensors: tuple[int, int], size: int = CHUNK) -> tuple[NDArray[np.int64], int]:
    """Divide tensors ``(items, width)``, with `width` elements per item, into chunks.

    Chunks have about `size` elements.

    Returns an array with a row ``(tensor, start, size)`` for each chunk, in items, and the total
    number of elements.
    """
    chunks = [np.empty((0, 3), np.int64)]
    for tensor, (items, width) in enumerate(tensors):
        start = np.arange(0, items, max(size // max(width, 1), 1))
        sizes = np.diff(start, append=items)
        chunks.append(np.stack([np.full_like(start, tensor), start, sizes], axis=1))
    return np.concatenate(chunks), sum(items * width for items, width in tensors)


def shares(rows: int, width: int) -> NDArray[np.int64]:
    """Return row-sparse chunks: one for each thread, or a single one if that is faster."""
    threads = thread_count() if rows * width * ROW_COST >= PARALLEL_FROM else 1
    each = max(-(-rows // threads), 1)
    chunks = np.zeros((-(-rows // each), 3), np.int64)
    for k in range(len(chunks)):
        chunks[k, 1:] = k * each, min(each, rows - k * each)
    return chunks


def balanced(*tensors: tuple[int, int]) -> tuple[NDArray[np.int64], int]:
    """Divide tensors like :func:`chunks_of`, with an equal share of the elements for each thread.

    Threads take equal numbers of consecutive chunks, so shares with fewer chunks are padded with
    empty ones.
    """
    total = sum(items * width for items, width in tensors)
    threads = thread_count()
    if total < PARALLEL_FROM or threads == 1:
        return chunks_of(*tensors)
    return _balanced(tensors, threads)


@lru_cache(maxsize=1024)
def _balanced(tensors: tuple[tuple[int, int], ...], threads: int) -> tuple[NDArray[np.int64], int]:
    total = sum(items * width for items, width in tensors)
    each = -(-total // (threads * LINE)) * LINE
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    done = 0
    for tensor, (items, width) in enumerate(tensors):
        first, unit = 0, max(width, 1) * LINE
        while first < items:
            share = min(done // each, threads - 1)
            room = -(-((share + 1) * each - done) // unit) * LINE
            count = items - first if share == threads - 1 else min(items - first, room)
            shares[share].append((tensor, first, count))
            first, done = first + count, done + count * width
    longest = max(map(len, shares))
    padded = [share + [(0, 0, 0)] * (longest - len(share)) for share in shares]
    return np.array(padded, np.int64).reshape(-1, 3), total


@lru_cache(maxsize=64)
def single_rows(count: int) -> NDArray[np.int64]:
    """Return `count` chunks of one indexed row each."""
    return np.stack([np.zeros(count, np.int64), np.arange(count), np.ones(count, np.int64)], axis=1)
