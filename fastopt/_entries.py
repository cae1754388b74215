"""Rows of sparse arrays in CSR and COO format, without importing scipy."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


def listed_rows(array: Any, wide: DTypeLike) -> tuple[Array, Array]:
    """Return the values and the sorted indices of the rows with stored entries.

    Duplicate entries are summed in storage order, in the dtype `wide`.
    """
    rest: list[Array]
    if len(array.shape) == 2 and array.format == "csr":
        ends, rest = array.indptr, [array.indices]
        rows = np.flatnonzero(ends[1:] != ends[:-1])  # of booleans in a tenth of the time
        if array.shape[1] == 1 and len(rows) == len(array.data):
            return array.data[:, None], rows
        position = np.repeat(np.arange(len(rows)), ends[rows + 1] - ends[rows])
    else:
        first, *rest = (array.indices,) if array.format == "csr" else array.coords
        rows, position = np.unique(first, return_inverse=True)
    values = np.zeros((len(rows), *array.shape[1:]), wide)
    target = np.ravel_multi_index((position, *rest), values.shape) if rest else position
    np.add.at(values.reshape(-1), target, array.data.astype(wide, copy=False))
    return values.astype(array.dtype, copy=False), rows
