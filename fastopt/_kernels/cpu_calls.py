"""Small compiled functions that Python calls: addresses, row indices, the norm of a call.

Tests: ``tests/kernels/test_numpy_abi.py``, ``tests/kernels/test_segments.py``.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from fastopt._kernels import numpy_abi, segments
from fastopt._kernels.compiling import compiled
from fastopt.kernels.rule import scalar

RESCALE, SCALE, LIMIT, FACTOR, LENGTH = range(5)
"""Numbers of a measured call: ``rescale_grad``, the other factor of the gradients, the maximum
global norm, the factor after clipping, and the norm before clipping."""


@scalar
def limit_norm(total: Any, norm: Any) -> Any:
    """Write the global norm, from the sum of squares `total`, and the clipping factor."""
    norm[LENGTH] = math.sqrt(total) * abs(norm[RESCALE] * norm[SCALE])
    norm[FACTOR] = norm[SCALE]
    if norm[LENGTH] > norm[LIMIT]:
        norm[FACTOR] = norm[SCALE] * (norm[LIMIT] / norm[LENGTH])


@cache
def addresses() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.addresses`."""
    return compiled(numpy_abi.addresses, None, parallel=False, nogil=False)


@cache
def admit() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.admit`."""
    return compiled(numpy_abi.admit, None, parallel=False, nogil=False)


@cache
def take_addresses() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.take_addresses`."""
    return compiled(numpy_abi.take_addresses, None, parallel=False, nogil=False)


@cache
def survey() -> Callable:
    """Kernel :func:`fastopt._kernels.segments.survey`."""
    return compiled(segments.survey, None, parallel=False)
