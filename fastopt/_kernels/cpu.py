"""CPU kernels: factories that turn a rule into loops over a table of tensors.

Every loop takes the same three arrays: ``chunks`` with rows ``(tensor, start, size)``, ``table``
with a row of addresses for each tensor (:mod:`fastopt._kernels.layout`), and ``hyper`` with a
record for each tensor. :mod:`fastopt._kernels.cpu_addresses` compiles them for one tensor.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange

from fastopt._kernels import elements
from fastopt._kernels import layout as columns
from fastopt._kernels.compiling import compiled
from fastopt._kernels.cpu_blocks import FAR, dense_blocks, lazy_blocks
from fastopt._kernels.cpu_rows import row_loop
from fastopt._kernels.lanes import BLOCK
from fastopt._kernels.layout import Layout
from fastopt._kernels.noise import dither_run, run
from fastopt._kernels.segments import gather, listed, row_fetcher, row_gradient
from fastopt._kernels.storage import inside, load, locate, prefetch, private, shifted, store
from fastopt._kernels.vectors import prefer_wide_vectors
from fastopt._kernels.weights import read_weight, write_weight

STEP = 128
"""Elements that are prefetched at a time, in updates that draw random numbers: their arithmetic
overlaps with their memory traffic only if the data are in the cache when it begins."""


def update_loop(layout: Layout) -> Callable:
    """Return the loop of an update; its chunks consist of elements, blocks or rows."""
    if layout.rule.row:
        return row_loop(layout)
    if layout.lazy:
        return lazy_blocks(layout) if layout.coded else lazy_loop(layout)
    return element_loop(layout)


def element_loop(layout: Layout) -> Callable:
    """Return a function that applies a rule without a row term to every element."""
    if layout.coded:
        return dense_blocks(layout)
    return _in_parts(layout) if layout.sparse or layout.keyed else _dense(layout)


def _dense(layout: Layout) -> Callable:
    """Return the loop of most layouts alone, which compiles in three quarters of the time."""
    real, update = layout.real, elements.element_step(layout)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad

    def dense(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, columns.ADDRESS, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            grads = locate(table, tensor, first_grad, start, grad_kinds)
            h = private(hyper, tensor)
            for i in range(size):
                weight, state, grad = read_weight(weights, i), load(states, i), load(grads, i)[0]
                weight, state = update(weight, grad, state, h, real(1), None, i)
                write_weight(weights, i, weight)
                store(states, i, state)
        table[0, columns.DONE] = 1

    return dense


def _in_parts(layout: Layout) -> Callable:
    """Return the loop of updates that gather row-sparse gradients or draw random numbers."""
    real, sparse, update = layout.real, layout.sparse, elements.element_step(layout)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad

    def dense(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, columns.ADDRESS, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            h, key = private(hyper, tensor), table[tensor, columns.KEY]
            element = np.int64(table[tensor, columns.OFFSET]) + start
            rounding, draw = dither_run(key, element), run(key, element)
            if draws:
                prefer_wide_vectors()
            if sparse:
                grads = locate(table, tensor, first_grad, 0, grad_kinds)
                buffer, step = np.empty((1, BLOCK), real), BLOCK
            else:
                grads = locate(table, tensor, first_grad, start, grad_kinds)
                buffer, step = None, STEP if draws else max(size, 1)
            for first in range(0, size, step):
                count = min(step, size - first)
                if sparse:
                    gather(table, tensor, grads, start + first, count, inside(buffer))
                elif draws:
                    prefetch(shifted(weights, first + FAR), STEP, True)
                    prefetch(shifted(states, first + FAR), STEP, True)
                    prefetch(shifted(grads, first + FAR), STEP, False)
                for i in range(first, first + count):
                    weight, state = read_weight(weights, i), load(states, i)
                    grad = elements.gradient(grads, i, buffer, i - first)
                    weight, state = update(weight, grad, state, h, real(1), draw, i)
                    elements.keep(weights, i, weight, rounding, dither)
                    elements.keep_state(states, i, state, rounding, draws)
        table[0, columns.DONE] = 1

    return dense


def lazy_loop(layout: Layout) -> Callable:
    """Return a function ``(chunks, table, hyper)`` that applies a rule to the indexed rows.

    Chunk starts and sizes are in indexed rows.
    """
    real, catch_up = layout.real, layout.catch_up
    update, kinds, gradient_of = elements.element_step(layout), layout.weight, row_gradient(layout)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, fetch_row = layout.first_state, row_fetcher(layout)
    state_kinds, locate_row = layout.state, elements.row_locator(layout.pitched)

    def lazy(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, columns.WIDTH])
            h, key = private(hyper, tensor), table[tensor, columns.KEY]
            buffer = np.empty((1, width), real)
            if draws:
                prefer_wide_vectors()
            for k in range(start, start + size):
                fetch_row(table, tensor, k, width)
                grads = gradient_of(table, tensor, k, width, buffer)
                row = listed(table, tensor, columns.ROWS, k)
                weights = locate_row(table, tensor, columns.ADDRESS, row, width, kinds)
                states = locate_row(table, tensor, first_state, row, width, state_kinds)
                element = np.int64(table[tensor, columns.OFFSET]) + row * width
                rounding, draw = dither_run(key, element), run(key, element)
                factor = real(elements.take_decay(table, tensor, row)) if catch_up else real(1)
                for i in range(width):
                    weight, grad = read_weight(weights, i), load(grads, i)[0]
                    weight, state = update(weight, grad, load(states, i), h, factor, draw, i)
                    elements.keep(weights, i, weight, rounding, dither)
                    elements.keep_state(states, i, state, rounding, draws)
        table[0, columns.DONE] = 1

    return lazy


NUMBERS_AHEAD = 16
"""Prefetch distance in rows of one number."""


def number_loop(layout: Layout) -> Callable:
    """Return a loop like :func:`lazy_loop` for rows of one number, as weights of one axis have.

    A row has no buffer and no loop over its elements.
    """
    real, catch_up = layout.real, layout.catch_up
    update, kinds, state_kinds = elements.element_step(layout), layout.weight, layout.state
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad, grad_kinds = layout.first_state, layout.first_grad, (layout.grad,)

    def numbers(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            h, key = private(hyper, tensor), table[tensor, columns.KEY]
            offset, last = (
                np.int64(table[tensor, columns.OFFSET]),
                np.int64(table[tensor, columns.SEGMENTS]),
            )
            values = locate(table, tensor, first_grad, 0, grad_kinds)
            end = listed(table, tensor, columns.STARTS, start)
            for k in range(start, start + size):
                ahead = listed(table, tensor, columns.ROWS, min(k + NUMBERS_AHEAD, last - 1))
                prefetch(locate(table, tensor, columns.ADDRESS, ahead, kinds), 1, True)
                prefetch(locate(table, tensor, first_state, ahead, state_kinds), 1, True)
                begin, end = end, listed(table, tensor, columns.STARTS, k + 1)
                grad = real(load(values, listed(table, tensor, columns.ORDER, begin))[0])
                for entry in range(begin + 1, end):
                    grad += real(load(values, listed(table, tensor, columns.ORDER, entry))[0])
                row = listed(table, tensor, columns.ROWS, k)
                weights = locate(table, tensor, columns.ADDRESS, row, kinds)
                states = locate(table, tensor, first_state, row, state_kinds)
                rounding, draw = dither_run(key, offset + row), run(key, offset + row)
                factor = real(elements.take_decay(table, tensor, row)) if catch_up else real(1)
                weight, state = read_weight(weights, 0), load(states, 0)
                weight, state = update(weight, grad, state, h, factor, draw, 0)
                elements.keep(weights, 0, weight, rounding, dither)
                elements.keep_state(states, 0, state, rounding, draws)
        table[0, columns.DONE] = 1

    return numbers


@cache
def flush_decay(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table)`` that applies deferred weight decay to all rows.

    Chunk starts and sizes are in rows.
    """
    return compiled(flush_loop(layout), layout.rule, parallel)


def flush_loop(layout: Layout) -> Callable:
    """Return the function of :func:`flush_decay`, without compiling it."""
    real, kinds, dither = layout.real, layout.weight, layout.dither or None
    locate_row = elements.row_locator(layout.pitched)

    def flush_decay(chunks, table):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, columns.WIDTH])
            key, offset = table[tensor, columns.KEY], np.int64(table[tensor, columns.OFFSET])
            for row in range(start, start + size):
                factor = real(elements.take_decay(table, tensor, row))
                if factor == 1:
                    continue
                weights = locate_row(table, tensor, columns.ADDRESS, row, width, kinds)
                element = offset + row * width
                rounding = dither_run(key, element)
                for i in range(width):
                    weight = read_weight(weights, i) * factor
                    elements.keep(weights, i, weight, rounding, dither)

    return flush_decay
