"""The simulator's threads take turns more often, and no test is left to the exhaustive ones."""

import sys

import numpy as np
import pytest

# More often than by default: each waits in a loop for the others.
sys.setswitchinterval(1e-4)


@pytest.fixture(params=["float16", "bfloat16"])
def half(request):
    """The dtypes of half precision in turn: here none is left to the exhaustive tests."""
    if request.param == "bfloat16":
        return request.getfixturevalue("bfloat16")
    return np.dtype(request.param)
