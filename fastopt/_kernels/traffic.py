"""Loops with the memory traffic of an update and no arithmetic: an upper bound on its speed."""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import prange

from fastopt._kernels.chunks import CHUNK, PARALLEL_FROM
from fastopt._kernels.compiling import compiled

PIECE = CHUNK  # a global of this module, which numba freezes into the loops


def write_all(arrays, zero):
    """Read all arrays, and write back all but the gradient, ``arrays[1]``, unchanged.

    In cache, taking chunks of the arrays in turn is up to 1.4 times faster than one inner loop over
    all arrays.
    """
    size = len(arrays[0])
    for piece in prange((size + PIECE - 1) // PIECE):
        first = piece * PIECE
        last = min(first + PIECE, size)
        weight, grad = arrays[0][first:last], arrays[1][first:last]
        for i in range(len(weight)):
            weight[i] -= zero * grad[i]
        for k in range(2, len(arrays)):
            rows = size // len(arrays[k])
            state = arrays[k][first // rows : last // rows]
            for i in range(len(state)):
                state[i] -= zero


def read_all(arrays):
    """Read all arrays."""
    size = len(arrays[0])
    pieces = (size + PIECE - 1) // PIECE
    total = np.zeros(pieces, np.float32)
    for piece in prange(pieces):
        first = piece * PIECE
        last = min(first + PIECE, size)
        for k in range(len(arrays)):
            part = arrays[k][first:last]
            sum_ = np.float32(0)
            for i in range(len(part)):
                sum_ += part[i]
            total[piece] += sum_
    return total


@cache
def _loops(parallel: bool) -> tuple[Callable, Callable]:
    summing = {"reassoc", "nsz"}  # any order, so that additions do not depend on each other
    reading = compiled(read_all, None, parallel, fastmath=summing)
    return compiled(write_all, None, parallel), reading


def write(arrays: tuple[np.ndarray, ...]) -> None:
    """Read float32 arrays and write all but the second one, with threads like an update.

    The first two are one-dimensional and have equal lengths, a multiple of the others' lengths.
    """
    _loops(len(arrays[0]) >= PARALLEL_FROM)[0](arrays, np.float32(0))


def read(arrays: tuple[np.ndarray, ...]) -> None:
    """Read float32 arrays of equal lengths, with threads like an update."""
    _loops(len(arrays[0]) >= PARALLEL_FROM)[1](arrays)
