"""Noise: standard normal, independent of threads and calls, a function of key and counter."""

import math

import numpy as np
import pytest
from numba import njit

from fastopt import optimizer
from fastopt._kernels import noise


def draw(size=200_000, steps=1, index=0, **kwargs):
    """Noise of SGLD steps on a weight of zeros with rate 1."""
    updater = optimizer.get_updater(optimizer.SGLD(learning_rate=1.0, **kwargs))
    drawn = []
    for _ in range(steps):
        weight = np.zeros(size, np.float32)
        updater(index, np.zeros(size, np.float32), weight)
        drawn.append(weight.astype(np.float64))
    return np.array(drawn)


@pytest.fixture(scope="module")
def sample():
    return draw(steps=5)


def test_the_distribution_is_normal_into_the_tails(sample):
    """Kolmogorov and Smirnov's distance, and counts beyond 3 and 4 standard deviations."""
    ordered = np.sort(sample.ravel())
    cdf = 0.5 * np.array([1 + math.erf(x / math.sqrt(2)) for x in ordered])
    distance = np.abs(cdf - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance * math.sqrt(ordered.size) < 2
    for limit in (3, 4):
        expected = ordered.size * math.erfc(limit / math.sqrt(2))
        assert abs((abs(ordered) > limit).sum() - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 16, 64, 256, 1000, 32_768, 65_536])
def test_elements_and_their_squares_are_uncorrelated(sample, lag):
    for row in sample:
        for numbers in (row, (row**2 - 1) / math.sqrt(2)):
            bound = 5 / math.sqrt(row.size - lag)
            assert abs((numbers[lag:] * numbers[:-lag]).mean()) < bound


def test_steps_seeds_and_indices_are_uncorrelated(sample):
    others = [draw(seed=1), draw(index=1), draw(index="fc"), draw(index=-1), draw(seed=1 << 40)]
    rows = np.concatenate([sample, *others])
    for numbers in (rows, rows**2):
        correlation = np.corrcoef(numbers) - np.eye(len(rows))
        assert abs(correlation).max() < 5 / math.sqrt(sample.shape[1])


def test_numbers_depend_on_seed_index_step_and_position_alone():
    """The default seed is 0, and a text is keyed by its CRC-32."""
    np.testing.assert_array_equal(draw(1000, 2), draw(1000, 2, seed=0))
    np.testing.assert_array_equal(draw(100_000)[0, :50], draw(50)[0])
    np.testing.assert_array_equal(draw(10, index="fc_weight"), draw(10, index=0xF4862664))


def test_a_number_depends_on_its_element_wherever_the_run_starts():
    """Also where the upper half of the element's number changes."""

    @njit
    def drawn(key, first, count):
        start = run(key, first)
        return [normal(start, i) for i in range(count)]

    run, normal = noise.run, noise.normal
    key, boundary = np.uint64(noise.key(3, 4, 5)), 1 << 32
    numbers = drawn(key, boundary - 20, 40)
    for first in (boundary - 1, boundary, boundary + 3):
        assert drawn(key, first, boundary + 20 - first) == numbers[first - boundary + 20 :]
    assert drawn(key, 0, 20) != numbers[20:]


def test_logarithm_and_sine_are_accurate():
    v = np.float32(2.0) ** np.arange(-1, 32, dtype=np.float32)
    v = np.concatenate([v, np.linspace(1 << 21, 1 << 31, 500, dtype=np.float32)])
    expected = -2 * np.log(v.astype(float) / 2**31)
    log, sin = noise._minus_2_log, noise._sin
    minus_2_log, sine = njit(lambda x: log(x)), njit(lambda x: sin(x))
    calculated = np.array([minus_2_log(x) for x in v])
    np.testing.assert_allclose(calculated, expected, rtol=2e-7, atol=1e-6)
    assert (calculated >= 0).all()
    turns = np.linspace(-0.25, 0.25, 501, dtype=np.float32)
    expected = np.sin(2 * np.pi * turns.astype(float))
    np.testing.assert_allclose([sine(x) for x in turns], expected, atol=1e-6)
