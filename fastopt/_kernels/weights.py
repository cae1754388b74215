"""Storage of exact weights: plain, with a rounded copy, or split into two 16-bit parts.

Tests: ``tests/engine/test_mixed_precision.py``.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import overload

from fastopt._kernels import half
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.storage import load, store
from fastopt.kernels.rule import scalar

SPLIT = (types.CPointer(types.int16), types.CPointer(types.uint16))
"""Pointer types of the bfloat16 and the low 16 bits of a split weight."""


def parts(exact: np.ndarray) -> Any:
    """Split an array into two uint16 arrays, like :func:`fastopt._kernels.half.split_float32`."""
    bits = exact.view(np.uint32)
    high = np.where(np.isnan(exact), bits | 0x400000, bits + 0x8000) >> 16
    return np.asarray(high, np.uint16), np.asarray(bits & 0xFFFF, np.uint16)


def joined(high: np.ndarray, low: np.ndarray) -> Any:
    """Join the arrays from :func:`parts` to float32 numbers."""
    high, low = high.view(np.uint16).astype(np.uint32), low.astype(np.uint32)
    raised = np.where(high & 0x7FFF, low >> 15, 0)
    return (((high - raised) << 16) | low).astype(np.uint32).view(np.float32)


def read_weight(pointers, i):
    """Load element `i` of a weight: the value at the first pointer, or the joined split parts."""


@overload(read_weight)
def _read_weight(pointers, i):
    if tuple(pointers) == SPLIT:
        return lambda pointers, i: _join(_bits_intrinsic(pointers, i))
    return lambda pointers, i: load(pointers[:1], i)[0]


def write_weight(pointers, i, weight):
    """Store element `i` of a weight and of its copy, rounded to their types, or its two parts."""


@overload(write_weight)
def _write_weight(pointers, i, weight):
    if tuple(pointers) == SPLIT:
        return lambda pointers, i, weight: _store_bits_intrinsic(
            pointers, i, half.split_float32(np.float32(weight))
        )
    return lambda pointers, i, weight: store(pointers, i, (weight,))


@scalar
def _join(bits):
    return half.join_float32(np.uint16(bits[0]), bits[1])


@intrinsic
def _bits_intrinsic(typingctx, pointers, i):
    def codegen(context, builder, signature, args):
        parts = cgutils.unpack_tuple(builder, args[0], 2)
        loaded = [builder.load(builder.gep(part, [args[1]])) for part in parts]
        return context.make_tuple(builder, signature.return_type, loaded)

    return types.Tuple([pointer.dtype for pointer in pointers])(pointers, types.intp), codegen


@intrinsic
def _store_bits_intrinsic(typingctx, pointers, i, bits):
    def codegen(context, builder, signature, args):
        for k in range(2):
            value, target = (builder.extract_value(arg, k) for arg in (args[2], args[0]))
            builder.store(value, builder.gep(target, [args[1]]))
        return context.get_dummy_value()

    return types.none(pointers, types.intp, bits), codegen
