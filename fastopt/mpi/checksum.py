"""Checksums of weights, which show that ranks have the same."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["checksums"]

ROW = 512
"""Words of 8 bytes that are added up to one number."""


def checksums(elements: Any) -> NDArray[np.uint64]:
    """Sums of rows of 4 KiB of an array, so that memory is read once and little is compared.

    They differ if elements of one row do, unless they are the same in another order.

    Parameters
    ----------
    elements : numpy.ndarray
        Any array.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.mpi.checksum import checksums
    >>> checksums(np.arange(3, dtype=np.int64))
    array([3], dtype=uint64)
    """
    data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    whole = data.size // (8 * ROW) * 8 * ROW
    rows = data[:whole].view(np.uint64).reshape(-1, ROW).sum(axis=1, dtype=np.uint64)
    rest = np.zeros(-(-(data.size - whole) // 8) * 8, np.uint8)
    rest[: data.size - whole] = data[whole:]
    return np.append(rows, rest.view(np.uint64).sum(dtype=np.uint64))
