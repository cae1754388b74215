"""Copies between the tensors of a call and the buckets in which they are sent."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.overlap import addresses
from fastopt._kernels import copying
from fastopt._kernels.compiling import bind
from fastopt._kernels.threads import may_run_parallel, turn

__all__ = ["Runs", "copier", "pack", "unpack"]

Array = np.ndarray[Any, Any]

Runs = NDArray[np.int64]
"""Runs of elements, a row for each: position of the tensor in the call, start and stop of its
elements, and offset in the bucket."""

PARALLEL_FROM = 1 << 20
"""Bytes from which threads share the copies."""


@cache
def copier() -> Any:
    """Compiled :func:`fastopt._kernels.copying.copy`."""
    return bind(copying.copy(), np.empty((0, 3), np.int64))


def pack(arrays: Sequence[Any], runs: Runs, packed: Array) -> None:
    """Copy runs of flat arrays to a bucket, which they fill in order; convert to its dtype."""
    if not _copied(arrays, runs, packed, False):
        parts = [arrays[k][first:last] for k, first, last, _ in runs.tolist()]
        with np.errstate(over="ignore"):  # infinities are detected in the sums
            np.concatenate(parts, out=packed, casting="unsafe")


def unpack(packed: Array, runs: Runs, arrays: Sequence[Any]) -> None:
    """Copy runs from a bucket to flat arrays of its dtype."""
    if not _copied(arrays, runs, packed, True):
        for k, first, last, at in runs.tolist():
            arrays[k][first:last] = packed[at : at + last - first]


def _copied(arrays: Sequence[Any], runs: Runs, packed: Array, back: bool) -> bool:
    """Copy large runs with all threads, unless an array is not in place or is to be converted."""
    size = packed.itemsize
    places, first, last, at = runs.T
    if size * (last - first).sum() < PARALLEL_FROM or not may_run_parallel():
        return False
    named = {k: arrays[k] for k in places.tolist()}
    if any(type(a) is not np.ndarray or a.dtype != packed.dtype for a in named.values()):
        return False
    where = np.zeros(max(named) + 1, np.int64)
    where[[*named]] = addresses([*named.values()])
    ends = where[places] + size * first, packed.ctypes.data + size * at
    source, target = reversed(ends) if back else ends
    with turn():
        copier()(np.stack([source, target, size * (last - first)], axis=1))
    return True
