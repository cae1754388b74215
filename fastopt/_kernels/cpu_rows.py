"""CPU kernel for rules that use the mean of a row, with state numbers of rows and of elements.

Tests: ``tests/kernels/test_cpu.py``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from fastopt._kernels import elements
from fastopt._kernels.cpu_sums import FAR, MANY
from fastopt._kernels.lanes import BLOCK, LANES, PART, add, scratch, total
from fastopt._kernels.layout import ADDRESS, DONE, KEY, OFFSET, ROWS, WIDTH, Layout
from fastopt._kernels.noise import dither_run
from fastopt._kernels.segments import collect, listed, row_fetcher
from fastopt._kernels.storage import inside, load, locate, prefetch, private, store
from fastopt._kernels.vectors import inlined
from fastopt._kernels.weights import read_weight

GROUP = 4
"""Rows that are summed before the first of them is updated, to hide the latency of its root and
division."""


def row_loop(layout: Layout) -> Callable:
    """Return a function ``(chunks, table, hyper)`` for rules that use the mean of a row.

    Chunk starts and sizes are in rows of the tensor, or indexed rows.
    """
    real, sparse, grad_kinds = layout.real, layout.sparse, (layout.grad,)
    first_grad, fetch_row = layout.first_grad, row_fetcher(layout)
    add_terms, update = _add_terms(layout), _update_row(layout)

    def rows(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            h = private(hyper, tensor)
            grads = locate(table, tensor, first_grad, 0, grad_kinds)
            buffer = np.empty((1, GROUP * width), real) if sparse else None
            terms, lanes = scratch(1, PART, real), scratch(1, LANES, np.float64)
            means = scratch(1, GROUP, real)
            far = (start + size) * width - FAR if len(chunks) >= MANY else 0
            for begin in range(start, start + size, GROUP):
                end = min(begin + GROUP, start + size)
                for k in range(begin, end):
                    at = (k - begin) * width
                    if sparse:
                        fetch_row(table, tensor, k, width)
                        collect(table, tensor, grads, k, 0, width, inside(buffer), at)
                    place = k * width
                    added = add_terms(
                        table, tensor, grads, place, buffer, at, width, h, terms, lanes, far
                    )
                    store(means, k - begin, (real(added / width),))
                for k in range(begin, end):
                    row = listed(table, tensor, ROWS, k) if sparse else k
                    mean, at = load(means, k - begin)[0], (k - begin) * width
                    update(table, tensor, row, width, grads, buffer, at, h, mean)
        table[0, DONE] = 1

    return rows


def _add_terms(layout: Layout) -> Callable:
    """Return a function that adds the terms of the gradients of one row.

    They are elements of `grads` from `place` on, or of `buffer` from `at` on. Elements of `grads`
    before `far` are followed by others that can be prefetched.
    """
    term: Any = layout.rule.row
    kinds, grad_kinds, first_grad = layout.weight, (layout.grad,), layout.first_grad
    sparse = layout.sparse

    def add_terms(table, tensor, grads, place, buffer, at, width, h, terms, lanes, far):
        def add_part(first, n):
            for i in range(first, first + n):
                grad = elements.gradient(grads, place + i, buffer, at + i)
                store(terms, i - first, (term(grad, h),))
            add(lanes, terms, n)

        added = 0.0
        for block in range(0, width, BLOCK):
            for part in range(block, min(block + BLOCK, width), PART):
                if not sparse and place + part < far:
                    ahead = place + part + FAR
                    prefetch(locate(table, tensor, ADDRESS, ahead, kinds), PART, True)
                    prefetch(locate(table, tensor, first_grad, ahead, grad_kinds), PART, False)
                if width - part >= PART:
                    add_part(part, PART)
                else:
                    add_part(part, width - part)
            added += total(lanes)[0]
        return added

    return inlined(add_terms)


def _update_row(layout: Layout) -> Callable:
    """Return a function that updates the elements and the state of one row."""
    real, sparse, step = layout.real, layout.sparse, elements.element_step(layout)
    kinds, (cell_kinds, state_kinds) = layout.weight, layout.split_state
    first_state, of_rows = layout.first_state, layout.first_row_state
    join, split = elements.row_split(layout)
    dither, draws = layout.dither or None, layout.keyed or None
    locate_row = elements.row_locator(layout.pitched)

    def update_row(table, tensor, row, width, grads, buffer, at, h, mean):
        weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
        cells = locate_row(table, tensor, first_state, row, width, cell_kinds)
        states = locate_row(table, tensor, of_rows, row, 1, state_kinds)
        key, offset = table[tensor, KEY], np.int64(table[tensor, OFFSET])
        place = np.int64(0) if sparse else row * width
        rounding = dither_run(key, offset + row * width)
        state = left = load(states, 0)
        for i in range(width):
            grad, old = elements.gradient(grads, place + i, buffer, at + i), join(cells, i, state)
            weight, new = step(read_weight(weights, i), grad, old, h, real(1), mean, i)
            elements.keep(weights, i, weight, rounding, dither)
            left = split(cells, i, new, rounding, draws)
        number = offset // max(width, 1) + row
        elements.keep_state(states, 0, left, dither_run(key, number), draws)

    return inlined(update_row)
