"""Checksums of segments of memory, whose loop vectorizes.

Tests: ``tests/kernels/test_checksum.py``.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fastopt._kernels.compiling import compiled
from fastopt._kernels.noise import mix

__all__ = ["checksums"]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def word(address, count):
    """Return the word of up to 8 bytes at any address, with zeros for missing ones."""
    return np.uint64(int.from_bytes(ctypes.string_at(int(address), int(count)), "little"))


@overload(word)
def _word(address, count):
    return lambda address, count: _word_intrinsic(address, count)


@intrinsic
def _word_intrinsic(typingctx, address, count):
    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        memory = cgutils.alloca_once_value(builder, ir.IntType(64)(0))
        builder.store(ir.IntType(64)(0), memory)
        source, target = builder.inttoptr(args[0], byte), builder.bitcast(memory, byte)
        cgutils.raw_memcpy(builder, target, source, args[1], ir.IntType(64)(1))
        return builder.load(memory)

    return types.uint64(types.int64, types.int64), codegen


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
            rest = word(address + 8 * words, size - 8 * words)
            total = mix(rest + np.uint64(words) * _STEP)
            for k in range(words):
                total += mix(word(address + 8 * k, 8) + np.uint64(k) * _STEP)
            sums[s] = total

    return compiled(checksums, None, parallel=False)
