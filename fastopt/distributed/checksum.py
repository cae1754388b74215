"""Checksums of weights, to verify that they are equal on all ranks."""

from functools import cache
from typing import Any

import numpy as np

from fastopt._kernels import checksum as kernels
from fastopt._kernels.compiling import bind

__all__ = ["checksum", "summer"]


@cache
def summer() -> Any:
    """Compiled :func:`fastopt._kernels.checksum.checksum`."""
    words = np.empty(0, np.uint64)
    return bind(kernels.checksum(), words, words)


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
    data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    words = np.require(
        data[:whole].view(np.uint64), requirements=["A", "W"]
    )  # as the kernel expects
    rest = np.zeros(1, np.uint64)
    rest.view(np.uint8)[: data.size - whole] = data[whole:]
    with np.errstate(over="ignore"):  # without a compiler
        return int(summer()(words, rest))
