"""CPU kernels of the calls of plans: checks of the arguments, and counts.

Tests: ``tests/engine/test_plan.py``, ``tests/engine/test_frames.py``.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fastopt._kernels import numpy_abi, segments
from fastopt._kernels.advance import advance
from fastopt._kernels.compiling import compiled
from fastopt._kernels.context import cube, line, matrix
from fastopt._kernels.numpy_abi import FITS, admit
from fastopt.kernels.rule import scalar

__all__ = [
    "addresses",
    "enter",
    "order_rows",
    "start",
    "survey",
    "take_addresses",
    "take_rows",
]

TABLE, FIELDS, PLACES, GUARDS, WRITTEN, KNOWN, TENSORS, COUNTS, GROUPS, CARRIED = range(10)
"""Arrays of a context, see :mod:`fastopt._kernels.advance` and :mod:`fastopt._kernels.numpy_abi`.
"""

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
def start(
    rescale: int, real: Any, keyed: bool, correct: Any, dtype: Any, carries: bool
) -> Callable:
    """Kernel ``(context, objects)`` that checks the arguments of a call and counts its step.

    If it returns a negative number, nothing has changed. `context` has the arrays
    above; `objects` is the id of the tuple of the call's arguments, kept alive by the
    GIL, or 0 if they have already been checked. `rescale` is the position of ``rescale_grad`` in
    the fields, -1 without it.
    """

    def start(context, objects):
        table = matrix(context, TABLE, np.uint64)
        if objects != 0:
            status = check(context, table, objects)
            if status < 0:
                return status
        advance(table, counted(context, real), correct, dtype, carries, keyed, rescale)
        return FITS

    return compiled(start, None, parallel=False, nogil=False, also=(correct,))


@scalar
def check(context: Any, table: Any, objects: Any) -> Any:
    """Check the arguments of a call and enter its gradients."""
    places, guards = matrix(context, PLACES, np.uint64), cube(context, GUARDS, np.uint64)
    written, known = matrix(context, WRITTEN, np.uint64), line(context, KNOWN, np.uint64)
    length = np.int64(context[len(context) - 1])
    return admit(table, guards, written, places, known, length, objects)


@scalar
def counted(context: Any, real: Any) -> Any:
    """Return the arrays of a context that :func:`~fastopt._kernels.advance.advance` takes."""
    fields, tensors = matrix(context, FIELDS, real), matrix(context, TENSORS, np.int64)
    counts, groups = line(context, COUNTS, np.int64), cube(context, GROUPS, np.float64)
    return fields, tensors, counts, groups, line(context, CARRIED, np.float64)


@cache
def addresses() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.addresses`."""
    return compiled(numpy_abi.addresses, None, parallel=False, nogil=False)


@cache
def enter() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.enter`."""
    return compiled(numpy_abi.enter, None, parallel=False, nogil=False)


@cache
def take_addresses() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.take_addresses`."""
    return compiled(numpy_abi.take_addresses, None, parallel=False, nogil=False)


@cache
def take_rows() -> Callable:
    """Kernel :func:`fastopt._kernels.numpy_abi.take_rows`."""
    return compiled(numpy_abi.take_rows, None, parallel=False, nogil=False)


@cache
def survey() -> Callable:
    """Kernel :func:`fastopt._kernels.segments.survey`."""
    return compiled(segments.survey, None, parallel=False)


@cache
def order_rows() -> Callable:
    """Kernel :func:`fastopt._kernels.segments.order_rows`."""
    return compiled(segments.order_rows, None, parallel=False)
