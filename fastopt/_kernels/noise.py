"""Counter-based random numbers: any thread can draw any of them from a key and a counter.

Keys are computed with SplitMix64's mixing function (Steele, Lea and Flood, 2014, "Fast splittable
pseudorandom number generators"). The bits of an element are a 32-bit hash, since 64-bit
multiplications do not vectorize on every processor. Multipliers and shifts are from Wellons'
"lowbias32" and "triple32" (https://github.com/skeeto/hash-prospector); one half of the key is added
before each of two multiplications. Normal numbers use the transform of Box and Muller (1958), with
logarithm and cosine as short polynomials in float32, which vectorize, unlike library calls.
"""

import math
import zlib

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from fastopt._kernels.intrinsics import intrinsic
from fastopt.kernels.rule import scalar

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW = np.uint64(0xFFFFFFFF)
_DITHER = np.uint64(0x6A09E667F3BCC909)
"""Separates the streams of stochastic rounding from those of normal numbers."""
_WORD, _HALF_WORD, _EXCHANGE = np.uint64(32), np.uint64(16), np.uint64((1 << 32) + 1)
_SHIFTS, _FACTORS, _STEP = (16, 15), (0x7FEB352D, 0x846CA68B), np.uint64(0x9E3779B9)
_LONG_SHIFTS, _LONG_FACTORS = (17, 11, 15), (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_HALF, _ONE = np.float32(0.5), np.float32(1)
_TO_QUARTER = np.float32(2.0**-33)
_ROOT = np.uint32(0x3F3504F3)
"""Bits of ``sqrt(1/2)`` as float32."""
_ROOT_SCALED = np.uint32(0x3F3504F3 + (31 << 23))
_MANTISSA, _EXPONENT = np.uint32(0x007FFFFF), 23
_MINUS_2_LN_2 = np.float32(-2 * math.log(2))
_LOG = tuple(
    np.float32(c)
    for c in (
        -2.0000057220458984,
        1.0000381469726562,
        -0.6660963892936707,
        0.49766111373901367,
        -0.4117864668369293,
        0.3777533769607544,
        -0.2371644824743271,
    )
)
"""Polynomial for ``-2 log(1 + x) / x``, 1 + x from sqrt(1/2) to sqrt(2), with error 5e-7 / x."""
_SIN = tuple(
    np.float32(c)
    for c in (6.2831645011901855, -41.33716583251953, 81.34140014648438, -70.99877166748047)
)
"""Polynomial in ``x**2`` for ``sin(2 pi x) / x`` up to x = 1/4, with error 6e-7 / x."""


def key(seed: int, index: int, step: int) -> int:
    """Return the key of the random stream of one update: a 64-bit hash of three integers."""
    hashed = 0
    for part in (seed, index, step):
        hashed = int(mix(np.uint64((hashed + part + int(_GAMMA)) & _MASK)))
    return hashed


def index_number(index: int | str) -> int:
    """Return the 64-bit integer that represents an index."""
    number = (
        zlib.crc32(index.encode(errors="surrogatepass")) if isinstance(index, str) else int(index)
    )
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


@scalar
def stream_key(seed, index, step):
    """Compiled form of :func:`key`, for 64-bit integers."""
    hashed = np.uint64(0)
    for part in (seed, index, step):
        hashed = mix(hashed + np.uint64(part) + _GAMMA)
    return hashed


@scalar
def run(key, element):
    """Return the run that :func:`normal` draws from, starting at `element` of stream `key`.

    A run is the number to add to a position in it, the last position with the same upper 32 bits of
    the element number, and the number that these bits add to the hash.
    """
    low, high = np.uint64(element) & _LOW, np.uint64(element) >> _WORD
    later = (key >> _WORD) + high * _STEP
    return np.uint32((low + key) & _LOW), np.uint32(_LOW - low), np.uint32(later & _LOW)


@scalar
def normal(run, i):
    """Draw a standard normal number, as float32, for element `i` of a :func:`run`.

    It depends only on the key and the element's number, not on the start of the run. `i` must be
    below 2**32.
    """
    start, last, later = run
    bits, turns = _hash_pair(np.uint32(np.uint64(i) & _LOW), start, last, later)
    # Only conversions of signed integers vectorize on every processor.
    square = _minus_2_log(_signed(np.uint32(bits >> np.uint32(1))) + _HALF)
    # The sine over a half turn has the same distribution as the cosine over a whole turn.
    return np.float32(math.sqrt(square)) * _sin(_signed(turns) * _TO_QUARTER)


@scalar
def dither_run(key, element):
    """Return the run that :func:`dither_bits` draws from, starting at `element` of stream `key`.

    A run is the lower 32 bits of the element number and a key.
    """
    first, high = np.uint64(element) & _LOW, np.uint64(element) >> _WORD
    return np.uint32(first), mix(key + _DITHER + high * _GAMMA)


@scalar
def dither_bits(run, i, k):
    """Draw 32 random bits, as uint32: draw `k` of element `i` of a :func:`dither_run`.

    The bits are a 32-bit hash, the two multiplications of Wellons' "lowbias32" with one half of the
    key added before each: good enough for rounding, and fast. They depend only on the key and the
    element's number, not on the start of the run. `i` must be below 2**32.
    """
    first, key = run
    later = np.uint32((key >> _WORD) + np.uint64(k // 2) * _STEP & _LOW)
    start = np.uint32((np.uint64(first) + key) & _LOW)
    # Elements are counted in 32 bits: a counter of 64 bits would need vectors twice as long.
    bits = _hash(np.uint32(np.uint64(i) & _LOW), start, later)
    # Two draws share a hash; the second one has its halves swapped.
    return bits if k % 2 == 0 else np.uint32(np.uint64(bits) * _EXCHANGE >> _HALF_WORD & _LOW)


@intrinsic
def _hash(typingctx, x, before, later):
    """Use 32-bit arithmetic throughout; numba would use 64 bits."""

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


@intrinsic
def _hash_pair(typingctx, i, start, last, later):
    """Return two 32-bit hashes of ``start + i`` and `later`, which advances when ``i > last``."""
    pair = types.UniTuple(types.uint32, 2)

    def codegen(context, builder, signature, args):
        i, start, last, later = args
        constant = i.type
        first, second, third = _LONG_SHIFTS

        def mixed(x, shift):
            return builder.xor(x, builder.lshr(x, constant(shift)))

        stepped = builder.add(later, constant(int(_STEP)))
        later = builder.select(builder.icmp_unsigned(">", i, last), stepped, later)
        x = mixed(builder.add(start, i), first)
        x = mixed(builder.mul(x, constant(_LONG_FACTORS[0])), second)
        x = mixed(builder.mul(builder.add(x, later), constant(_LONG_FACTORS[1])), third)
        one = builder.mul(x, constant(_LONG_FACTORS[2]))
        other = builder.mul(mixed(x, _SHIFTS[0]), constant(_FACTORS[0]))
        return context.make_tuple(builder, pair, [one, other])

    return pair(types.uint32, types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def _signed(typingctx, x):
    """Return the bits of `x`, read as a signed integer, as float32."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@scalar
def mix(z):
    """Return a bijective hash of 64 bits."""
    z = _multiply(z ^ (z >> np.uint64(30)), _MIX_1)
    z = _multiply(z ^ (z >> np.uint64(27)), _MIX_2)
    return z ^ (z >> np.uint64(31))


@scalar
def _minus_2_log(v):
    """Return ``-2 log(v / 2**31)``, which is nonnegative for v up to 2**31."""
    bits = np.uint32(_float_bits(v) - _ROOT_SCALED)
    x = _bits_float(np.uint32((bits & _MANTISSA) + _ROOT)) - _ONE
    tail = _LOG[3] + x * (_LOG[4] + x * (_LOG[5] + x * _LOG[6]))
    series = x * (_LOG[0] + x * (_LOG[1] + x * (_LOG[2] + x * tail)))
    return _exponent(bits) * _MINUS_2_LN_2 + series


@scalar
def _sin(turns):
    """Return the sine of an angle of -1/4 to 1/4 turns."""
    z = turns * turns
    return turns * (_SIN[0] + z * (_SIN[1] + z * (_SIN[2] + z * _SIN[3])))


@intrinsic
def _exponent(typingctx, bits):
    """Return the upper 9 of 32 bits, read as a signed integer, as float32."""

    def codegen(context, builder, signature, args):
        shifted = builder.ashr(args[0], args[0].type(_EXPONENT))
        return builder.sitofp(shifted, ir.FloatType())

    return types.float32(types.uint32), codegen


def _multiply(a, b):
    """Return the product of 64-bit numbers, with wraparound."""
    return np.uint64((int(a) * int(b)) & _MASK)


@overload(_multiply)
def _multiply_wrapping(a, b):
    return lambda a, b: a * b


@scalar
def _float_bits(x):
    """Return the bits of a float32."""
    return _bitcast(x, np.uint32)


@scalar
def _bits_float(x):
    """Return the float32 of bits."""
    return _bitcast(x, np.float32)


@intrinsic
def _bitcast(typingctx, x, to):
    target = to.dtype

    def codegen(context, builder, signature, args):
        kind = ir.FloatType() if target == types.float32 else ir.IntType(32)
        return builder.bitcast(args[0], kind)

    source = types.float32 if target == types.uint32 else types.uint32
    return target(source, to), codegen
