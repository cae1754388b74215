"""Noise: standard normal, independent of threads and calls, a function of key and counter."""

import math

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.kernels import noise


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


def test_moments_are_those_of_the_standard_normal(sample):
    n = sample.size
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((sample**power).mean() - expected) < 5 * math.sqrt(variance / n)


def test_the_distribution_is_normal_into_the_tails(sample):
    """Kolmogorov and Smirnov's distance, and counts beyond 3 and 4 standard deviations."""
    ordered = np.sort(sample.ravel())
    cdf = 0.5 * np.array([1 + math.erf(x / math.sqrt(2)) for x in ordered])
    distance = np.abs(cdf - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance * math.sqrt(ordered.size) < 2
    for limit in (3, 4):
        expected = ordered.size * math.erfc(limit / math.sqrt(2))
        assert abs((abs(ordered) > limit).sum() - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 16, 64, 256, 1000])
def test_elements_are_uncorrelated(sample, lag):
    for row in sample:
        assert abs((row[lag:] * row[:-lag]).mean()) < 5 / math.sqrt(row.size - lag)


def test_steps_seeds_and_indices_are_uncorrelated(sample):
    rows = [*sample, draw(seed=1)[0], draw(index=1)[0], draw(index="fc")[0], draw(index=-1)[0]]
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert abs(correlation).max() < 5 / math.sqrt(sample.shape[1])


def test_the_default_seed_is_zero_and_equal_calls_are_equal():
    np.testing.assert_array_equal(draw(1000, 2), draw(1000, 2, seed=0))
    assert not np.array_equal(draw(1000), draw(1000, seed=1))


def test_an_element_depends_on_its_position_alone():
    np.testing.assert_array_equal(draw(100_000)[0, :50], draw(50)[0])


def test_a_text_index_is_keyed_by_its_crc32():
    np.testing.assert_array_equal(draw(10, index="fc_weight"), draw(10, index=0xF4862664))


def test_compiled_and_plain_functions_agree():
    key = noise.key(3, 4, 5)
    weight = np.zeros(100, np.float32)
    made = optimizer.SGLD(learning_rate=1.0, seed=3)
    made._index_update_count[4] = 4
    made.update(4, weight, np.zeros(100, np.float32), None)
    plain = [noise.normal(np.uint64(key), i) for i in range(100)]
    np.testing.assert_allclose(weight, plain, rtol=1e-5, atol=1e-6)


def test_logarithm_and_cosine_are_accurate():
    u = np.float32(2.0) ** -np.arange(0, 33, dtype=np.float32)
    u = np.concatenate([u, np.linspace(1e-3, 1, 500, dtype=np.float32)])
    np.testing.assert_allclose([noise._log(x) for x in u], np.log(u.astype(float)), atol=2e-6)
    turns = np.linspace(-0.5, 0.5, 501, dtype=np.float32)
    expected = np.cos(2 * np.pi * turns.astype(float))
    np.testing.assert_allclose([noise._cos(x) for x in turns], expected, atol=1e-6)
