"""Conversions of half precision: exact up, correctly rounded down, whatever the processor."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import njit

from fastopt._kernels import half

BITS = np.arange(1 << 16, dtype=np.uint16)
SIGN = np.uint16(0x8000)
MANY = 10_000_000


@dataclass(frozen=True)
class Format:
    name: str
    mantissa: int
    drop: int
    widen: Any
    narrow: Any
    dither: Any

    @property
    def dtype(self):
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), self.name, self.name))

    @property
    def infinity(self):
        return ((1 << (15 - self.mantissa)) - 1) << self.mantissa

    @cache  # noqa: B019 - there are three
    def values(self):
        """Numbers from zero up as float64, and the one that infinity stands in the place of."""
        numbers = BITS[: self.infinity].view(self.dtype).astype(float)
        return np.append(numbers, 2 * numbers[-1] - numbers[-2])

    def nearest(self, x):
        """Bits of the nearest number, the even one of two, as NumPy and ml_dtypes round."""
        with np.errstate(over="ignore"):
            return x.astype(self.dtype).view(np.uint16)

    def is_nan(self, bits):
        return (bits & ~SIGN) > self.infinity

    def ties(self):
        """Middles of neighbours, and the float32 next to them on both sides."""
        values = self.values()
        middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
        around = [np.nextafter(middle, np.float32(to)) for to in (0, np.inf)]
        positive = np.concatenate([middle, *around, values[:-1].astype(np.float32)])
        return np.concatenate([positive, -positive])


FLOAT16, BFLOAT16 = (
    Format(name, *of, *(getattr(half, f"{act}_{name}") for act in ("widen", "narrow", "dither")))
    for name, of in (("float16", (10, 13)), ("bfloat16", (7, 16)))
)
INTEGERS = replace(FLOAT16, widen=half._widen_by_integers, narrow=half._narrow_by_integers)
BOTH = pytest.mark.parametrize("format", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
ALL = pytest.mark.parametrize(
    "format", [BFLOAT16, FLOAT16, INTEGERS], ids=["bfloat16", "float16", "float16-by-integers"]
)


@cache
def loop(fn):
    """Compiled loop of `fn` over arrays, the last of which takes the result."""

    def one(x, out):
        for i in range(x.size):
            out[i] = fn(x[i])

    def two(x, y, out):
        for i in range(x.size):
            out[i] = fn(x[i], y[i])

    pair = fn.__code__.co_argcount == 2
    return njit(two if pair else one, error_model="numpy")


def convert(fn, *arrays):
    out = np.empty(arrays[0].size, np.uint16 if arrays[0].dtype == np.float32 else np.float32)
    loop(fn)(*arrays, out)
    return out


@njit(error_model="numpy")
def split(x, high, low):
    for i in range(x.size):
        high[i], low[i] = half.split_float32(x[i])


def parts(x):
    high, low = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    split(x, high, low)
    return high, low


@pytest.fixture(scope="module")
def patterns():
    """Float32 of random bits: every exponent, signaling NaN, subnormal numbers."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 1 << 32, MANY, dtype=np.uint32).view(np.float32)


def specials():
    bits = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF]
    positive = np.array(bits, np.uint32)
    return np.concatenate([positive, positive | np.uint32(1 << 31)]).view(np.float32)


def assert_rounded(format, x):
    """Numbers are rounded to the nearest, and what is not a number stays none."""
    got, missing = convert(format.narrow, x), np.isnan(x)
    np.testing.assert_array_equal(format.is_nan(got), missing)
    np.testing.assert_array_equal(got[~missing], format.nearest(x[~missing]))
    np.testing.assert_array_equal(got[missing] & SIGN != 0, np.signbit(x[missing]))


@pytest.mark.slow
@ALL
def test_every_half_is_widened_exactly(format):
    got = convert(format.widen, BITS)
    np.testing.assert_array_equal(np.signbit(got), BITS >= SIGN)
    np.testing.assert_array_equal(got, BITS.view(format.dtype).astype(np.float32))


@pytest.mark.slow
@ALL
def test_numbers_are_rounded_to_nearest_even(format, patterns):
    for x in (patterns[: MANY // 5], format.ties(), specials()):
        assert_rounded(format, x)


def test_a_split_number_is_joined_to_the_same_bits(patterns):
    for x in (patterns, BFLOAT16.ties(), FLOAT16.ties(), specials()):
        joined, missing = convert(half.join_float32, *parts(x)), np.isnan(x)
        np.testing.assert_array_equal(np.isnan(joined), missing)
        different = joined.view(np.uint32) != x.view(np.uint32)
        assert not different[~missing].any()


def test_the_upper_part_is_the_nearest_bfloat16_and_of_two_the_one_away_from_zero(patterns):
    for x in (patterns, BFLOAT16.ties(), specials()):
        (high, low), missing = parts(x), np.isnan(x)
        np.testing.assert_array_equal(BFLOAT16.is_nan(high), missing)
        tie = ~missing & (low == 0x8000)
        nearest = convert(half.narrow_bfloat16, x)
        np.testing.assert_array_equal(high[~missing & ~tie], nearest[~missing & ~tie])
        toward_zero = x.view(np.uint32)[tie] >> np.uint32(16)
        np.testing.assert_array_equal(high[tie], toward_zero + 1)


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
@example(0, 0xFFFF)
@example(0x8000, 0x8000)
def test_a_changed_upper_part_is_kept_by_the_joined_number(high, low):
    (joined,) = convert(half.join_float32, np.array([high], np.uint16), np.array([low], np.uint16))
    magnitude = high & 0x7FFF
    if magnitude == 0:
        assert abs(joined) < 1e-40
    elif magnitude < BFLOAT16.infinity:
        assert [part.item() for part in parts(np.array([joined]))] == [high, low]


def away(format, x, draws):
    """Whether `x` is rounded away from zero, for each draw; or to zero, or not to a neighbour."""
    values = format.values()
    below = np.searchsorted(values, abs(float(x)), "right") - 1
    got = convert(format.dither, np.full(draws.size, x), draws)
    assert ((got >= SIGN) == np.signbit(x)).all()
    step = (got & ~SIGN).astype(int) - below
    assert set(step) <= {0, 1}
    return step == 1


@pytest.mark.slow
@BOTH
@given(data=st.data())
def test_the_probability_of_rounding_away_is_the_part_that_is_cut_off(format, data):
    """All values of the bits that decide, each once: their mean is the expectation."""
    values = format.values()
    least, last, largest = values[[1 << format.mantissa, -3, -2]].tolist()
    least = 0.0 if format is BFLOAT16 else least
    size = data.draw(st.floats(least, largest, width=32) | st.floats(last, largest, width=32))
    x = np.float32(data.draw(st.sampled_from([-1, 1])) * size)
    draws = np.arange(1 << format.drop, dtype=np.uint32)
    below = np.searchsorted(values, size, "right") - 1
    part = (size - values[below]) / (values[below + 1] - values[below])
    assert away(format, x, draws).mean() == part
    upper = np.uint32(data.draw(st.integers(0, 0xFFFF)) << format.drop & 0xFFFFFFFF)
    np.testing.assert_array_equal(away(format, x, draws), away(format, x, draws | upper))


@pytest.mark.slow
def test_the_probability_is_exact_to_21_bits_below_the_normal_numbers():
    draws = np.arange(1 << 21, dtype=np.uint32)
    rng = np.random.default_rng(0)
    for x in np.float32(2.0 ** rng.uniform(-50, -14, 6)):
        units = float(x) * 2.0**24
        assert away(FLOAT16, -x, draws).mean() == np.floor(units % 1 * 2**21) / 2**21


@BOTH
def test_random_rounding_never_makes_a_number_infinite_that_nearest_rounding_does_not(format, rng):
    largest = np.float32(format.values()[-2])
    bits = largest.view(np.uint32)
    around = np.arange(bits - 2**17, min(bits + 2**17, 0x7F800000), 5, dtype=np.uint32)
    x = around.view(np.float32)
    draws = rng.integers(0, 1 << 32, x.size, dtype=np.uint32)
    got = convert(format.dither, x, draws)
    assert (got[x <= largest] < format.infinity).all()
    np.testing.assert_array_equal(got[x > largest], format.nearest(x[x > largest]))
    got = convert(format.dither, specials(), draws[: specials().size])
    np.testing.assert_array_equal(format.is_nan(got), np.isnan(specials()))


@pytest.mark.parametrize(
    "fn",
    [
        *(half.widen_float16, half._widen_by_integers, half.widen_bfloat16),
        *(half.narrow_float16, half._narrow_by_integers, half.narrow_bfloat16),
        *(half.dither_float16, half.dither_bfloat16, half.join_float32),
    ],
    ids=lambda fn: fn.__name__,
)
def test_loops_are_vectorized_in_32_bits(fn):
    llvm = code(fn)[0]
    assert re.search(r"<\d+ x (i32|float)>", llvm)
    assert not re.search(r"<\d+ x (i64|double)>", llvm)


def code(fn):
    """LLVM's and the processor's code of the loop of `fn`."""
    bits, x = BITS[:1].copy(), np.ones(1, np.float32)
    if fn is half.join_float32:
        convert(fn, bits, bits)
    elif "widen" in fn.__name__:
        convert(fn, bits)
    else:
        convert(fn, *(x, bits.astype(np.uint32))[: fn.__code__.co_argcount])
    compiled = loop(fn)
    (signature,) = compiled.signatures
    return compiled.inspect_llvm(signature), compiled.inspect_asm(signature)


def test_the_processors_instructions_are_used_where_kernels_may_have_them():
    for fn in (half.narrow_float16, half.widen_float16):
        assert bool(re.search("vcvt(ps2ph|ph2ps)", code(fn)[1])) == half._f16c()


def unknown():
    raise RuntimeError("no features known")


INSTRUCTIONS = [
    (True, lambda: {"f16c": True}, None, 1),
    (False, lambda: {"f16c": False}, None, 1),
    (False, lambda: {"f16c": True}, None, 0),
    (False, lambda: {"f16c": True}, "", 1),
    (True, lambda: {"f16c": True}, "+avx2,+f16c", 1),
    (False, lambda: {"f16c": True}, "+avx2,-f16c", 1),
    (False, lambda: {"f16c": True}, "+f16c,-avx", 1),
    (False, lambda: {"f16c": False}, "+f16c", 1),
    (False, unknown, None, 1),
]
"""Whether kernels may have them, what the processor has, and numba's settings."""


@pytest.mark.parametrize(("expected", "host", "features", "avx"), INSTRUCTIONS)
def test_instructions_that_numba_is_set_to_avoid_are_avoided(
    monkeypatch, expected, host, features, avx
):
    monkeypatch.setattr(half.binding, "get_host_cpu_features", host)
    monkeypatch.setattr(half.config, "CPU_FEATURES", features)
    monkeypatch.setattr(half.config, "ENABLE_AVX", avx)
    assert half._f16c.__wrapped__() is expected
