"""Small compiled functions that Python calls: addresses, and the norm of a call.

Tests: ``tests/kernels/test_numpy_abi.py``, ``tests/engine/test_slow_calls.py``.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from fastopt._kernels.admission import has_form
from fastopt._kernels.compiling import compiled
from fastopt._kernels.objects import words
from fastopt._kernels.record_words import guard_at, header_at
from fastopt.kernels.rule import scalar

RESCALE, SCALE, LIMIT, FACTOR, LENGTH = range(5)
"""Numbers of a measured call: ``rescale_grad``, the other factor of the gradients, the maximum
global norm, the factor after clipping, and the norm before clipping."""


@scalar
def limit_norm(total: float, norm: np.ndarray | list[float]) -> None:
    """Write the global norm, from the sum of squares `total`, and the clipping factor."""
    norm[LENGTH] = math.sqrt(total) * abs(norm[RESCALE] * norm[SCALE])
    norm[FACTOR] = norm[SCALE]
    if norm[LENGTH] > norm[LIMIT]:
        norm[FACTOR] = norm[SCALE] * (norm[LIMIT] / norm[LENGTH])


@cache
def addresses() -> Callable:
    """Kernel ``(objects, out)``: writes the data addresses of the arrays in an object array."""

    def addresses(objects, out):
        arrays = words(objects)
        for k in range(len(out)):
            out[k] = header_at(arrays[k]).data

    return compiled(addresses, None, parallel=False, nogil=False)


@cache
def fit() -> Callable:
    """Kernel ``(weights, grads, guards, out)``: like :func:`addresses` of two lists.

    It returns whether all arrays have the forms in guards. The caller keeps the lists, of equal
    lengths, and holds the GIL.
    """

    def fit(weights, grads, guards, out):
        place = np.int64(guards.ctypes.data)
        for role in range(2):
            arrays = words(header_at(grads if role else weights).items)
            for k in range(out.shape[1]):
                array = header_at(arrays[k])
                if not has_form(array, guard_at(place)):
                    return False
                out[role, k] = array.data
                place += 8 * guards.shape[2]
        return True

    return compiled(fit, None, parallel=False, nogil=False)
