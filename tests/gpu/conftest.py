"""Settings for numba's simulator; no test is left to the exhaustive ones."""

import sys

import numpy as np
import pytest
from numba import config

if config.ENABLE_CUDASIM:
    from numba.cuda.simulator import kernelapi

    def shared_array(self, shape, dtype):
        """Return one array to all threads that call from the same line, even at the same time.

        The simulator's own function looks it up and then stores it, so that a thread that is
        interrupted in between keeps an array of its own, and the others never see what it writes.
        """
        caller = sys._getframe(1)
        place = caller.f_code.co_filename, caller.f_lineno
        return self._allocations.setdefault(place, np.empty(shape, dtype))

    kernelapi.FakeCUDAShared.array = shared_array

    # More often than by default: each thread waits in a loop for the others.
    sys.setswitchinterval(1e-4)


@pytest.fixture(params=["float16", "bfloat16"])
def half(request):
    """The dtypes of half precision in turn: here none is left to the exhaustive tests."""
    if request.param == "bfloat16":
        return request.getfixturevalue("bfloat16")
    return np.dtype(request.param)
