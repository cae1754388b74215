"""Copies between the tensors of a call and buckets, and sums of the parts that ranks receive."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from operator import lt
from typing import Any

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from fastopt._engine.overlap import Addresses, addresses
from fastopt._kernels import copying
from fastopt._kernels.compiling import bind
from fastopt._kernels.layout import kind_of
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt.optimizer.optimizer import Array

Runs = NDArray[np.int64]
"""Runs of elements, a row for each: position of the tensor in the call, start and stop of its
elements, and offset in the bucket."""

COMPILED_FROM = 1 << 20, 32
"""Bytes, and number of runs, from which one kernel with threads is faster than NumPy."""


@cache
def copier(parallel: bool = True) -> Any:
    """Compiled :func:`fastopt._kernels.copying.copy`."""
    return bind(copying.copy(parallel), np.empty((0, 3), np.int64), 0)


@cache
def adder(wire: np.dtype[Any], real: Any, parallel: bool) -> Any:
    """Compiled :func:`fastopt.kernels.copying.add`."""
    kernel = copying.add(kind_of(wire), real.type, parallel)
    return bind(kernel, np.empty((0, 1), np.uint64), np.empty(0, np.int64), np.empty(0, real))


@cache
def rounder(wire: np.dtype[Any]) -> Any:
    """Compiled :func:`fastopt._kernels.copying.convert` from float32."""
    kernel = copying.convert(types.float32, kind_of(wire))
    return bind(kernel, np.empty((0, 2), np.uint64), np.empty(0, np.int64))


def add_up(parts: Addresses, counts: Sequence[int], wire: Any, total: Array, large: bool) -> None:
    """Sum arrays of the dtype `wire`, in order, in the dtype of `total`.

    `parts` has a row for each segment of `total`, with the addresses of the arrays that are summed
    there; `counts` has the elements of each segment. `large` sums are shared by threads.
    """
    parallel = large and may_run_parallel()
    with turn() if parallel else nullcontext():
        adder(wire, total.dtype, parallel)(parts.astype(np.uint64), np.cumsum(counts), total)


def pack(
    arrays: Sequence[Any], runs: Runs, packed: Array, at: Addresses | None = None, used: int = 0
) -> None:
    """Copy consecutive runs of arrays to a bucket; convert to its dtype.

    `at` has the addresses of all arrays, if all are in place and have the bucket's dtype; `used` is
    how many bytes are used until the bucket is read.
    """
    if _copied(arrays, runs, packed, False, at, used) or _rounded(arrays, runs, packed):
        return
    parts = [_elements(arrays[k])[first:last] for k, first, last, _ in runs.tolist()]
    if parts:
        begin, end = runs[0, 3], runs[-1, 3] + runs[-1, 2] - runs[-1, 1]
        with np.errstate(over="ignore"):  # infinities are detected in the sums
            np.concatenate(parts, out=packed[begin:end], casting="unsafe")


def unpack(packed: Array, runs: Runs, arrays: Sequence[Any], at: Addresses | None = None) -> None:
    """Copy runs from a bucket to flat arrays of its dtype; for `at` see :func:`pack`."""
    if not _copied(arrays, runs, packed, True, at):
        for k, first, last, start in runs.tolist():
            arrays[k][first:last] = packed[start : start + last - first]


def _elements(array: Any) -> Any:
    """Flat elements of an array in C order; iterators of other arrays are flat already."""
    return array.reshape(-1) if isinstance(array, np.ndarray) else array


def _rounded(arrays: Sequence[Any], runs: Runs, packed: Array) -> bool:
    """Round runs of float32 arrays to a bucket of half precision, unless one is not in place."""
    at = _in_place(arrays, runs, np.dtype(np.float32)) if packed.itemsize == 2 else None
    if at is None or not may_run_parallel():
        return False
    places, first, last, start = runs.T
    ends = at[places] + 4 * first, packed.ctypes.data + 2 * start
    with turn():
        rounder(packed.dtype)(np.stack(ends, axis=1).astype(np.uint64), last - first)
    return True


def _in_place(arrays: Sequence[Any], runs: Runs, dtype: np.dtype[Any]) -> Addresses | None:
    """Addresses of the arrays that runs belong to, or None if one is of another kind or dtype."""
    named = {k: arrays[k] for k in np.unique(runs[:, 0]).tolist()}
    if not named or any(type(a) is not np.ndarray or a.dtype != dtype for a in named.values()):
        return None
    at = np.zeros(max(named) + 1, np.int64)
    at[[*named]] = addresses([*named.values()])
    return at


def _copied(
    arrays: Sequence[Any],
    runs: Runs,
    packed: Array,
    back: bool,
    at: Addresses | None = None,
    used: int = 0,
) -> bool:
    """Copy large or many runs, unless an array is not in place or is to be converted."""
    size = packed.itemsize
    places, first, last, start = runs.T
    work = size * (last - first).sum(), len(runs)
    if all(map(lt, work, COMPILED_FROM)) or not may_run_parallel():
        return False
    if at is None:
        at = _in_place(arrays, runs, packed.dtype)
        if at is None:
            return False
    ends = at[places] + size * first, packed.ctypes.data + size * start
    source, target = reversed(ends) if back else ends
    with turn():
        copier()(np.stack([source, target, size * (last - first)], axis=1), used)
    return True


def flat_like(arrays: Sequence[Array], dtype: DTypeLike | None = None) -> list[Array]:
    """Return zeros in the shapes of some arrays, consecutive in memory for each dtype.

    :class:`ShardedUpdater` sends gradients from such arrays, and receives weights into them,
    without intermediate copies. Allocate the arrays of a list call with one call of this function,
    in the order of the list.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        The arrays, such as the weights of a list call.
    dtype : dtype, optional
        Dtype of all results. Default: the dtype of each array.

    Returns
    -------
    list of numpy.ndarray
        Views in C order. Each of them keeps the memory of all alive.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.mpi import flat_like
    >>> first, second = flat_like([np.ones((2, 2)), np.ones(3)])
    >>> first.shape, second
    ((2, 2), array([0., 0., 0.]))
    >>> first.base is second.base
    True
    """
    kinds = [np.dtype(array.dtype if dtype is None else dtype) for array in arrays]
    sizes: dict[np.dtype[Any], int] = {}
    starts = []
    for array, kind in zip(arrays, kinds, strict=True):
        starts.append(sizes.get(kind, 0))
        sizes[kind] = starts[-1] + array.size
    memory = {kind: np.zeros(size, kind) for kind, size in sizes.items()}
    return [
        memory[kind][start : start + array.size].reshape(array.shape)
        for array, kind, start in zip(arrays, kinds, starts, strict=True)
    ]
