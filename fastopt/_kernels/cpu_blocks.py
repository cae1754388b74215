"""CPU loops for 8-bit state, which is updated block by block.

The counterparts of the loops of :mod:`fastopt._kernels.cpu`. The update of a block writes its new
state to scratch memory in the cache, and is followed by its encoding, which needs the maxima of the
block.

Tests: ``tests/kernels/test_blocks.py``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from fastopt._kernels.blocks import (
    CODE_BLOCK,
    blocks_of,
    decode,
    encode,
    extent,
    higher,
    lowest,
    prepared,
)
from fastopt._kernels.elements import element_step, keep, row_locator, take_decay
from fastopt._kernels.lanes import scratch
from fastopt._kernels.layout import ADDRESS, DONE, KEY, OFFSET, ROWS, WIDTH, Layout
from fastopt._kernels.noise import dither_run, run
from fastopt._kernels.segments import gather, listed, row_fetcher, row_gradient
from fastopt._kernels.storage import inside, load, locate, prefetch, private, shifted, store
from fastopt._kernels.vectors import inlined, prefer_wide_vectors
from fastopt._kernels.weights import read_weight

FAR = 512
"""Prefetch distance in elements."""


def _block_update(layout: Layout) -> Callable:
    """Return a function that updates the `count` elements of a block at these pointers.

    `element` is the number of the first one, and `factor` that of its row's deferred decay.
    """
    update, dither, encode_block = element_step(layout), layout.dither or None, inlined(encode)

    def block_update(weights, grads, states, scales, count, h, key, element, factor, values):
        rounding, draw = dither_run(key, element), run(key, element)
        before, tops = load(scales, 0), lowest(values)
        for i in range(count):
            weight, grad = read_weight(weights, i), load(grads, i)[0]
            state = decode(states, i, before)
            weight, state = update(weight, grad, state, h, factor, draw, i)
            keep(weights, i, weight, rounding, dither)
            store(values, i, state)
        for i in range(count):  # apart, so that many roots and quotients of the rule are under way
            state = load(values, i)
            numbers = prepared(states, state)
            store(values, i, numbers)
            tops = higher(states, tops, numbers, state)
        encode_block(states, scales, values, count, tops)

    return inlined(block_update)


def dense_blocks(layout: Layout) -> Callable:
    """Return a loop ``(chunks, table, hyper)`` over blocks, the unit of chunk starts and sizes."""
    real, sparse, slots = layout.real, layout.sparse, len(layout.rule.state)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_scale, scale_kinds = layout.first_scale, layout.scales
    update: Any = _block_update(layout)

    def blocks(chunks, table, hyper):
        for c in prange(len(chunks)):
            prefer_wide_vectors()
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            in_row = blocks_of(width)
            h, key = private(hyper, tensor), table[tensor, KEY]
            offset: Any = np.int64(table[tensor, OFFSET])
            values, one = scratch(slots, CODE_BLOCK, real), real(1)
            buffer = np.empty((1, CODE_BLOCK), real) if sparse else None
            for block in range(start, start + size):
                place, _, n = extent(block, in_row, width)
                weights = locate(table, tensor, ADDRESS, place, kinds)
                states = locate(table, tensor, first_state, place, state_kinds)
                scales = locate(table, tensor, first_scale, block, scale_kinds)
                prefetch(shifted(weights, FAR), CODE_BLOCK, True)
                prefetch(shifted(states, FAR), CODE_BLOCK, True)
                if sparse:
                    grads = inside(buffer)
                    values_of_rows = locate(table, tensor, first_grad, 0, grad_kinds)
                    gather(table, tensor, values_of_rows, place, n, grads)
                else:
                    grads = locate(table, tensor, first_grad, place, grad_kinds)
                    prefetch(shifted(grads, FAR), CODE_BLOCK, False)
                at = offset + place
                if n == CODE_BLOCK:
                    update(weights, grads, states, scales, CODE_BLOCK, h, key, at, one, values)
                else:
                    update(weights, grads, states, scales, n, h, key, at, one, values)
        table[0, DONE] = 1

    return blocks


def lazy_blocks(layout: Layout) -> Callable:
    """Return a loop ``(chunks, table, hyper)`` over indexed rows, like chunk starts and sizes."""
    real, catch_up, slots = layout.real, layout.catch_up, len(layout.rule.state)
    kinds, state_kinds, first_state = layout.weight, layout.state, layout.first_state
    first_scale, scale_kinds = layout.first_scale, layout.scales
    update, gradient_of = _block_update(layout), row_gradient(layout)
    locate_row, fetch_row = row_locator(layout.pitched), row_fetcher(layout)

    def rows(chunks, table, hyper):
        for c in prange(len(chunks)):
            prefer_wide_vectors()
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            in_row = blocks_of(width)
            h, key = private(hyper, tensor), table[tensor, KEY]
            offset: Any = np.int64(table[tensor, OFFSET])
            values, buffer = scratch(slots, CODE_BLOCK, real), np.empty((1, width), real)
            for k in range(start, start + size):
                fetch_row(table, tensor, k, width)
                grads = gradient_of(table, tensor, k, width, buffer)
                row = listed(table, tensor, ROWS, k)
                factor = real(take_decay(table, tensor, row)) if catch_up else real(1)
                weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
                states = locate_row(table, tensor, first_state, row, width, state_kinds)
                scales = locate_row(table, tensor, first_scale, row, in_row, scale_kinds)
                at = offset + row * width
                for block in range(in_row):
                    column = block * CODE_BLOCK
                    n = min(CODE_BLOCK, width - column)
                    update(
                        shifted(weights, column),
                        shifted(grads, column),
                        shifted(states, column),
                        shifted(scales, block),
                        n,
                        h,
                        key,
                        at + column,
                        factor,
                        values,
                    )
        table[0, DONE] = 1

    return rows
