"""Checksum of an array, whose loop vectorizes.

Tests: ``tests/kernels/test_checksum.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from fastopt._kernels.compiling import compiled
from fastopt._kernels.noise import mix

__all__ = ["checksum"]

_STEP = np.uint64(0x9E3779B97F4A7C15)


@cache
def checksum() -> Callable:
    """Kernel ``(words, rest)`` that returns the sum modulo 2**64 of a hash of each word.

    The one word of `rest` follows the others. The hash is a bijection that depends on the position,
    so that neither a different order nor changes of several signs cancel.
    """

    def checksum(words, rest):
        total = mix(rest[0] + np.uint64(len(words)) * _STEP)
        for k in range(len(words)):
            total += mix(words[k] + np.uint64(k) * _STEP)
        return total

    return compiled(checksum, None, parallel=False)
