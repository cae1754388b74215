"""Kernel for adaptive gradient clipping, which limits unit-wise gradient norms.

Tests: ``tests/engine/test_clip_adaptive.py``.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import prange

from fastopt._kernels.compiling import bind, compiled
from fastopt._kernels.lanes import BLOCK, DOWN, LANES, PART, add_squares, scratch, total
from fastopt._kernels.storage import load, locate, store
from fastopt.kernels.rule import scalar

TINY = 1e-6
"""Lower bound of a gradient norm in a division."""

WEIGHT, GRAD, OUT = range(3)
"""Columns of the table of addresses."""


def unit_loop(weight: type, grad: type, real: type) -> Callable:
    """Return ``(table, unit, width, factor, limit, least)`` for arrays of these types.

    For a unit of `width` consecutive elements, it computes
    ``out = grad * min(1, limit * max(|w|, least) / max(|factor * grad|, TINY))``, with norms that
    are summed in an order that depends only on `width`. Norms may be larger than the root of the
    largest number.
    """
    weights, grads, outs = (weight,), (grad,), (real,)

    def clip_unit(table, unit, width, factor, limit, least):
        def add_part(pointers, first, n, terms, lanes):
            for i in range(n):
                store(terms, i, load(pointers, first + i))
            add_squares(lanes, terms, n)

        def summed(pointers, width, terms, lanes):
            """Return the sum of squares, and the factor of the numbers: DOWN if they are large."""
            squares = 0.0
            for first in range(0, width, BLOCK):
                for part in range(first, min(first + BLOCK, width), PART):
                    if width - part >= PART:
                        add_part(pointers, part, PART, terms, lanes)
                    else:
                        add_part(pointers, part, width - part, terms, lanes)
                squares += total(lanes)[0]
            if not math.isinf(squares):
                return squares, 1.0
            squares = 0.0
            for i in range(width):
                squares += (np.float64(load(pointers, i)[0]) * DOWN) ** 2
            return squares, DOWN

        w = locate(table, 0, WEIGHT, unit * width, weights)
        g = locate(table, 0, GRAD, unit * width, grads)
        out = locate(table, 0, OUT, unit * width, outs)
        terms, lanes = scratch(1, PART, real), scratch(1, LANES, np.float64)
        of_weight, weight_down = summed(w, width, terms, lanes)
        of_grad, down = summed(g, width, terms, lanes)
        most = limit * max(math.sqrt(of_weight) / weight_down, least) * down
        norm, scale = math.sqrt(of_grad) * factor, real(1)
        if not norm <= most:  # NaN stays NaN
            scale = real(most / max(norm, TINY * down))
        for i in range(width):
            store(out, i, (load(g, i)[0] * scale,))

    return scalar(clip_unit)


@cache
def clip_units(weight: type, grad: type, real: type, parallel: bool) -> Callable:
    """Kernel ``(table, units, width, factor, limit, least)``; see :func:`unit_loop`."""
    loop = unit_loop(weight, grad, real)

    def clip_units(table, units, width, factor, limit, least):
        for unit in prange(units):
            loop(table, unit, width, factor, limit, least)

    kernel = compiled(clip_units, None, parallel)
    return bind(kernel, np.zeros((1, 3), np.uint64), 0, 0, 0.0, 0.0, 0.0)
