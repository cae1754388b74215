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
    whole = data.size // 8 * 8
    words = data[:whole].view(np.uint64)
    starts = np.arange(0, len(words), ROW)
    sums = np.add.reduceat(words, starts) if len(words) else np.zeros(1, np.uint64)
    sums[-1:] += np.frombuffer(data[whole:].tobytes().ljust(8, b"\0"), np.uint64)
    return sums
