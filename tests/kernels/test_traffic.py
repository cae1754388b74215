"""The limit loops: they move memory and change nothing, compiled and in plain Python."""

import numpy as np
import pytest

from fastopt._kernels import traffic
from fastopt._kernels.chunks import CHUNK, PARALLEL_FROM


def filled(size, rng):
    """A weight, a gradient, a state like the weight, and one with a number for two elements."""
    return tuple(rng.normal(size=n).astype(np.float32) for n in (size, size, size, size // 2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1000, PARALLEL_FROM])
def test_a_compiled_loop_changes_nothing(size, rng):
    arrays = filled(size, rng)
    before = [array.copy() for array in arrays]
    traffic.write(arrays)
    traffic.read(arrays[:3])
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_writing_and_reading_are_of_every_element(rng):
    """The gradient is read alone; of all others it is subtracted, times a factor."""
    arrays = filled(CHUNK + 2, rng)
    before = [array.copy() for array in arrays]
    totals = traffic.read_all(arrays[:3])
    assert len(totals) == 2
    expected = sum(array.astype(np.float64).sum() for array in arrays[:3])
    assert totals.sum() == pytest.approx(expected, abs=0.1)
    for factor in (0, 1):
        traffic.write_all(arrays, np.float32(factor))
        np.testing.assert_array_equal(arrays[0], before[0] - factor * before[1])
        np.testing.assert_array_equal(arrays[1], before[1])
        np.testing.assert_array_equal(arrays[3], before[3] - factor)
