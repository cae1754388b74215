"""Checksums of segments of memory, whose loop vectorizes.

Tests: ``tests/kernels/test_checksum.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types
from numba.extending import overload

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.noise import mix

_STEP = np.uint64(0x9E3779B97F4A7C15)


def word(address):
    """Return the word of 8 bytes at any address."""


@overload(word)
def _word(address):
    return lambda address: _unaligned_intrinsic(address, np.uint64)


def byte(address):
    """Return the byte at an address, as a word."""


@overload(byte)
def _byte(address):
    return lambda address: np.uint64(_unaligned_intrinsic(address, np.uint8))


@intrinsic
def _unaligned_intrinsic(typingctx, address, kind):
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
                rest |= byte(address + k) << np.uint64(8 * (k % 8))
            total = mix(rest + np.uint64(words) * _STEP)
            for k in range(words):
                total += mix(word(address + 8 * k) + np.uint64(k) * _STEP)
            sums[s] = total

    return compiled(checksums, None, parallel=False)
