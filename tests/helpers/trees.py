"""Equality of trees of states."""

import numpy as np


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert got.flags.writeable
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected
