"""CPU kernels of sums and maxima: reductions of a rule, and norms of gradients.

Tests: ``tests/kernels/test_cpu.py``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from fastopt._kernels.blocks import CODE_BLOCK, blocks_of, decode
from fastopt._kernels.elements import gradient
from fastopt._kernels.lanes import BLOCK, LANES, MAXIMUM, PART, SUM, add_squares, scratch, total
from fastopt._kernels.layout import WIDTH, Layout
from fastopt._kernels.segments import collect, gather
from fastopt._kernels.storage import inside, load, locate, prefetch, private, store
from fastopt._kernels.weights import read_weight
from fastopt.kernels.rule import scalar

FAR = 1024
"""Prefetch distance in elements."""

MANY = 32
"""Number of chunks from which tensors are assumed not to fit in a core's cache."""


def sum_loop(layout: Layout, step: int) -> Callable:
    """Return a function ``(chunks, table, hyper, partial)`` of the partial sums of a reduction."""
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count = rule.passes[step][0], rule.sums[step]
    state_kinds, grad_kinds = layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_weight, kinds = layout.summed
    coded, slots = layout.coded, len(rule.state)
    decode_part: Any = _decode_part(layout) if coded else None
    fetch = _fetch(layout, step)
    gather_terms, end_block, merge, _ = MAXIMUM if rule.passes[step].largest else SUM

    def sums(chunks, table, hyper, partial):
        def add_part(part, n, weights, states, first, grads, gathered, k, h, values, lanes):
            for i in range(n):
                grad = gradient(grads, part + i, gathered, k + i)
                weight, state = read_weight(weights, part + i), load(states, first + i)
                store(values, i, terms(weight, grad, state, h))
            gather_terms(lanes, values, n)

        many = len(chunks) >= MANY
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, first_weight, start, kinds)
            if coded:
                states = scratch(slots, PART, real)
            else:
                states = locate(table, tensor, first_state, start, state_kinds)
            grads = locate(table, tensor, first_grad, 0 if sparse else start, grad_kinds)
            h, values = private(hyper, tensor), scratch(count, PART, real)
            lanes, far = scratch(count, LANES, np.float64), size - FAR if many else 0
            gathered = np.empty((1, BLOCK), real) if sparse else None

            for first in range(0, size, BLOCK):
                end = min(first + BLOCK, size)
                if sparse:
                    gather(table, tensor, grads, start + first, end - first, inside(gathered))
                for part in range(first, end, PART):
                    n, k, at = min(PART, end - part), part - first, part
                    if part < far:
                        fetch(table, tensor, start + part + FAR)
                    if coded:
                        at = 0
                        decode_part(table, tensor, start + part, n, states)
                    if n == PART:
                        add_part(
                            part, PART, weights, states, at, grads, gathered, k, h, values, lanes
                        )
                    else:
                        add_part(part, n, weights, states, at, grads, gathered, k, h, values, lanes)
                totals = end_block(lanes)
                for k in range(count):
                    partial[c, k] = merge(partial[c, k], totals[k])

    return sums


def _fetch(layout: Layout, step: int) -> Callable:
    """Return ``(table, tensor, place)``, which prefetches the arrays that a reduction reads."""
    reads, sparse = layout.rule.reads[step], layout.sparse
    first_weight, kinds = layout.summed
    first_state, first_grad = layout.first_state, layout.first_grad
    weights = kinds if reads[0] else ()
    grads = (layout.grad,) if reads[1] and not sparse else ()
    states = layout.state if any(reads[2:]) else ()

    def fetch(table, tensor, place):
        prefetch(locate(table, tensor, first_weight, place, weights), PART, False)
        prefetch(locate(table, tensor, first_state, place, states), PART, False)
        prefetch(locate(table, tensor, first_grad, place, grads), PART, False)

    return scalar(fetch)


def _decode_part(layout: Layout) -> Callable:
    """Return ``(table, tensor, first, count, target)``, which decodes elements of each slot."""
    first_state, state_kinds = layout.first_state, layout.state
    first_scale, scale_kinds = layout.first_scale, layout.scales

    def decode_part(table, tensor, first, count, target):
        width = np.int64(table[tensor, WIDTH])
        in_row = blocks_of(width)
        states = locate(table, tensor, first_state, first, state_kinds)
        done = 0
        while done < count:
            row = (first + done) // width
            column = first + done - row * width
            number = column // CODE_BLOCK
            end = min(done + min((number + 1) * CODE_BLOCK, width) - column, count)
            scales = load(locate(table, tensor, first_scale, row * in_row + number, scale_kinds), 0)
            for i in range(done, end):
                store(target, i, decode(states, i, scales))
            done = end

    return scalar(decode_part)


def finish_loop(layout: Layout, step: int) -> Callable:
    """Return a function ``(chunks, table, hyper, partial)`` that finalizes reduction `step`.

    The results of chunks are merged in their order.
    """
    fill, count = layout.rule.passes[step][1], layout.rule.sums[step]
    first_kept, kinds, keeps = layout.first_kept, layout.kept, bool(layout.kept)
    merge = (MAXIMUM if layout.rule.passes[step].largest else SUM).merge

    def finish(chunks, table, hyper, partial):
        first = 0
        for tensor in range(len(hyper)):
            total = np.zeros(count)
            while first < len(chunks) and chunks[first, 0] == tensor:
                for k in range(count):  # numba would free the array early after total += ...
                    total[k] = merge(total[k], partial[first, k])
                first += 1
            if keeps:
                numbers = locate(table, tensor, first_kept, 0, kinds)
                store(numbers, 0, fill(total, hyper[tensor], load(numbers, 0)))
            else:
                fill(total, hyper[tensor])

    return finish


def square_loop(kinds: tuple[type, ...], real: type, column: int, sparse: bool) -> Callable:
    """Return a function ``(chunks, table, partial)`` that sums the squares of gradients per chunk.

    The gradients' addresses are in `column`. Chunk starts and sizes are in elements, or in indexed
    rows.
    """

    def squares(chunks, table, partial):
        def add_part(tensor, grads, k, part, n, values, lanes):
            if sparse:
                collect(table, tensor, grads, k, part, n, values, 0)
            else:
                for i in range(n):
                    store(values, i, load(grads, part + i))
            add_squares(lanes, values, n)

        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            grads = locate(table, tensor, column, 0 if sparse else start, kinds)
            width = np.int64(table[tensor, WIDTH]) if sparse else size
            values, lanes = scratch(1, PART, real), scratch(1, LANES, np.float64)
            far = size - FAR if len(chunks) >= MANY else 0

            for k in range(start, start + size if sparse else start + 1):
                for first in range(0, width, BLOCK):
                    for part in range(first, min(first + BLOCK, width), PART):
                        n = min(PART, width - part)
                        if not sparse and part < far:
                            ahead = locate(table, tensor, column, start + part + FAR, kinds)
                            prefetch(ahead, PART, False)
                        if n == PART:
                            add_part(tensor, grads, k, part, PART, values, lanes)
                        else:
                            add_part(tensor, grads, k, part, n, values, lanes)
                    partial[c] += total(lanes)[0]

    return squares
