"""8-bit state with a scale for each block of elements, decoded and encoded inside kernels.

A signed number is :math:`c s` for a code :math:`c` of -127 to 127 and the block's scale :math:`s`,
chosen such that the largest number of the block has the largest code. The root of a nonnegative
number is :math:`f(c) s` for a code of 0 to 255, where :math:`f` grows about exponentially, from
1.3e-6 to 1, and :math:`-s` is the root of the block's largest number: see :func:`root_value`.
In a state with nonnegative codes, a signed number is divided by the root of the element's (first)
nonnegative number, and the quotient is encoded: with a moving average and that of its squares, this
is a step in learning rates, which has the same size whatever the gradients' scale.

Blocks do not cross rows, the slices along the first axis; the last block of a row may be shorter.
Rounding is to nearest, ties to even. A block with a non-finite number becomes NaN as a whole. A
block becomes zero if its largest number to encode, or the root, is below 1e-30.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.storage import load, store
from fastopt.kernels.rule import scalar

CODE_BLOCK = 128
"""Maximum elements of a block."""

SIGNED = 127
"""Largest code of a signed number."""

LIFT, TOP = 9, 255 + 9
"""Float that stands for code 0 and for the largest code; see :func:`root_value`."""

SHIFT = 2
"""Bits by which the bits of a root are shifted in those of its code's float."""

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
def root_value(code, scale):
    r"""Decode the root of a nonnegative number.

    The bits of a float are about linear in its logarithm. Those of ``code + LIFT`` are shifted to
    the left, which is about the fourth power, such that the largest code stands for 1: an octave
    has 32 codes down to 1/17, and half as many four octaves further down, to 1.3e-6.
    """
    return stretched(code + type(scale)(LIFT)) * (type(scale)(0) - scale)


@scalar
def nonnegative_code(root, factor):
    """Encode the root of a nonnegative number as ``code + LIFT``, without rounding.

    `factor` is 1 / the largest root of the block.
    """
    code, lift = squeezed(root * factor), type(factor)(LIFT)
    return code if code > lift else lift


class _Bits(NamedTuple):
    """The type of a float's bits, and what is added to them after a shift; sums wrap around."""

    word: Any
    stretched: Any
    squeezed: Any


def _bits(real, word):
    one, top = (int(np.array(x, real).view(word)) for x in (1, TOP))
    most = int(np.iinfo(word).max)
    return _Bits(word, word((one - (top << SHIFT)) & most), word((top - (one >> SHIFT)) & most))


BITS = {np.float32: _bits(np.float32, np.uint32), np.float64: _bits(np.float64, np.uint64)}


@np.errstate(over="ignore")
def stretched(x):
    """Return about ``(x / TOP) ** 4``, for a float from LIFT to TOP."""
    bits = BITS[x.dtype.type]
    return ((x.view(bits.word) << bits.word(SHIFT)) + bits.stretched).view(x.dtype)


@np.errstate(over="ignore")
def squeezed(x):
    """Return the inverse of :func:`stretched`."""
    bits = BITS[x.dtype.type]
    return ((x.view(bits.word) >> bits.word(SHIFT)) + bits.squeezed).view(x.dtype)


@overload(stretched)
def _stretched(x):
    return lambda x: _stretched_intrinsic(x)


@overload(squeezed)
def _squeezed(x):
    return lambda x: _squeezed_intrinsic(x)


def _shifting(name, field):
    """Return an intrinsic that shifts bits by the method `name` of a builder, and adds `field`."""

    @intrinsic
    def shifting(typingctx, x):
        def codegen(context, builder, signature, args):
            word = ir.IntType(x.bitwidth)
            bits = getattr(builder, name)(builder.bitcast(args[0], word), word(SHIFT))
            bits = builder.add(bits, word(int(getattr(BITS[np.dtype(x.name).type], field))))
            return builder.bitcast(bits, context.get_value_type(x))

        return x(x), codegen

    return shifting


_stretched_intrinsic = _shifting("shl", "stretched")
_squeezed_intrinsic = _shifting("lshr", "squeezed")


@scalar
def signed_scale(top):
    """Return the scale of a block of signed numbers with maximum `top`, and its inverse."""
    if top >= LEAST and top < math.inf:
        return top / type(top)(SIGNED), type(top)(SIGNED) / top
    return type(top)(0.0 if top < LEAST else math.nan), type(top)(0)


@scalar
def nonnegative_scale(top):
    """Return the scale of a block of nonnegative numbers and about -1 / scale.

    `top` is the block's largest number.
    """
    root = math.sqrt(top)
    if root >= LEAST and root < math.inf:
        return -root, inverse_root(top)
    return type(top)(0.0 if root < LEAST else math.nan), type(top)(0)


def inverse_root(x):
    """Return ``1 / sqrt(x)`` of a nonnegative number, in float32 with relative error below 7e-4.

    That of 0 is finite. The divider, which computes square roots, is busy with those of the rule.
    """
    if x.dtype == np.float64:
        return 1 / np.sqrt(np.maximum(x, _TINY))
    near = (_MAGIC - (x.view(np.uint32) >> np.uint32(1))).view(np.float32)
    return refined(x, near)


@overload(inverse_root)
def _inverse_root(x):
    if x == types.float64:
        return lambda x: 1 / math.sqrt(max(x, _TINY))
    return lambda x: refined(x, _near_inverse_root(x))


@scalar
def refined(x, y):
    """Return ``1 / sqrt(x)``, given `y` from bits: a step of Newton's, with the least error."""
    return y * (_NEWTON[0] - _NEWTON[1] * (x * y * y))


_MAGIC = np.uint32(0x5F1FFFF9)
"""``_MAGIC - bits / 2`` are the bits of about ``1 / sqrt(x)``, with `bits` those of float32 `x`."""

_NEWTON = np.float32(1.68191391), np.float32(0.703952253)

_TINY = 1e-300


@intrinsic
def _near_inverse_root(typingctx, x):
    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        half = builder.lshr(builder.bitcast(args[0], word), word(1))
        return builder.bitcast(builder.sub(word(int(_MAGIC)), half), ir.FloatType())

    return types.float32(types.float32), codegen


def first_nonnegative(kinds):
    """Return the position of the first slot of nonnegative codes, or None."""
    positions = [k for k, kind in enumerate(kinds) if kind == types.uint8]
    return positions[0] if positions else None


@scalar
def decode(states, i, scales):
    """Return element `i` of each state slot, decoded with `scales`, one for each coded slot."""
    return _decode_intrinsic(states, load(states, i), scales)


@intrinsic
def _decode_intrinsic(typingctx, states, numbers, scales):
    kinds = [pointer.dtype for pointer in states]
    coded = [k for k, kind in enumerate(kinds) if kind in _SCALES]
    result = types.Tuple([scales[0] if k in coded else kind for k, kind in enumerate(kinds)])

    def codegen(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[1], len(kinds))
        scaling = dict(zip(coded, cgutils.unpack_tuple(builder, args[2], len(scales)), strict=True))
        real, by = scales[0], first_nonnegative(kinds)
        pair = real(real, real)
        for k in coded:
            code = context.cast(builder, values[k], kinds[k], real)
            function = root_value if kinds[k] == types.uint8 else signed_value
            values[k] = context.compile_internal(builder, function, pair, [code, scaling[k]])
        for k in coded:
            if by is not None and kinds[k] == types.int8:
                values[k] = builder.fmul(values[k], values[by])
        for k in coded:
            if kinds[k] == types.uint8:
                values[k] = builder.fmul(values[k], values[k])
        return context.make_tuple(builder, result, values)

    return result(states, numbers, scales), codegen


@scalar
def encode(states, scales, values, count, tops):
    """Write `count` numbers from each pointer of `values` to a block of each state slot.

    The scale of each coded slot is also written. The numbers are those of :func:`prepared`, and
    `tops` their maxima from :func:`higher`.
    """
    factors = write_scales(states, scales, tops)
    for i in range(count):
        store(states, i, codes_of(states, load(values, i), factors))


@intrinsic
def prepared(typingctx, states, numbers):
    """Return the numbers of an element as they are encoded.

    These are the roots of nonnegative numbers, and signed ones divided by the first root.
    """
    kinds = [pointer.dtype for pointer in states]

    def codegen(context, builder, signature, args):
        values, by = cgutils.unpack_tuple(builder, args[1], len(numbers)), first_nonnegative(kinds)
        inverses = {}
        for k, kind in enumerate(kinds):
            if kind == types.uint8:
                typed = numbers[k](numbers[k])
                inverses[k] = context.compile_internal(builder, root_below, typed, [values[k]])
        for k, kind in enumerate(kinds):
            if kind == types.uint8 or (kind == types.int8 and by is not None):
                values[k] = builder.fmul(values[k], inverses.get(k, inverses.get(by)))
        return context.make_tuple(builder, numbers, values)

    return numbers(states, numbers), codegen


@scalar
def root_below(x):
    return inverse_root(x)


_SCALES = {types.int8: signed_scale, types.uint8: nonnegative_scale}


@intrinsic
def write_scales(typingctx, states, scales, tops):
    """Write the scale of each coded slot; return the factor of :func:`codes_of` for each slot."""
    real = scales[0].dtype
    factors = types.UniTuple(real, len(tops))

    def codegen(context, builder, signature, args):
        kept = iter(cgutils.unpack_tuple(builder, args[1], len(scales)))
        values = []
        for k, top in enumerate(cgutils.unpack_tuple(builder, args[2], len(tops))):
            factor = builder.bitcast(top, context.get_value_type(real))
            if states[k].dtype in _SCALES:
                pair = types.UniTuple(real, 2)(real)
                scale = _SCALES[states[k].dtype]
                result = context.compile_internal(builder, scale, pair, [factor])
                scale, factor = cgutils.unpack_tuple(builder, result, 2)
                builder.store(scale, next(kept))
            values.append(factor)
        return context.make_tuple(builder, factors, values)

    return factors(states, scales, tops), codegen


@scalar
def nearest_signed(number, factor):
    return nearest_byte(signed_value(number, factor))


@scalar
def nearest_nonnegative(root, factor):
    return lowered_byte(nonnegative_code(root, factor))


_NEAREST = {types.int8: nearest_signed, types.uint8: nearest_nonnegative}


@intrinsic
def codes_of(typingctx, states, numbers, factors):
    """Return the codes of an element's numbers; those of slots that are not coded stay."""
    kinds = [types.int8 if p.dtype in _NEAREST else n for p, n in zip(states, numbers, strict=True)]
    codes = types.Tuple(kinds)

    def codegen(context, builder, signature, args):
        slots, scaling = (cgutils.unpack_tuple(builder, arg, len(kinds)) for arg in args[1:])
        for k, real in enumerate(factors):
            if states[k].dtype in _NEAREST:
                typed = types.int8(numbers[k], real)
                nearest = _NEAREST[states[k].dtype]
                slots[k] = context.compile_internal(builder, nearest, typed, [slots[k], scaling[k]])
        return context.make_tuple(builder, codes, slots)

    return codes(states, numbers, factors), codegen


@intrinsic
def lowest(typingctx, values):
    """Return the initial maxima for :func:`higher`, one for each pointer of `values`."""
    kind = types.uint32 if values.dtype.dtype == types.float32 else types.uint64
    tops = types.UniTuple(kind, len(values))

    def codegen(context, builder, signature, args):
        zeros = [context.get_constant(kind, 0)] * len(values)
        return context.make_tuple(builder, tops, zeros)

    return tops(values), codegen


@intrinsic
def higher(typingctx, states, tops, numbers, state):
    """Return the maximum of `tops` and of each slot's magnitude; NaN propagates.

    These are `numbers`, or those of `state` in slots of nonnegative codes, whose roots are inexact.
    Magnitudes are compared as integers, which vectorizes; NaN is above infinity.
    """
    real = types.float32 if tops.dtype == types.uint32 else types.float64

    def codegen(context, builder, signature, args):
        word = ir.IntType(real.bitwidth)
        largest = cgutils.unpack_tuple(builder, args[1], len(tops))
        inputs = [cgutils.unpack_tuple(builder, arg, len(tops)) for arg in args[2:]]
        for k, kind in enumerate(pointer.dtype for pointer in states):
            if kind in _SCALES:
                exact = kind == types.uint8
                value = context.cast(builder, inputs[exact][k], (numbers, state)[exact][k], real)
                bits = builder.bitcast(value, word)
                magnitude = builder.and_(bits, word(2 ** (word.width - 1) - 1))
                larger = builder.icmp_unsigned(">", magnitude, largest[k])
                largest[k] = builder.select(larger, magnitude, largest[k])
        return context.make_tuple(builder, tops, largest)

    return tops(states, tops, numbers, state), codegen


def _byte(less):
    """Return an intrinsic that rounds a number, minus `less`, to the bits of a byte.

    It adds a number whose last place is 1, and takes the lowest bits.
    """

    @intrinsic
    def byte(typingctx, x):
        mantissa = {types.float32: 23, types.float64: 52}[x]

        def codegen(context, builder, signature, args):
            shifted = builder.fadd(args[0], context.get_constant(x, 1.5 * 2.0**mantissa - less))
            bits = builder.bitcast(shifted, ir.IntType(x.bitwidth))
            return builder.trunc(bits, ir.IntType(8))

        return types.int8(x), codegen

    return byte


nearest_byte, lowered_byte = _byte(0), _byte(LIFT)
