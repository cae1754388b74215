"""No test on a device is left to the exhaustive ones."""

import numpy as np
import pytest


@pytest.fixture(params=["float16", "bfloat16"])
def half(request):
    """The dtypes of half precision in turn."""
    if request.param == "bfloat16":
        return request.getfixturevalue("bfloat16")
    return np.dtype(request.param)
