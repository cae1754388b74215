"""Rows of sparse arrays in CSR and COO format, without importing scipy."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["listed_rows"]

Array = NDArray[Any]


def listed_rows(array: Any, wide: DTypeLike) -> tuple[Array, Array]:
    """Return the values and the sorted indices of the rows with stored entries.

    Duplicate entries are summed in storage order, in the dtype `wide`.
    """
    first, *rest = _coordinates(array)
    rows, position = np.unique(first, return_inverse=True)
    values = np.zeros((len(rows), *array.shape[1:]), wide)
    target = np.ravel_multi_index((position, *rest), values.shape)
    np.add.at(values.reshape(-1), target, array.data.astype(wide, copy=False))
    return values.astype(array.dtype, copy=False), rows


def _coordinates(array: Any) -> tuple[Array, ...]:
    """Return the coordinates of the stored entries, one array for each dimension."""
    if array.format == "coo":
        return tuple(array.coords)
    rows = np.repeat(np.arange(len(array.indptr) - 1), np.diff(array.indptr))
    return (rows, array.indices)[-len(array.shape) :]
