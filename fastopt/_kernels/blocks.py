"""8-bit state with a scale for each block of elements, decoded and encoded inside kernels.

With a block's scale :math:`s`, a signed number is :math:`c s` for a code :math:`c` of -127 to 127,
and a nonnegative one is :math:`(c^2 s)^2` for a code of 0 to 255: its fourth root is linear in the
code. The scale is such that the largest number of the block has the largest code. Blocks do not
cross rows, the slices along the first axis; the last block of a row may be shorter.

Rounding is to nearest, ties to even, after signed codes have been moved toward zero. A block with a
non-finite number becomes NaN as a whole. A block becomes zero if the largest magnitude of its
signed numbers, or the square root of its largest nonnegative number, is below 1e-30.
"""

import math

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
    "rooted",
    "scale_of",
    "signed_code",
    "signed_value",
]

CODE_BLOCK = 128
"""Maximum elements of a block."""

SIGNED, NONNEGATIVE = 127, 255 * 255
"""Largest multiple of the scale, for a signed number and the root of a nonnegative number."""

INWARD = 0.05
"""Part of a step by which signed codes are moved toward zero before they are rounded.

Where the second moment of an element is rounded down while its mean is rounded up, an update is too
large; this limits the largest to about half, at 0.003 more relative error.
"""

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
    """Encode a number, without rounding to an integer; `factor` is 1 / scale."""
    return toward_zero(number * factor)


def toward_zero(x):
    """Move a code by INWARD toward zero; codes below INWARD, which become 0, change their sign."""
    return x - np.copysign(x.dtype.type(INWARD), x)


@overload(toward_zero)
def _toward_zero(x):
    return lambda x: _toward_zero_intrinsic(x)


@intrinsic
def _toward_zero_intrinsic(typingctx, x):
    def codegen(context, builder, signature, args):
        word, real = ir.IntType(x.bitwidth), context.get_value_type(x)
        sign = builder.and_(builder.bitcast(args[0], word), word(1 << (x.bitwidth - 1)))
        shift = builder.bitcast(context.get_constant(x, INWARD), word)
        return builder.fsub(args[0], builder.bitcast(builder.or_(shift, sign), real))

    return x(x), codegen


@scalar
def nonnegative_code(root, factor):
    """Encode the root of a nonnegative number, without rounding; `factor` is that of 1 / scale."""
    return root_of(root) * factor


@scalar
def scale_of(top, multiple):
    """Return the scale of a block with maximum `top`, ``top / multiple``, and its inverse."""
    if top >= LEAST and top < math.inf:
        return top / type(top)(multiple), type(top)(multiple) / top
    return type(top)(0.0 if top < LEAST else math.nan), type(top)(0)


def root_of(x):
    """Return the square root of a nonnegative number, in float32 with relative error below 4e-5.

    The divider, which computes square roots, is busy with those of the rule.
    """
    if x.dtype == np.float64:
        return np.sqrt(x)
    return refined_root(x, (_MAGIC - (x.view(np.uint32) >> np.uint32(1))).view(np.float32))


@overload(root_of)
def _root_of(x):
    if x == types.float64:
        return lambda x: math.sqrt(x)
    return lambda x: refined_root(x, _inverse_root(x))


@scalar
def refined_root(x, y):
    """Return ``sqrt(x)``, given `y` such that ``abs(1 - x * y**2) <= 0.07``."""
    near = x * y
    rest = _ONE - near * y
    return near + near * (rest * (_SERIES[0] + rest * _SERIES[1]))


_MAGIC = np.uint32(0x5F375A86)
"""``_MAGIC - bits / 2`` are the bits of about ``1 / sqrt(x)``, with `bits` those of float32 `x`."""

_ONE = np.float32(1)

_SERIES = tuple(map(np.float32, (0.50109452, 0.37554692)))
"""Coefficients of ``(1 - rest) ** -0.5`` after 1, fitted at Chebyshev nodes."""


@intrinsic
def _inverse_root(typingctx, x):
    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        half = builder.lshr(builder.bitcast(args[0], word), word(1))
        return builder.bitcast(builder.sub(word(int(_MAGIC)), half), ir.FloatType())

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


@scalar
def encode(states, scales, values, count, tops):
    """Write `count` numbers from each pointer of `values` to a block of each state slot.

    The scale of each coded slot is also written. The numbers are those of :func:`rooted`, and
    `tops` their maxima from :func:`higher`.
    """
    factors = write_scales(states, scales, tops)
    for i in range(count):
        store(states, i, codes_of(states, load(values, i), factors))


def rooted(states, numbers):
    """Return the numbers of an element, with roots in place of nonnegative ones that are coded.

    The compiler computes the root once if the rule needs it too.
    """
    pairs = zip(states, numbers, strict=True)
    return tuple(np.sqrt(x) if _kind(state) is np.uint8 else x for state, x in pairs)


def _kind(state):
    return np.dtype(state._type_).type


@overload(rooted)
def _rooted(states, numbers):
    return lambda states, numbers: _rooted_intrinsic(states, numbers)


@intrinsic
def _rooted_intrinsic(typingctx, states, numbers):
    def codegen(context, builder, signature, args):
        found = cgutils.unpack_tuple(builder, args[1], len(numbers))
        for k, kind in enumerate(numbers):
            if states[k].dtype == types.uint8:
                found[k] = context.compile_internal(builder, square_root, kind(kind), [found[k]])
        return context.make_tuple(builder, numbers, found)

    return numbers(states, numbers), codegen


@scalar
def square_root(x):
    return math.sqrt(x)


@scalar
def signed_scale(top):
    """Return the scale of a block of signed numbers with maximum `top`, and 1 / scale."""
    return scale_of(top, SIGNED)


@scalar
def nonnegative_scale(top):
    """Return the scale of a block of nonnegative numbers, and the root of 1 / scale.

    `top` is the root of the block's maximum.
    """
    scale, inverse = scale_of(top, NONNEGATIVE)
    return scale, math.sqrt(inverse)


_SCALES = {np.int8: signed_scale, np.uint8: nonnegative_scale}
_COMPILED_SCALES = {types.int8: signed_scale, types.uint8: nonnegative_scale}


def write_scales(states, scales, tops):
    """Write the scale of each coded slot; return the factor of :func:`codes_of` for each slot."""
    scales = iter(scales)
    factors = []
    for state, top in zip(states, tops, strict=True):
        factor = top
        if _kind(state) in _SCALES:
            kept, factor = _SCALES[_kind(state)](top)
            store((next(scales),), 0, (kept,))
        factors.append(factor)
    return tuple(factors)


@overload(write_scales)
def _write_scales(states, scales, tops):
    return lambda states, scales, tops: _write_scales_intrinsic(states, scales, tops)


@intrinsic
def _write_scales_intrinsic(typingctx, states, scales, tops):
    real = scales[0].dtype
    factors = types.UniTuple(real, len(tops))

    def codegen(context, builder, signature, args):
        kept = iter(cgutils.unpack_tuple(builder, args[1], len(scales)))
        found = []
        for k, top in enumerate(cgutils.unpack_tuple(builder, args[2], len(tops))):
            factor = builder.bitcast(top, context.get_value_type(real))
            if states[k].dtype in _COMPILED_SCALES:
                pair = types.UniTuple(real, 2)(real)
                scale = _COMPILED_SCALES[states[k].dtype]
                result = context.compile_internal(builder, scale, pair, [factor])
                scale, factor = cgutils.unpack_tuple(builder, result, 2)
                builder.store(scale, next(kept))
            found.append(factor)
        return context.make_tuple(builder, factors, found)

    return factors(states, scales, tops), codegen


def codes_of(states, numbers, factors):
    """Return the codes of an element's numbers; those of slots that are not coded stay."""
    slots = zip(states, numbers, factors, strict=True)
    return tuple(
        nearest_byte(_EXACT[_kind(state)](number, factor)) if _kind(state) in _EXACT else number
        for state, number, factor in slots
    )


_EXACT = {np.int8: signed_code, np.uint8: nonnegative_code}


@scalar
def nearest_signed(number, factor):
    return nearest_byte(signed_code(number, factor))


@scalar
def nearest_nonnegative(root, factor):
    return nearest_byte(nonnegative_code(root, factor))


_NEAREST = {types.int8: nearest_signed, types.uint8: nearest_nonnegative}


@overload(codes_of)
def _codes_of(states, numbers, factors):
    return lambda states, numbers, factors: _codes_intrinsic(states, numbers, factors)


@intrinsic
def _codes_intrinsic(typingctx, states, numbers, factors):
    kinds = [types.int8 if p.dtype in _NEAREST else n for p, n in zip(states, numbers, strict=True)]
    codes = types.Tuple(kinds)

    def codegen(context, builder, signature, args):
        found, scaling = (cgutils.unpack_tuple(builder, arg, len(kinds)) for arg in args[1:])
        for k, real in enumerate(factors):
            if states[k].dtype in _NEAREST:
                typed = types.int8(numbers[k], real)
                nearest = _NEAREST[states[k].dtype]
                found[k] = context.compile_internal(builder, nearest, typed, [found[k], scaling[k]])
        return context.make_tuple(builder, codes, found)

    return codes(states, numbers, factors), codegen


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
            if states[k].dtype in _COMPILED_SCALES:
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
