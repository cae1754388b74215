"""Rows of sparse arrays in CSR and COO format, which are known by their attributes alone."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["listed_rows"]

Array = NDArray[Any]


def listed_rows(array: Any, wide: DTypeLike) -> tuple[Array, Array]:
    """Return the rows that have entries, and where they are, sorted.

    Entries at the same place are summed in their order, in the dtype `wide`.
    """
    first, *rest = _coordinates(array)
    rows, position = np.unique(first, return_inverse=True)
    values = np.zeros((len(rows), *array.shape[1:]), wide)
    target = np.ravel_multi_index((position, *rest), values.shape)
    np.add.at(values.reshape(-1), target, array.data.astype(wide, copy=False))
    return values.astype(array.dtype, copy=False), rows


def _coordinates(array: Any) -> tuple[Array, ...]:
    """Arrays that say for each dimension where the entries are."""
    if array.format == "coo":
        return tuple(array.coords)
    rows = np.repeat(np.arange(len(array.indptr) - 1), np.diff(array.indptr))
    return (rows, array.indices)[-len(array.shape) :]
