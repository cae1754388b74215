"""8-bit state with a scale for each block of elements, decoded and encoded inside kernels.

With a block's scale :math:`s`, a signed number is :math:`c s` for a code :math:`c` of -127 to 127,
and a nonnegative one is :math:`(c^2 s)^2` for a code of 0 to 255: its fourth root is linear in the
code. The scale is such that the largest number of the block has the largest code. Blocks do not
cross rows, the slices along the first axis; the last block of a row may be shorter.

Rounding is to nearest, ties to even. A block with a non-finite number becomes NaN as a whole. A
block becomes zero if the largest magnitude of its signed numbers, or the square root of its largest
nonnegative number, is below 1e-30.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fastopt._kernels.storage import load, store
from fastopt.kernels.rule import scalar

__all__ = [
    "CODE_BLOCK",
    "NONNEGATIVE",
    "SIGNED",
    "blocks_of",
    "decode",
    "encode",
    "extent",
    "higher",
    "lowest",
    "nonnegative_code",
    "nonnegative_value",
    "scale_of",
    "signed_code",
    "signed_value",
]

CODE_BLOCK = 128
"""Maximum elements of a block."""

SIGNED, NONNEGATIVE = 127, 255 * 255
"""Largest multiple of the scale, for a signed number and the root of a nonnegative number."""

LEAST = 1e-30
"""Threshold below which a block is zero, as the inverse of its scale could overflow."""


@scalar
def blocks_of(width):
    """Return the number of blocks in a row of `width` elements."""
    return (width + CODE_BLOCK - 1) // CODE_BLOCK


@scalar
def extent(block, in_row, width):
    """Return the first element of a block, its column, and the number of elements.

    A row of `width` elements has `in_row` blocks.
    """
    row = block // in_row
    column = (block - row * in_row) * CODE_BLOCK
    return row * width + column, column, min(CODE_BLOCK, width - column)


@scalar
def signed_value(code, scale):
    """Decode a signed code."""
    return code * scale


@scalar
def nonnegative_value(code, scale):
    """Decode a nonnegative code."""
    root = code * code * scale
    return root * root


@scalar
def signed_code(number, factor):
    """Encode a number, without rounding; `factor` is 1 / scale."""
    return number * factor


@scalar
def nonnegative_code(number, factor):
    """Encode a nonnegative number, without rounding; `factor` is the root of 1 / scale."""
    return fourth_root(number) * factor


@scalar
def scale_of(top, multiple):
    """Return the scale of a block with maximum `top`, ``top / multiple``, and its inverse."""
    if top >= LEAST and top < math.inf:
        return top / type(top)(multiple), type(top)(multiple) / top
    return type(top)(0.0 if top < LEAST else math.nan), type(top)(0)


def fourth_root(x):
    """Return the fourth root of a nonnegative number, in float32 with relative error below 4e-4.

    The multiplications take half the time of two square roots, which float64 uses.
    """
    if x.dtype == np.float64:
        return np.sqrt(np.sqrt(x))
    return refined_root(x, (_MAGIC - (x.view(np.uint32) >> np.uint32(2))).view(np.float32))


@overload(fourth_root)
def _fourth_root(x):
    if x == types.float64:
        return lambda x: math.sqrt(math.sqrt(x))
    return lambda x: refined_root(x, _inverse_root(x))


@scalar
def refined_root(x, y):
    """Return ``x**0.25``, given `y` near ``x**-0.25`` such that ``abs(1 - x * y**4) <= 1/8``."""
    near = x * y * (y * y)
    rest = _SERIES[0] - near * y
    return near * (_SERIES[0] + rest * (_SERIES[1] + rest * _SERIES[2]))


_MAGIC = np.uint32(0x4F580000)
"""``_MAGIC - bits / 4`` are the bits of about ``x**-0.25``, with `bits` those of float32 `x`."""

_SERIES = tuple(map(np.float32, (1, 0.7571239, 0.66293021)))
"""Coefficients of ``(1 - rest) ** -0.75`` for a rest of up to 1/8, fitted at Chebyshev nodes."""


@intrinsic
def _inverse_root(typingctx, x):
    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        quarter = builder.lshr(builder.bitcast(args[0], word), word(2))
        return builder.bitcast(builder.sub(word(int(_MAGIC)), quarter), ir.FloatType())

    return types.float32(types.float32), codegen


def decode(states, i, scales):
    """Return element `i` of each state slot, decoded with `scales`, one for each coded slot."""
    scales = iter(scales)
    numbers = []
    for state, number in zip(states, load(states, i), strict=True):
        value = _VALUES.get(np.dtype(state._type_).type)
        if value:
            scale = next(scales)
            number = value(type(scale)(number), scale)
        numbers.append(number)
    return tuple(numbers)


_VALUES = {np.int8: signed_value, np.uint8: nonnegative_value}
_COMPILED_VALUES = {types.int8: signed_value, types.uint8: nonnegative_value}


@overload(decode)
def _decode(states, i, scales):
    return lambda states, i, scales: _decode_intrinsic(states, load(states, i), scales)


@intrinsic
def _decode_intrinsic(typingctx, states, numbers, scales):
    kinds = [pointer.dtype for pointer in states]
    result = types.Tuple([scales[0] if kind in _COMPILED_VALUES else kind for kind in kinds])

    def codegen(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[1], len(kinds))
        factors = iter(cgutils.unpack_tuple(builder, args[2], len(scales)))
        for k, kind in enumerate(kinds):
            if kind in _COMPILED_VALUES:
                typed = scales[0](scales[0], scales[0])
                parts = [context.cast(builder, values[k], kind, scales[0]), next(factors)]
                values[k] = context.compile_internal(builder, _COMPILED_VALUES[kind], typed, parts)
        return context.make_tuple(builder, result, values)

    return result(states, numbers, scales), codegen


def encode(states, scales, values, count, tops):
    """Write `count` numbers from each pointer of `values` to a block of each state slot.

    The scale of each coded slot is also written. `tops` are the maxima from :func:`higher`.
    """
    scales = iter(scales)
    for state, numbers, top in zip(states, values, tops, strict=True):
        writer = _WRITERS.get(np.dtype(state._type_).type)
        if writer:
            writer(state, next(scales), numbers, count, top)
        else:
            copy_numbers(state, numbers, count)


@scalar
def encode_signed(codes, scale, numbers, count, top):
    """Encode a block of signed numbers; `top` is the largest magnitude."""
    kept, factor = scale_of(top, SIGNED)
    store((scale,), 0, (kept,))
    for i in range(count):
        store((codes,), i, (nearest_byte(signed_code(load((numbers,), i)[0], factor)),))


@scalar
def encode_nonnegative(codes, scale, numbers, count, top):
    """Encode a block of nonnegative numbers; `top` is the largest."""
    kept, inverse = scale_of(math.sqrt(top), NONNEGATIVE)
    factor = math.sqrt(inverse)
    store((scale,), 0, (kept,))
    for i in range(count):
        store((codes,), i, (nearest_byte(nonnegative_code(load((numbers,), i)[0], factor)),))


@scalar
def copy_numbers(target, numbers, count):
    """Copy the numbers of a slot that is not coded."""
    for i in range(count):
        store((target,), i, load((numbers,), i))


_WRITERS = {np.int8: encode_signed, np.uint8: encode_nonnegative}
_COMPILED_WRITERS = {types.int8: encode_signed, types.uint8: encode_nonnegative}


@overload(encode)
def _encode(states, scales, values, count, tops):
    return lambda states, scales, values, count, tops: _encode_intrinsic(
        states, scales, values, count, tops
    )


@intrinsic
def _encode_intrinsic(typingctx, states, scales, values, count, tops):
    def codegen(context, builder, signature, args):
        pointers, factors, numbers, found = (
            cgutils.unpack_tuple(builder, args[n], len(signature.args[n])) for n in (0, 1, 2, 4)
        )
        kept = iter(zip(scales, factors, strict=True))
        for k, pointer in enumerate(states):
            if pointer.dtype in _COMPILED_WRITERS:
                kind, scale = next(kept)
                top = builder.bitcast(found[k], context.get_value_type(kind.dtype))
                writer: Any = _COMPILED_WRITERS[pointer.dtype]
                typed = types.none(pointer, kind, values[k], types.intp, kind.dtype)
                given = [pointers[k], scale, numbers[k], args[3], top]
            else:
                writer, typed = copy_numbers, types.none(pointer, values[k], types.intp)
                given = [pointers[k], numbers[k], args[3]]
            context.compile_internal(builder, writer, typed, given)
        return context.get_dummy_value()

    return types.none(states, scales, values, types.intp, tops), codegen


def lowest(values):
    """Return the initial maxima for :func:`higher`, one for each pointer of `values`."""
    return (np.float64(0),) * len(values)


@overload(lowest)
def _lowest(values):
    return lambda values: _lowest_intrinsic(values)


@intrinsic
def _lowest_intrinsic(typingctx, values):
    kind = types.uint32 if values.dtype.dtype == types.float32 else types.uint64
    tops = types.UniTuple(kind, len(values))

    def codegen(context, builder, signature, args):
        zeros = [context.get_constant(kind, 0)] * len(values)
        return context.make_tuple(builder, tops, zeros)

    return tops(values), codegen


def higher(states, tops, numbers):
    """Return the maximum of `tops` and magnitudes of `numbers` for each slot; NaN propagates."""
    pairs = zip(tops, map(abs, numbers), strict=True)
    return tuple(top if number <= top or top != top else number for top, number in pairs)


@overload(higher)
def _higher(states, tops, numbers):
    return lambda states, tops, numbers: _higher_intrinsic(states, tops, numbers)


@intrinsic
def _higher_intrinsic(typingctx, states, tops, numbers):
    """Compare magnitudes as integers, which vectorizes; NaN is above infinity."""
    real = types.float32 if tops.dtype == types.uint32 else types.float64

    def codegen(context, builder, signature, args):
        word = ir.IntType(real.bitwidth)
        found = cgutils.unpack_tuple(builder, args[1], len(tops))
        for k, number in enumerate(cgutils.unpack_tuple(builder, args[2], len(tops))):
            if states[k].dtype in _COMPILED_WRITERS:
                value = context.cast(builder, number, numbers[k], real)
                bits = builder.bitcast(value, word)
                magnitude = builder.and_(bits, word(2 ** (word.width - 1) - 1))
                larger = builder.icmp_unsigned(">", magnitude, found[k])
                found[k] = builder.select(larger, magnitude, found[k])
        return context.make_tuple(builder, tops, found)

    return tops(states, tops, numbers), codegen


def nearest_byte(x):
    """Round `x`, which is between -128 and 255, to the nearest integer, as the bits of a byte."""
    return int(np.nan_to_num(np.rint(x))) & 0xFF  # NaN has any code: its scale is NaN


@overload(nearest_byte)
def _nearest_byte(x):
    return lambda x: _nearest_byte_intrinsic(x)


@intrinsic
def _nearest_byte_intrinsic(typingctx, x):
    """Add a number whose last place is 1: the sum is rounded and has `x` in its lowest bits."""
    mantissa = {types.float32: 23, types.float64: 52}[x]

    def codegen(context, builder, signature, args):
        shifted = builder.fadd(args[0], context.get_constant(x, 1.5 * 2.0**mantissa))
        bits = builder.bitcast(shifted, ir.IntType(x.bitwidth))
        return builder.trunc(bits, ir.IntType(8))

    return types.int8(x), codegen
