"""Detection of overlapping memory ranges among many arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels import cpu_calls
from fastopt._kernels.numpy_abi import address_of

Addresses = NDArray[np.integer[Any]]


class Ranges:
    """Sorted address ranges; ``clear_of`` is the compiled counterpart of :meth:`meeting`.

    Parameters
    ----------
    first, last : numpy.ndarray
        Address of the first byte of each range, and of the byte after its last.
    """

    def __init__(self, first: Addresses, last: Addresses) -> None:
        self.order = np.argsort(first)
        self.first, self.last = first[self.order], last[self.order]

    def overlapping(self) -> list[tuple[int, int]]:
        """Return pairs of neighbouring ranges that overlap; empty only if no ranges overlap."""
        order = self.order
        places = np.flatnonzero(self.last[:-1] > self.first[1:])
        return [(int(order[k]), int(order[k + 1])) for k in places]

    def meeting(self, first: Addresses, last: Addresses) -> list[tuple[int, int]]:
        """Return ``(k, j)``: given range `k` overlaps range `j` of `self`, the first such one.

        The ranges in `self` must not overlap each other.
        """
        after = np.searchsorted(self.last, first, side="right")
        meeting = np.flatnonzero(after < len(self.first))
        meeting = meeting[self.first[after[meeting]] < last[meeting]]
        return [(int(k), int(self.order[after[k]])) for k in meeting]

    def meets(self, first: Addresses, last: Addresses) -> bool:
        """Whether one of the given ranges overlaps one in `self`, which may overlap each other."""
        before = np.searchsorted(self.first, last)  # number of those that start below its end
        ends = np.maximum.accumulate(self.last)
        return bool(np.any(ends[before - 1] > first, where=before > 0))


def addresses(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the address of the first element of each array."""
    first, objects = np.empty(len(arrays), np.int64), np.fromiter(arrays, object, len(arrays))
    cpu_calls.addresses()(address_of(objects), first)
    return first


def bounds(arrays: Sequence[NDArray[Any]]) -> tuple[Addresses, Addresses]:
    """Return the address of the first byte of each array, and of the byte after its last."""
    first = addresses(arrays)
    last = first + np.array([array.nbytes for array in arrays], np.int64)
    for k, array in enumerate(arrays):
        if not array.flags.c_contiguous:
            first[k], last[k] = byte_bounds(array)
    return first, last
