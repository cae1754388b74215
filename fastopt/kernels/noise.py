"""Random numbers that depend on a key and a counter only, so that any thread can draw any of them.

The bits are SplitMix64's (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number
generators"), whose state is a plain counter; the normal numbers are Box and Muller's (1958).
Logarithm and cosine are short series in float32, which vectorize where library calls do not.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from fastopt.kernels.rule import scalar

__all__ = ["dither_bits", "dither_key", "key", "normal"]

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW = np.uint64(0xFFFFFFFF)
_DITHER = np.uint64(0x6A09E667F3BCC909)
"""Sets the streams of dithering apart from those of normal numbers."""
_WORD, _HALF_WORD, _EXCHANGE = np.uint64(32), np.uint64(16), np.uint64((1 << 32) + 1)
_SHIFTS, _FACTORS, _STEP = (16, 15), (0x7FEB352D, 0x846CA68B), np.uint64(0x9E3779B9)
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)
_QUARTER = np.float32(0.25)
_TO_UNIT = np.float32(2.0**-32)
_LN_2 = np.float32(math.log(2))
_SQRT_2 = np.float32(math.sqrt(2))
_TURN = np.float32(2 * math.pi)
_LOG = tuple(np.float32(1 / k) for k in (3, 5, 7, 9))
_SIN = tuple(np.float32((-1) ** k / math.factorial(2 * k + 1)) for k in (1, 2, 3, 4, 5))


def key(seed: int, index: int, step: int) -> int:
    """Key of the stream for one update: a 64-bit hash of three integers."""
    hashed = 0
    for part in (seed, index, step):
        hashed = int(_mix(np.uint64((hashed + part + int(_GAMMA)) & _MASK)))
    return hashed


@scalar
def normal(key, element):
    """Draw a standard normal number, as float32, for element number `element` of stream `key`."""
    bits = _draw(key, element)
    radius = _sqrt(-_TWO * _log((np.float32(bits >> np.uint64(32)) + _HALF) * _TO_UNIT))
    angle = np.float32(bits & _LOW) * _TO_UNIT - _HALF
    return radius * _cos(angle)


@scalar
def dither_key(key, element):
    """Key of dithering for a run of elements from number `element` on."""
    return _mix(_add(_add(key, _DITHER), _multiply(np.uint64(element) >> _WORD, _GAMMA)))


@scalar
def dither_bits(key, element, k):
    """Draw 32 random bits, as uint32, number `k` of element number `element` of a run with `key`.

    The bits are those of a hash of 32-bit numbers, two multiplications of Wellons' "lowbias32",
    with a half of the key before each: for rounding it need not be better, and it must be fast.
    """
    later = np.uint32((key >> _WORD) + np.uint64(k // 2) * _STEP & _LOW)
    bits = _hash(np.uint32(np.uint64(element) & _LOW), np.uint32(key & _LOW), later)
    # Draws in pairs share a hash: the second has its halves exchanged.
    return bits if k % 2 == 0 else np.uint32(np.uint64(bits) * _EXCHANGE >> _HALF_WORD & _LOW)


def _hash(x, before, later):
    x = (int(x) + int(before)) & int(_LOW)
    x ^= x >> _SHIFTS[0]
    x = x * _FACTORS[0] & int(_LOW)
    x ^= x >> _SHIFTS[1]
    x = (x + int(later)) * _FACTORS[1] & int(_LOW)
    return np.uint32(x ^ (x >> _SHIFTS[0]))


@overload(_hash)
def _hash_compiled(x, before, later):
    return lambda x, before, later: _hash_intrinsic(x, before, later)


@intrinsic
def _hash_intrinsic(typingctx, x, before, later):
    """Arithmetic on 32 bits throughout, which numba would do on 64."""

    def codegen(context, builder, signature, args):
        x, before, later = args
        constant = x.type

        def mixed(x, shift):
            return builder.xor(x, builder.lshr(x, constant(_SHIFTS[shift])))

        x = mixed(builder.add(x, before), 0)
        x = mixed(builder.mul(x, constant(_FACTORS[0])), 1)
        x = builder.mul(builder.add(x, later), constant(_FACTORS[1]))
        return mixed(x, 0)

    return types.uint32(types.uint32, types.uint32, types.uint32), codegen


@scalar
def _draw(key, element):
    return _mix(_add(key, _multiply(np.uint64(element), _GAMMA)))


@scalar
def _mix(z):
    z = _multiply(z ^ (z >> np.uint64(30)), _MIX_1)
    z = _multiply(z ^ (z >> np.uint64(27)), _MIX_2)
    return z ^ (z >> np.uint64(31))


@scalar
def _sqrt(x):
    return np.float32(math.sqrt(x))


@scalar
def _log(u):
    """Logarithm of ``0 < u <= 1``: exponent and mantissa, then the series of artanh."""
    bits = _float_bits(u)
    exponent = np.float32(bits >> np.uint32(23)) - np.float32(127)
    mantissa = _bits_float((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F800000))
    if mantissa > _SQRT_2:
        mantissa = mantissa * _HALF
        exponent = exponent + _ONE
    s = (mantissa - _ONE) / (mantissa + _ONE)
    z = s * s
    series = _ONE + z * (_LOG[0] + z * (_LOG[1] + z * (_LOG[2] + z * _LOG[3])))
    return exponent * _LN_2 + _TWO * s * series


@scalar
def _cos(turns):
    """Cosine of an angle of -1/2 to 1/2 turns, by the series of the sine."""
    x = (_QUARTER - abs(turns)) * _TURN
    z = x * x
    tail = _SIN[1] + z * (_SIN[2] + z * (_SIN[3] + z * _SIN[4]))
    return x * (_ONE + z * (_SIN[0] + z * tail))


def _add(a, b):
    return np.uint64((int(a) + int(b)) & _MASK)


def _multiply(a, b):
    return np.uint64((int(a) * int(b)) & _MASK)


@overload(_add)
def _add_wrapping(a, b):
    return lambda a, b: a + b


@overload(_multiply)
def _multiply_wrapping(a, b):
    return lambda a, b: a * b


def _float_bits(x):
    return np.float32(x).view(np.uint32)


def _bits_float(x):
    return np.uint32(x).view(np.float32)


@overload(_float_bits)
def _float_bits_compiled(x):
    return lambda x: _bitcast(x, np.uint32)


@overload(_bits_float)
def _bits_float_compiled(x):
    return lambda x: _bitcast(x, np.float32)


@intrinsic
def _bitcast(typingctx, x, to):
    target = to.dtype

    def codegen(context, builder, signature, args):
        kind = ir.FloatType() if target == types.float32 else ir.IntType(32)
        return builder.bitcast(args[0], kind)

    source = types.float32 if target == types.uint32 else types.uint32
    return target(source, to), codegen
