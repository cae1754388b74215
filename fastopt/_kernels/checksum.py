"""Checksums of segments of memory, whose loop vectorizes.

Tests: ``tests/kernels/test_checksum.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.noise import mix

_STEP = np.uint64(0x9E3779B97F4A7C15)


@intrinsic
def unaligned(typingctx, address, kind):
    """Return the number of a type at any address."""

    def codegen(context, builder, signature, args):
        pointer = context.get_value_type(signature.return_type).as_pointer()
        return builder.load(builder.inttoptr(args[0], pointer), align=1)

    return kind.dtype(types.int64, kind), codegen


@cache
def checksums() -> Callable:
    """Kernel ``(segments, sums)`` with a row for each segment: its address, and its bytes.

    A sum is the sum modulo 2**64 of a hash of each word. The hash is a bijection that depends on
    the position, so that neither a different order nor changes of several signs cancel.
    """

    def checksums(segments, sums):
        for s in range(len(segments)):
            address, size = segments[s, 0], segments[s, 1]
            words = size // 8
            rest = np.uint64(0)
            for k in range(8 * words, size):
                rest |= np.uint64(unaligned(address + k, np.uint8)) << np.uint64(8 * (k % 8))
            total = mix(rest + np.uint64(words) * _STEP)
            for k in range(words):
                total += mix(unaligned(address + 8 * k, np.uint64) + np.uint64(k) * _STEP)
            sums[s] = total

    return compiled(checksums, None, parallel=False)
