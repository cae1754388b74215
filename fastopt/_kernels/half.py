"""Conversions between float32 and the bits of float16 and bfloat16, one number at a time.

Values are float32 and bits are uint16, as numba supports neither format. Every function runs inside
kernels, where the loop around it vectorizes.

The conversions use 32-bit integer arithmetic, except for float16 on processors that convert it
(F16C on x86). The hardware gives the same bits, apart from NaN payloads. It is used only if kernels
are compiled for such a processor: for another one, LLVM would call a function that does not exist.
Numba's disk cache keeps kernels separate for each processor and set of features.
"""

from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import overload

from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.noise import _bits_float, _float_bits
from fastopt.kernels.rule import scalar

_ZERO, _ONE = np.uint32(0), np.uint32(1)

# Parts of float16's bits.
_SIGN_16 = np.uint32(0x8000)
_MAGNITUDE_16 = np.uint32(0x7FFF)
_MANTISSA_16 = np.uint32(0x03FF)
_INFINITY_16 = np.uint32(0x7C00)
_NAN_16 = np.uint32(0x7E00)

# Parts of float32's bits.
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)

# Float32 bits of the smallest normal float16, the largest float16, and the next power of 2.
_NORMAL_16 = np.uint32(113 << 23)
_LARGEST_16 = np.uint32(0x477FE000)
_BEYOND_16 = np.uint32(143 << 23)

# Difference of the exponent fields of an equal float32 and float16; infinity needs it twice.
_BIAS = np.uint32(112 << 23)
_BIAS_2 = np.uint32(224 << 23)

# A normal float16 drops 13 bits of a float32's mantissa; the factor 2**13 in the exponent field.
_DROPPED = np.uint32(13)
_DROPPED_MASK = np.uint32((1 << 13) - 1)
_DROPPED_HALF = np.uint32(1 << 12)
_DROPPED_FACTOR = np.uint32(13 << 23)

# Subnormal float16 are multiples of 2**-24, here in fixed point with 21 fractional bits.
_UNIT = np.float32(2.0**-24)
_POINT = np.uint32(21)
_POINT_MASK = np.uint32((1 << 21) - 1)
_TO_UNITS = np.float32(2.0 ** (24 + 21))

# Bfloat16 is the upper half of float32's bits.
_HALF_BITS = np.uint32(16)
_LOWER = np.uint32(0xFFFF)
_LOWER_TOP = np.uint32(15)
_LOWER_HALF = np.uint32(0x8000)
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
_PAST_LARGEST = np.float32(1 + 2.0**-9 + 2.0**-18)


def widen_float16(bits):
    """Convert the bits of a float16 to float32."""


@overload(widen_float16)
def _widen_float16(bits):
    if _f16c():
        return lambda bits: _widen_by_hardware(bits)
    return lambda bits: _widen_by_integers(bits)


def narrow_float16(x):
    """Round float32 `x` to the nearest float16, ties to even, and return its bits.

    Magnitudes of 65520 and more become infinity. NaN stays NaN.
    """


@overload(narrow_float16)
def _narrow_float16(x):
    if _f16c():
        return lambda x: _narrow_by_hardware(x)
    return lambda x: _narrow_by_integers(x)


@scalar
def dither_float16(x, bits):
    """Round float32 `x` stochastically to float16 with the random uint32 `bits`; return its bits.

    The result is one of the two adjacent float16. The probability of rounding away from zero is the
    truncated part in units of the last place, so the expectation is `x`. The low 13 of the random
    bits are used; for a subnormal result the low 21, to whose resolution the probability is rounded
    down. Exact float16 values, infinity and NaN do not change. Beyond the largest float16, 65504,
    rounding is to nearest.
    """
    magnitude = _magnitude(x)
    added = _DROPPED_HALF if magnitude > _LARGEST_16 else np.uint32(bits & _DROPPED_MASK)
    raised = max(np.uint32(min(magnitude, _BEYOND_16) + added), _BIAS)
    normal = np.uint32(raised - _BIAS) >> _DROPPED
    below = _bits_float(min(magnitude, _NORMAL_16 - _ONE))
    units = np.uint32(np.int32(below * _TO_UNITS))
    subnormal = np.uint32(units + (bits & _POINT_MASK)) >> _POINT
    return _signed(x, subnormal if magnitude < _NORMAL_16 else normal)


@scalar
def widen_bfloat16(bits):
    """Convert the bits of a bfloat16 to float32."""
    return _bits_float(np.uint32(bits) << _HALF_BITS)


@scalar
def narrow_bfloat16(x):
    """Round float32 `x` to the nearest bfloat16, ties to even, and return its bits.

    NaN stays NaN.
    """
    odd = np.uint32(_float_bits(x) >> _HALF_BITS) & _ONE
    return _upper(x, np.uint32(odd + (_LOWER_HALF - _ONE)))


@scalar
def dither_bfloat16(x, bits):
    """Round float32 `x` stochastically to bfloat16 with the random uint32 `bits`.

    See :func:`dither_float16`; the low 16 of the random bits are used for every `x`.
    """
    raised = np.uint32(_float_bits(x) + np.uint32(bits & _LOWER))
    # Beyond the largest bfloat16 it is rounded to nearest: the product overflows from the middle to
    # the next power of 2 on. A multiplication takes less time than another comparison.
    past = _float_bits(x * _PAST_LARGEST)
    return np.uint16((past if _magnitude(x) > _LARGEST_BFLOAT16 else raised) >> _HALF_BITS)


@scalar
def split_float32(x):
    """Split float32 `x` into the bits of the nearest bfloat16 and the low 16 bits of `x`.

    Unlike in :func:`narrow_bfloat16`, ties are rounded away from zero. The low bits thus determine
    the direction of rounding, and :func:`join_float32` restores `x` exactly.
    """
    return _upper(x, _LOWER_HALF), np.uint16(_float_bits(x) & _LOWER)


@scalar
def join_float32(high, low):
    """Join the parts `high` and `low` from :func:`split_float32` to a float32.

    If `high` has since been set to another finite number, the result rounds to that number; if it
    was set to zero, the result is below 1e-40.
    """
    high, low = np.uint32(high), np.uint32(low)
    # If rounding raised the upper half, the lower half starts with 1. Raising never gives zero.
    raised = np.uint32(low >> _LOWER_TOP) if np.uint32(high & _MAGNITUDE_16) else _ZERO
    return _bits_float(np.uint32(np.uint32(high - raised) << _HALF_BITS) | low)


@scalar
def _upper(x, added):
    """Return the upper half of the bits of float32 `x` plus `added`; NaN becomes a quiet NaN."""
    bits = _float_bits(x)
    is_nan = _magnitude(x) > _INFINITY
    return np.uint16((bits | _QUIET if is_nan else np.uint32(bits + added)) >> _HALF_BITS)


@scalar
def _widen_by_integers(bits):
    bits = np.uint32(bits)
    exponent = np.uint32(bits & _INFINITY_16)
    bias = _BIAS_2 if exponent == _INFINITY_16 else _BIAS
    normal = np.uint32(((bits & _MAGNITUDE_16) << _DROPPED) + bias)
    subnormal = _float_bits(np.float32(np.int32(bits & _MANTISSA_16)) * _UNIT)
    magnitude = subnormal if exponent == _ZERO else normal
    return _bits_float(magnitude | np.uint32((bits & _SIGN_16) << _HALF_BITS))


@scalar
def _narrow_by_integers(x):
    magnitude = min(_magnitude(x), _BEYOND_16)
    exponent = max(np.uint32(magnitude & _INFINITY), _NORMAL_16)
    # The last place of the sum equals the float16's, so the processor rounds to it.
    large = np.uint32(exponent + _DROPPED_FACTOR)
    significand = np.uint32(_float_bits(_bits_float(magnitude) + _bits_float(large)) - large)
    # The significand's leading 1 (of a normal number) and its carry increment the exponent.
    return _signed(x, np.uint32(np.uint32(exponent - _NORMAL_16) >> _DROPPED) + significand)


@scalar
def _magnitude(x):
    """Return the bits of the absolute value."""
    return np.uint32(_float_bits(x) & _MAGNITUDE)


@scalar
def _signed(x, magnitude):
    """Return the bits of the float16 with the sign of `x` and this magnitude, or of NaN."""
    sign = np.uint32(_float_bits(x) >> _HALF_BITS) & _SIGN_16
    return np.uint16(sign | (_NAN_16 if _magnitude(x) > _INFINITY else magnitude))


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
    if config.CPU_FEATURES is None:
        return bool(on_host and config.ENABLE_AVX)
    features = config.CPU_FEATURES.split(",")
    # Disabling a feature also disables the features that depend on it.
    return on_host and "+f16c" in features and not any(f.startswith("-") for f in features)
