"""Which ranges of memory overlap, for any number of arrays at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt.kernels import cpu

__all__ = ["Ranges", "addresses", "bounds"]

Addresses = NDArray[np.integer[Any]]


class Ranges:
    """Ranges of addresses, sorted; the compiled twin of :meth:`meeting` is ``clear_of``.

    Parameters
    ----------
    first, last : numpy.ndarray
        Address of the first byte of each range, and the one after its last byte.
    """

    def __init__(self, first: Addresses, last: Addresses) -> None:
        self.order = np.argsort(first)
        self.first, self.last = first[self.order], last[self.order]

    def overlapping(self) -> list[tuple[int, int]]:
        """Positions of neighbouring ranges that overlap; empty if and only if none overlap."""
        order = self.order
        places = np.flatnonzero(self.last[:-1] > self.first[1:])
        return [(int(order[k]), int(order[k + 1])) for k in places]

    def meeting(self, first: Addresses, last: Addresses) -> list[tuple[int, int]]:
        """Pairs ``(k, own)`` of other ranges and the first own one that each overlaps.

        The own ranges must not overlap each other.
        """
        after = np.searchsorted(self.last, first, side="right")
        found = np.flatnonzero(after < len(self.first))
        found = found[self.first[after[found]] < last[found]]
        return [(int(k), int(self.order[after[k]])) for k in found]


def addresses(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Addresses of the first elements."""
    found, objects = np.empty(len(arrays), np.int64), np.fromiter(arrays, object, len(arrays))
    cpu.addresses()(int(objects.__array_interface__["data"][0]), found)
    return found


def bounds(arrays: Sequence[NDArray[Any]]) -> tuple[Addresses, Addresses]:
    """Address of the first byte of each array, and the one after its last byte."""
    first = addresses(arrays)
    last = first + np.array([array.nbytes for array in arrays], np.int64)
    for k, array in enumerate(arrays):
        if not array.flags.c_contiguous:
            first[k], last[k] = byte_bounds(array)
    return first, last
