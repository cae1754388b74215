"""CPU kernels: factories that turn a rule into compiled loops over a table of tensors.

Every kernel takes the same three arrays (see :mod:`fastopt.kernels.table`): ``chunks`` with a row
``(tensor, start, size)`` for each piece of work, ``table`` with a row of addresses for each tensor,
and ``hyper`` with a record for each tensor.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange

from fastopt.kernels import headers, segments
from fastopt.kernels.compiling import compiled
from fastopt.kernels.elements import gradient, keep, keep_state, missed
from fastopt.kernels.lanes import BLOCK, lane_sum, padded, put
from fastopt.kernels.layout import (
    ADDRESS,
    DONE,
    KEY,
    OFFSET,
    ORDER,
    ROWS,
    SEGMENTS,
    STARTS,
    WIDTH,
    Layout,
)
from fastopt.kernels.noise import dither_key, normal
from fastopt.kernels.rule import Rule
from fastopt.kernels.segments import collect, gather, listed
from fastopt.kernels.storage import checked, inside, load, locate, prefetch, private
from fastopt.kernels.weights import read_weight

__all__ = [
    "addresses",
    "adopt",
    "dense",
    "enter",
    "finish",
    "lazy",
    "order_rows",
    "rows",
    "same",
    "settle",
    "squares",
    "sums",
    "survey",
]

AHEAD = 16
"""Listed rows between the one that is worked on and the one that is brought to the cache."""


@cache
def dense(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to every element in place."""
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update, noise, slots = rule.fn, rule.noise, len(rule.state)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad

    def dense(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, ADDRESS, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            h, key = private(hyper, tensor), table[tensor, KEY]
            element = np.int64(table[tensor, OFFSET]) + start
            rounding = dither_key(key, element)
            if sparse:
                grads = locate(table, tensor, first_grad, 0, grad_kinds)
                buffer, step = np.empty((1, BLOCK), real), BLOCK
            else:
                grads = locate(table, tensor, first_grad, start, grad_kinds)
                buffer, step = None, size
            for first in range(0, size, step):
                count = min(step, size - first)
                if sparse:
                    gather(table, tensor, grads, start + first, count, inside(buffer))
                for i in range(first, first + count):
                    weight, state = read_weight(weights, i), load(states, i)
                    grad = gradient(grads, i, buffer, i - first)
                    if noise:
                        new = update(weight, grad, state, h, normal(key, element + i))
                    else:
                        new = update(weight, grad, state, h)
                    weight, state = checked(new, slots)
                    keep(weights, i, weight, rounding, element + i, dither)
                    keep_state(states, i, state, rounding, element + i, draws)
        table[0, DONE] = 1

    return compiled(dense, rule, parallel)


@cache
def lazy(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to the listed rows.

    Start and size of a chunk count listed rows.
    """
    rule, real, catch_up = layout.rule, layout.real, layout.catch_up
    reals, direct = (real,), layout.grad == layout.real
    update, noise, slots = rule.fn, rule.noise, len(rule.state)
    kinds, grad_kinds = layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    state_kinds = layout.state

    def lazy(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            grads = locate(table, tensor, first_grad, 0, grad_kinds)
            h, key = private(hyper, tensor), table[tensor, KEY]
            buffer = np.empty((1, width), real)
            for k in range(start, start + size):
                if k + AHEAD < table[tensor, SEGMENTS]:
                    ahead = listed(table, tensor, ROWS, k + AHEAD) * width
                    prefetch(locate(table, tensor, ADDRESS, ahead, kinds), width)
                    prefetch(locate(table, tensor, first_state, ahead, state_kinds), width)
                begin = listed(table, tensor, STARTS, k)
                if direct and listed(table, tensor, STARTS, k + 1) == begin + 1:
                    start_of = listed(table, tensor, ORDER, begin) * width
                    source = locate(table, tensor, first_grad, start_of, reals)
                else:
                    source = inside(buffer)
                    collect(table, tensor, grads, k, 0, width, source, 0)
                row = listed(table, tensor, ROWS, k)
                place = row * width
                weights = locate(table, tensor, ADDRESS, place, kinds)
                states = locate(table, tensor, first_state, place, state_kinds)
                element = np.int64(table[tensor, OFFSET]) + place
                rounding = dither_key(key, element)
                factor = real(missed(table, tensor, row)) if catch_up else real(1)
                for i in range(width):
                    weight, grad = read_weight(weights, i), load(source, i)[0]
                    state = load(states, i)
                    if catch_up:
                        weight = weight * factor
                    if noise:
                        new = update(weight, grad, state, h, normal(key, element + i))
                    else:
                        new = update(weight, grad, state, h)
                    weight, state = checked(new, slots)
                    keep(weights, i, weight, rounding, element + i, dither)
                    keep_state(states, i, state, rounding, element + i, draws)
        table[0, DONE] = 1

    return compiled(lazy, rule, parallel)


@cache
def rows(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules with one state number for each row.

    Start and size of a chunk count rows, of the tensor or of the list.
    """
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update: Any = rule.fn
    term: Any = rule.row
    slots, kinds, grad_kinds = len(rule.state), layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    state_kinds = layout.state

    def rows(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            h, rounding = private(hyper, tensor), dither_key(table[tensor, KEY], 0)
            offset: Any = np.int64(table[tensor, OFFSET])
            terms = np.empty((1, BLOCK), real)
            for k in range(start, start + size):
                if sparse:
                    row, buffer = listed(table, tensor, ROWS, k), np.empty((1, width), real)
                    grads = locate(table, tensor, first_grad, 0, grad_kinds)
                    collect(table, tensor, grads, k, 0, width, inside(buffer), 0)
                else:
                    row, buffer = k, None
                    grads = locate(table, tensor, first_grad, row * width, grad_kinds)
                weights = locate(table, tensor, ADDRESS, row * width, kinds)
                states = locate(table, tensor, first_state, row, state_kinds)
                total = 0.0
                for first in range(0, width, BLOCK):
                    n = min(BLOCK, width - first)
                    for i in range(n):
                        grad = gradient(grads, first + i, buffer, first + i)
                        put(terms, i, (term(grad, h),))
                    total += lane_sum(terms, 0, padded(terms, n))
                mean = real(total / width)
                state = new = load(states, 0)
                for i in range(width):
                    weight, grad = read_weight(weights, i), gradient(grads, i, buffer, i)
                    weight, new = checked(update(weight, grad, state, h, mean), slots)
                    keep(weights, i, weight, rounding, offset + row * width + i, dither)
                keep_state(states, 0, new, rounding, offset // max(width, 1) + row, draws)
        table[0, DONE] = 1

    return compiled(rows, rule, parallel)


@cache
def settle(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table)`` that gives all rows the decay that they have missed.

    Start and size of a chunk count rows.
    """
    real, kinds, dither = layout.real, layout.weight, layout.dither or None

    def settle(chunks, table):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            rounding = dither_key(table[tensor, KEY], 0)
            offset: Any = np.int64(table[tensor, OFFSET])
            for row in range(start, start + size):
                factor = real(missed(table, tensor, row))
                if factor == 1:
                    continue
                weights = locate(table, tensor, ADDRESS, row * width, kinds)
                for i in range(width):
                    weight = read_weight(weights, i) * factor
                    keep(weights, i, weight, rounding, offset + row * width + i, dither)

    return compiled(settle, layout.rule, parallel)


@cache
def sums(layout: Layout, step: int, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` that adds up pass `step` of the rule per chunk."""
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count = rule.passes[step][0], rule.sums[step]
    state_kinds, grad_kinds = layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_weight, kinds = layout.summed

    def sums(chunks, table, hyper, partial):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, first_weight, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            grads = locate(table, tensor, first_grad, 0 if sparse else start, grad_kinds)
            h, buffer = private(hyper, tensor), np.empty((count, BLOCK), real)
            gathered = np.empty((1, BLOCK), real) if sparse else None
            for first in range(0, size, BLOCK):
                n = min(BLOCK, size - first)
                if sparse:
                    gather(table, tensor, grads, start + first, n, inside(gathered))
                for i in range(n):
                    grad = gradient(grads, first + i, gathered, i)
                    weight, state = read_weight(weights, first + i), load(states, first + i)
                    put(buffer, i, terms(weight, grad, state, h))
                n = padded(buffer, n)
                for k in range(count):
                    partial[c, k] += lane_sum(buffer, k, n)

    return compiled(sums, rule, parallel)


@cache
def finish(rule: Rule, step: int) -> Callable:
    """Kernel ``(chunks, hyper, partial)`` that ends pass `step`: totals in order of the chunks."""
    fill, count = rule.passes[step][1], rule.sums[step]

    def finish(chunks, hyper, partial):
        first = 0
        for tensor in range(len(hyper)):
            total = np.zeros(count)
            while first < len(chunks) and chunks[first, 0] == tensor:
                total += partial[first]
                first += 1
            fill(total, hyper[tensor])

    return compiled(finish, rule, parallel=False)


@cache
def squares(kind: Any, real: Any, column: int, sparse: bool, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, partial)`` that adds up the squares of gradients per chunk.

    The gradients' addresses are in `column`. Start and size of a chunk count elements, or listed
    rows.
    """
    kinds = (kind,)

    def squares(chunks, table, partial):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            grads = locate(table, tensor, column, 0 if sparse else start, kinds)
            width = np.int64(table[tensor, WIDTH]) if sparse else size
            buffer, square = np.empty((1, BLOCK), real), np.empty((1, BLOCK), np.float64)
            for k in range(start, start + size if sparse else start + 1):
                for first in range(0, width, BLOCK):
                    n = min(BLOCK, width - first)
                    if sparse:
                        collect(table, tensor, grads, k, first, n, inside(buffer), 0)
                    for i in range(n):
                        grad = buffer[0, i] if sparse else load(grads, first + i)[0]
                        square[0, i] = np.float64(grad) * np.float64(grad)
                    partial[c] += lane_sum(square, 0, padded(square, n))

    return compiled(squares, None, parallel)


@cache
def addresses() -> Callable:
    """Kernel :func:`fastopt.kernels.headers.addresses`."""
    return compiled(headers.addresses, None, parallel=False, nogil=False)


@cache
def enter() -> Callable:
    """Kernel :func:`fastopt.kernels.headers.enter`."""
    return compiled(headers.enter, None, parallel=False, nogil=False)


@cache
def same() -> Callable:
    """Kernel :func:`fastopt.kernels.headers.same`."""
    return compiled(headers.same, None, parallel=False, nogil=False)


@cache
def adopt() -> Callable:
    """Kernel :func:`fastopt.kernels.headers.adopt`."""
    return compiled(headers.adopt, None, parallel=False, nogil=False)


@cache
def survey() -> Callable:
    """Kernel :func:`fastopt.kernels.segments.survey`."""
    return compiled(segments.survey, None, parallel=False)


@cache
def order_rows() -> Callable:
    """Kernel :func:`fastopt.kernels.segments.order_rows`."""
    return compiled(segments.order_rows, None, parallel=False)
