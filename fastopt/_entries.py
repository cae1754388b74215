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
    rows, position, rest = _positions(array)
    values = np.zeros((len(rows), *array.shape[1:]), wide)
    target = np.ravel_multi_index((position, *rest), values.shape) if rest else position
    np.add.at(values.reshape(-1), target, array.data.astype(wide, copy=False))
    return values.astype(array.dtype, copy=False), rows


def _positions(array: Any) -> tuple[Array, Array, tuple[Array, ...]]:
    """Return the rows, and for each stored entry its position in them and its other coordinates."""
    if array.format == "csr" and len(array.shape) == 2:
        counts = np.diff(array.indptr)
        rows = np.flatnonzero(counts)
        return rows, np.repeat(np.arange(len(rows)), counts[rows]), (array.indices,)
    first, *rest = (array.indices,) if array.format == "csr" else array.coords
    rows, position = np.unique(first, return_inverse=True)
    return rows, position, tuple(rest)
