"""Overlaps of ranges of memory agree with NumPy's test of each pair."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fastopt._engine.overlap import Ranges, bounds

memory = np.zeros(64, np.uint8)
slices = st.tuples(st.integers(0, 60), st.integers(0, 8), st.sampled_from([1, 2, -1]))


def views(cuts):
    """Views of one array, of any of its bytes, empty ones too."""
    return [memory[start : start + size][::step] for start, size, step in cuts]


def meets(one, other):
    """Whether the two have a byte between their bounds in common."""
    (first, last), (begin, end) = ([int(ends[0]) for ends in bounds([a])] for a in (one, other))
    return first < end and begin < last


@given(cuts=st.lists(slices, max_size=8))
@example(cuts=[(0, 8, 1), (2, 1, 1), (5, 2, 1)])
def test_overlapping_ranges_are_found_if_there_are_any(cuts):
    arrays = [array for array in views(cuts) if array.size]
    pairs = Ranges(*bounds(arrays)).overlapping()
    expected = any(meets(one, other) for k, one in enumerate(arrays) for other in arrays[k + 1 :])
    assert bool(pairs) == expected
    assert all(meets(arrays[one], arrays[other]) for one, other in pairs)
    for k, one in enumerate(arrays[1:], 1):
        expected = any(meets(one, other) for other in arrays[:k])
        assert Ranges(*bounds(arrays[:k])).meets(*bounds([one])) == expected


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), cuts=st.lists(slices, max_size=6))
def test_ranges_that_meet_own_ones_are_found(sizes, cuts):
    starts = np.cumsum([0, *sizes])[:-1]
    own = [memory[start : start + size - 1] for start, size in zip(starts, sizes, strict=True)]
    own = [array for array in own if array.size]
    others = [array for array in views(cuts) if array.size]
    found = dict(Ranges(*bounds(own)).meeting(*bounds(others))) if own else {}
    for k, other in enumerate(others):
        expected = [place for place, array in enumerate(own) if meets(array, other)]
        assert (k in found) == bool(expected)
        assert k not in found or found[k] == expected[0]
