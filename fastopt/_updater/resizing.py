"""Weights whose rows are added or pruned: their state, average and deferred decay follow.

Tests: ``tests/updater/test_resize.py``.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._engine.parameters import Parameter
from fastopt._engine.validate import Array, leaves, mapped
from fastopt._kernels.device_memory import host, placed
from fastopt._kernels.devices import header
from fastopt.arguments import brief

Rows = NDArray[np.int64]


def checked_rows(context: str, rows: ArrayLike, weight: Array) -> Rows:
    """Return the old row of each row of a weight, -1 for a new one, as an array.

    Raises
    ------
    TypeError, ValueError
        `rows` is no list of integers, or has another length than the weight.
    """
    array = np.asarray(rows)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or not array.size):
        cure = "; np.flatnonzero(mask) has those of a mask" if array.dtype == bool else ""
        raise TypeError(f"{context}: rows must be a list of row numbers, got {brief(rows)}{cure}")
    if not weight.ndim or len(array) != len(weight):
        raise ValueError(
            f"{context}: rows must have the old row of each row of the weight, -1 for a new one: "
            f"got {len(array)} for shape {weight.shape}"
        )
    if array.size and array.min() < -1:
        raise ValueError(f"{context}: rows must be at least -1, got {array.min()}")
    return array.astype(np.int64)


def resized(of: Parameter, state: object, fresh: object, rows: Rows) -> Any:
    """Return a state with the old rows of `state`, and new ones of `fresh`.

    Arrays without dimensions, which are numbers of the tensor, are those of `state`.

    Raises
    ------
    ValueError
        An array of the state has other rows than the weight, or `rows` has one that is not there.
    """
    old, new = leaves(state), leaves(fresh)
    if len(old) != len(new):
        raise ValueError(f"{of.context}: its state has {len(old)} arrays, a new one has {len(new)}")
    pairs = zip(old, new, strict=True)
    made = iter([_taken(of.context, before, after, rows) for before, after in pairs])
    return mapped(lambda _: next(made), fresh)


def taken_rows(context: str, old: Array, new: Array, rows: Rows) -> Array:
    """Return `new` with the rows of `old` that `rows` selects."""
    kept = rows >= 0
    if old.shape[1:] != new.shape[1:] or (kept.any() and rows.max() >= len(old)):
        raise ValueError(
            f"{context}: rows up to {rows.max()} of an array of shape {old.shape} cannot be those "
            f"of one of shape {new.shape}"
        )
    new[kept] = old[rows[kept]]
    return new


def _taken(context: str, old: Array, new: Array, rows: Rows) -> Any:
    """Return an array of a resized state, where the new one is."""
    of, before = header(new), np.asarray(host(header(old)))
    if not of.shape:
        return placed(before.copy(), of)
    if len(of.shape) < 1 or of.shape[0] != len(rows):
        raise ValueError(
            f"{context}: its state has an array of shape {of.shape}, which has no row for each of "
            f"the {len(rows)} rows of the weight"
        )
    return placed(taken_rows(context, before, np.array(host(of)), rows), of)
