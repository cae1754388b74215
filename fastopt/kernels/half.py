"""Conversions between float32 and the bits of float16 and bfloat16, one number at a time.

Values are float32, and bits are uint16, as numba knows neither format. Every function runs inside
kernels, where the loop around it vectorizes, and in plain Python.

Integers of 32 bits do the work, but for float16 where the processor converts it (F16C on x86).
That path gives the same bits. It is taken only if kernels are compiled for such a processor: for
another, LLVM would call a function that does not exist. Numba's cache on disk keeps the kernels of
each processor and set of features apart.
"""

from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

from fastopt.kernels.noise import _bits_float, _float_bits
from fastopt.kernels.rule import scalar

__all__ = [
    "dither_bfloat16",
    "dither_float16",
    "join_float32",
    "narrow_bfloat16",
    "narrow_float16",
    "split_float32",
    "widen_bfloat16",
    "widen_float16",
]

_SIGN_16 = np.uint32(0x8000)
_MAGNITUDE_16 = np.uint32(0x7FFF)
_INFINITY_16 = np.uint32(0x7C00)
_NAN_16 = np.uint32(0x7E00)
_MANTISSA_16 = np.uint32(0x03FF)
_LEAST_16 = np.float32(2.0**-24)
_NORMAL_16 = np.float32(2.0**-14)

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)

# Bits of the float32 that is the least normal float16, the largest, the first power too large.
_NORMAL = np.uint32(113 << 23)
_LARGEST_16 = np.uint32(0x477FE000)
_OVERFLOW = np.uint32(143 << 23)

_BIAS = np.uint32(112 << 23)
"""Difference between the exponents of a float32 and of the equal float16."""
_BIAS_2 = np.uint32(2 * 112 << 23)
_DROPPED = np.uint32(13)
"""Bits of a float32's mantissa that a normal float16 has no place for."""
_DROPPED_MASK = np.uint32((1 << 13) - 1)
_DROPPED_HALF = np.uint32(1 << 12)
_SHIFT = np.uint32(13 << 23)
"""Factor 2**13 as the difference of exponents."""
_UNIT_BITS = np.uint32(21)
"""Bits after the point when a number below the normal ones counts the least float16."""
_UNIT_MASK = np.uint32((1 << 21) - 1)
_TO_UNITS = np.float32(2.0 ** (24 + 21))

_ZERO, _ONE = np.uint32(0), np.uint32(1)
_UPPER = np.uint32(16)
_TOP = np.uint32(15)
_LOWER = np.uint32(0xFFFF)
_HALF = np.uint32(0x8000)
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)


def widen_float16(bits):
    """Float32 of the float16 with the given bits."""
    return _widen_by_integers(bits)


@overload(widen_float16)
def _widen_float16(bits):
    if _f16c():
        return lambda bits: _widen_by_hardware(bits)
    return lambda bits: _widen_by_integers(bits)


def narrow_float16(x):
    """Bits of the float16 nearest to float32 `x`, of two equally near ones the even one.

    From 65520 on that is infinity. NaN stays NaN.
    """
    return _narrow_by_integers(x)


@overload(narrow_float16)
def _narrow_float16(x):
    if _f16c():
        return lambda x: _narrow_by_hardware(x)
    return lambda x: _narrow_by_integers(x)


@scalar
def dither_float16(x, bits):
    """Bits of one of the two float16 next to float32 `x`, chosen by the random uint32 `bits`.

    The one away from zero has the probability by which `x` is nearer to it, so the expectation is
    `x`. The low 13 bits decide, and the low 21 where the result is not a normal number, to whose
    resolution the probability is rounded down. A float16 does not change, nor do infinity and NaN.
    Beyond the largest float16, 65504, rounding is to nearest.
    """
    magnitude = _magnitude(x)
    added = _DROPPED_HALF if magnitude > _LARGEST_16 else np.uint32(bits & _DROPPED_MASK)
    normal = np.uint32(min(magnitude, _INFINITY) - _BIAS + added) >> _DROPPED
    units = np.uint32(np.int32(min(abs(x), _NORMAL_16) * _TO_UNITS))
    subnormal = np.uint32(units + (bits & _UNIT_MASK)) >> _UNIT_BITS
    return _signed(x, subnormal if magnitude < _NORMAL else normal)


@scalar
def widen_bfloat16(bits):
    """Float32 of the bfloat16 with the given bits."""
    return _bits_float(np.uint32(bits) << _UPPER)


@scalar
def narrow_bfloat16(x):
    """Bits of the bfloat16 nearest to float32 `x`, of two equally near ones the even one.

    NaN stays NaN.
    """
    odd = np.uint32(_float_bits(x) >> _UPPER) & _ONE
    return _upper(x, np.uint32(odd + (_HALF - _ONE)))


@scalar
def dither_bfloat16(x, bits):
    """Bits of one of the two bfloat16 next to float32 `x`, chosen by the random uint32 `bits`.

    The one away from zero has the probability by which `x` is nearer to it, so the expectation is
    `x`; the low 16 bits decide. A bfloat16 does not change, nor do infinity and NaN. Beyond the
    largest bfloat16 rounding is to nearest.
    """
    added = _HALF if _magnitude(x) > _LARGEST_BFLOAT16 else np.uint32(bits & _LOWER)
    return _upper(x, added)


@scalar
def split_float32(x):
    """Bits of the bfloat16 nearest to float32 `x`, and the low 16 bits of `x`.

    Unlike in :func:`narrow_bfloat16`, of two equally near ones it is the one away from zero. So
    the low bits tell which way it was rounded, and :func:`join_float32` gives back `x`.
    """
    low = np.uint32(_float_bits(x) & _LOWER) if x == x else _ZERO
    return _upper(x, _HALF), np.uint16(low)


@scalar
def join_float32(high, low):
    """Float32 that :func:`split_float32` split into `high` and `low`.

    Where `high` was changed since, the result is a number that is rounded to `high`, or next to
    zero if `high` is zero.
    """
    high, low = np.uint32(high), np.uint32(low)
    borrow = np.uint32(low >> _TOP) if np.uint32(high & _MAGNITUDE_16) else _ZERO
    return _bits_float(np.uint32(np.uint32(high - borrow) << _UPPER) | low)


@scalar
def _upper(x, added):
    """Upper half of the bits of float32 `x` plus `added`; NaN becomes a quiet NaN."""
    bits = _float_bits(x)
    rounded = np.uint32(bits + added) if x == x else np.uint32(bits | _QUIET)
    return np.uint16(rounded >> _UPPER)


@scalar
def _widen_by_integers(bits):
    bits = np.uint32(bits)
    exponent = np.uint32(bits & _INFINITY_16)
    bias = _BIAS_2 if exponent == _INFINITY_16 else _BIAS
    normal = np.uint32(((bits & _MAGNITUDE_16) << _DROPPED) + bias)
    subnormal = _float_bits(np.float32(np.int32(bits & _MANTISSA_16)) * _LEAST_16)
    magnitude = subnormal if exponent == _ZERO else normal
    return _bits_float(magnitude | np.uint32((bits & _SIGN_16) << _UPPER))


@scalar
def _narrow_by_integers(x):
    magnitude = _magnitude(x)
    exponent = np.uint32(min(max(np.uint32(magnitude & _INFINITY), _NORMAL), _OVERFLOW))
    # The last place of the sum is that of the float16, so the processor rounds to it.
    shifter = np.uint32(exponent + _SHIFT)
    significand = np.uint32(_float_bits(abs(x) + _bits_float(shifter)) - shifter)
    # The significand has the leading 1 of a normal number, and a carry, which raise the exponent.
    return _signed(x, np.uint32(np.uint32(exponent - _NORMAL) >> _DROPPED) + significand)


@scalar
def _magnitude(x):
    return np.uint32(_float_bits(x) & _MAGNITUDE)


@scalar
def _signed(x, magnitude):
    """Float16 bits of a rounded magnitude, or infinity or NaN, with the sign of float32 `x`."""
    limit = _INFINITY_16 if x == x else _NAN_16
    sign = np.uint32(_float_bits(x) >> _UPPER) & _SIGN_16
    return np.uint16(min(np.uint32(magnitude), limit) | sign)


@intrinsic
def _widen_by_hardware(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _narrow_by_hardware(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@cache
def _f16c() -> bool:
    """Whether kernels are compiled for a processor that converts float16."""
    try:
        on_host = binding.get_host_cpu_features().get("f16c", False)
    except RuntimeError:
        return False
    chosen = config.CPU_FEATURES
    if chosen is None:
        return bool(on_host and config.ENABLE_AVX)
    features = chosen.split(",")
    # Taking one feature away takes those that need it away too.
    return on_host and "+f16c" in features and not any(f.startswith("-") for f in features)
