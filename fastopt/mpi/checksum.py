"""Checksums of weights, to verify that they are equal on all ranks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["checksums"]

ROW = 512
"""Number of 8-byte words in a checksum."""


def checksums(elements: Any) -> NDArray[np.uint64]:
    """Sums of the 8-byte words in each 4 KiB block of an array.

    Memory is read once and little data is compared. A changed word changes the sum of its block; a
    different order of the words does not.

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
