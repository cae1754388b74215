"""Loops that move the memory of an update and compute nothing: the limit of what one can reach."""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import prange

from fastopt.kernels.compiling import compiled
from fastopt.kernels.table import CHUNK, PARALLEL_FROM

__all__ = ["read", "write"]

PIECE = CHUNK  # a global of this module, which numba freezes into the loops


def write_all(arrays, zero):
    """Read all arrays and write all but the gradient, ``arrays[1]``, with the same values.

    Pieces of the arrays in turn are up to 1.4 times faster in cache than all in one inner loop.
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
    summing = {"reassoc", "nsz"}  # in any order, so that additions do not wait for each other
    return (
        compiled(write_all, None, parallel),
        compiled(read_all, None, parallel, fastmath=summing),
    )


def write(arrays: tuple[np.ndarray, ...]) -> None:
    """Read float32 arrays and write all but the second one, with threads where updates have them.

    The first two have one dimension and one length, which is a multiple of the others' lengths.
    """
    _loops(len(arrays[0]) >= PARALLEL_FROM)[0](arrays, np.float32(0))


def read(arrays: tuple[np.ndarray, ...]) -> None:
    """Read float32 arrays of one length, with threads where updates have them."""
    _loops(len(arrays[0]) >= PARALLEL_FROM)[1](arrays)
