"""CUDA kernel that begins a step on the device: the norm, update counts and hyper-parameters.

The host does not wait for the norm: whether the step is skipped, its update counts and what depends
on them stay on the device, for the kernels that follow.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from fastopt._kernels.advance import advance_one
from fastopt._kernels.cpu_calls import FACTOR, LENGTH, limit_norm
from fastopt._kernels.cuda import THREADS, compiled
from fastopt._kernels.layout import DONE

SHARE, NORM_NUMBERS = 5, 6
"""Number after those of :func:`~fastopt._kernels.cpu_calls.limit_norm`: a further factor of the
gradients, which is not part of the norm; and their count."""


@cache
def begin(keyed: bool, rescale: int, correct: Any, dtype: Any) -> Callable:
    """Kernel ``(table, sums, order, norm, fields, slots, counts, groups, carried, measured)``.

    One block computes the norm from `sums`, which are added in the order ``sums[order[0]]``,
    ``sums[order[1]]``, ..., if `measured` is not 0. If it is finite, the step is counted and its
    hyper-parameters are written to `fields`; else the rows of the table are marked as skipped. See
    :func:`~fastopt._kernels.advance.advance_one` for the arrays and the other arguments.
    """

    def begin(table, sums, order, norm, fields, slots, counts, groups, carried, measured):
        parts = cuda.shared.array(THREADS, np.float64)
        t = np.int64(cuda.threadIdx.x)
        if measured:
            total = 0.0
            for first in range(0, len(order), THREADS):
                if first + t < len(order):
                    parts[t] = sums[order[first + t], 0]
                cuda.syncthreads()
                if t == 0:
                    count: Any = min(np.int64(THREADS), len(order) - first)
                    for k in range(count):
                        total += parts[k]
                cuda.syncthreads()
            if t == 0:
                limit_norm(total, norm)
            cuda.syncthreads()
        skipped, factor = not math.isfinite(norm[LENGTH]), norm[FACTOR] * norm[SHARE]
        for k in range(t, len(slots), THREADS):
            table[k, DONE] = np.uint64(skipped)
            if not skipped:
                arrays = fields, slots, counts, groups, carried
                advance_one(table, arrays, k, factor, correct, dtype, keyed, rescale)

    return compiled(begin, None)
