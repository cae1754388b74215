"""Chunks of work: rows ``(tensor, start, size)`` of an array, which kernels run over."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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


@lru_cache(maxsize=64)
def single_rows(count: int) -> NDArray[np.int64]:
    """Return `count` chunks of one indexed row each."""
    return np.stack([np.zeros(count, np.int64), np.arange(count), np.ones(count, np.int64)], axis=1)
