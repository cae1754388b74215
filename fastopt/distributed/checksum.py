"""Checksums of weights, to verify that they are equal on all ranks."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels import checksum as kernels
from fastopt._kernels.compiling import bind

Segments = NDArray[np.int64]
"""Segments of memory, a row for each: address and number of bytes."""


@cache
def summer() -> Any:
    """Compiled :func:`fastopt._kernels.checksum.checksums`."""
    return bind(kernels.checksums(), np.empty((0, 2), np.int64), np.empty(0, np.uint64))


def checksum(elements: Any) -> int:
    """64-bit checksum of the bytes of an array.

    It changes with any element, with the order of elements and with signs.

    Parameters
    ----------
    elements : numpy.ndarray
        Any array; other layouts than C are copied.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.checksum import checksum
    >>> one, other = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
    >>> checksum(one) == checksum(one.copy()), checksum(one) == checksum(other)
    (True, False)
    """
    data = np.ascontiguousarray(elements)
    return int(checksums(np.array([[data.ctypes.data, data.nbytes]]))[0])


def checksums(segments: Segments) -> NDArray[np.uint64]:
    """Checksum of each segment, see :func:`checksum`."""
    sums = np.empty(len(segments), np.uint64)
    with np.errstate(over="ignore"):  # without a compiler
        summer()(segments, sums)
    return sums
