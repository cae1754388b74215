"""CUDA kernel for states in 8 bits, the counterpart of :mod:`fastopt._kernels.cpu_blocks`.

A warp takes a block of codes and each lane the same number of consecutive elements; the largest
numbers of the block, which determine its scales, are found by shuffles.

Tests: ``tests/gpu/test_cuda_steps.py``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types
from numba.core import cgutils

from fastopt._kernels import blocks as codec
from fastopt._kernels.cuda import (
    WARPS,
    chunk_of,
    compiled,
    exchange,
    is_aligned,
    meet,
)
from fastopt._kernels.cuda_packs import begin_pack, end_pack
from fastopt._kernels.elements import element_step, keep, pending_decay
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.lanes import LANES, scratch
from fastopt._kernels.layout import ADDRESS, KEY, OFFSET, ROWS, SEGMENTS, WIDTH, Layout
from fastopt._kernels.noise import dither_run, run
from fastopt._kernels.segments import listed, scattered, summed
from fastopt._kernels.storage import given, load, locate, store
from fastopt._kernels.weights import read_weight
from fastopt.kernels.rule import scalar

EACH = codec.CODE_BLOCK // LANES
"""Elements of a block that a lane updates."""


@scalar
def highest(value):
    """Return the largest of a value of each lane of a warp, to all lanes; the value is a word."""
    half = LANES // 2
    while half:
        value = max(value, np.int64(exchange(np.int64(value), half)))
        half //= 2
    return value


@intrinsic
def highest_of_warp(typingctx, tops):
    """Return the maxima over the lanes of a warp; NaN propagates.

    Magnitudes are compared as integers, whose highest bit is 0; NaN is above infinity.
    """

    def codegen(context, builder, signature, args):
        wide = types.int64(types.int64)
        maxima = []
        for top in cgutils.unpack_tuple(builder, args[0], len(tops)):
            word = context.cast(builder, top, tops.dtype, types.int64)
            largest = context.compile_internal(builder, highest, wide, [word])
            maxima.append(context.cast(builder, largest, types.int64, tops.dtype))
        return context.make_tuple(builder, tops, maxima)

    return tops(tops), codegen


def _lane_update(layout: Layout) -> Callable[..., Any]:
    """Return a function that updates the consecutive elements of a lane.

    ``(table, tensor, place, pointers, before, count, h, factor)`` returns the largest numbers of
    each slot in the block. `place` is the number of the indexed row, the first element and its
    column; `pointers` are those to weights, states, gradients and the new numbers of the states,
    and `before` are the scales of the block.
    """
    real, sparse, lazy, wide = layout.real, layout.sparse, layout.lazy, layout.wide_grad
    update, dither = element_step(layout), layout.dither or None

    def update_lane(table, tensor, place, pointers, before, count, h, factor):
        k, first, column = place
        weights, states, source, targets = pointers
        key, element = table[tensor, KEY], np.int64(table[tensor, OFFSET]) + first
        rounding, draw = dither_run(key, element), run(key, element)
        tops = codec.lowest(targets)
        for i in range(count):
            weight = read_weight(weights, i)
            if lazy:
                grad = summed(table, tensor, source, k, column + i, wide)
            elif sparse:
                grad = scattered(table, tensor, source, first + i, real(0), wide)
            else:
                grad = load(source, i)[0]
            state = codec.decode(states, i, before)
            weight, state = update(weight, grad, state, h, factor, draw, i)
            keep(weights, i, weight, rounding, dither)
            numbers = codec.prepared(states, state)
            store(targets, i, numbers)
            tops = codec.higher(states, tops, numbers, state)
        largest = highest_of_warp(tops)
        meet()  # all lanes have read the scales
        return largest

    return scalar(update_lane)


@cache
def blocks(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules with states in 8 bits.

    Chunk starts and sizes are in blocks or, with a lazy layout, in indexed rows.
    """
    rule, real, sparse, lazy = layout.rule, layout.real, layout.sparse, layout.lazy
    update_lane, slots, catch_up = _lane_update(layout), len(rule.state), layout.catch_up
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    scale_kinds, record = layout.scales, layout.record
    first_state, first_scale, first_grad = layout.first_state, layout.first_scale, layout.first_grad
    addresses, reads = (*range(ADDRESS, first_state + slots), first_grad), layout.read_weights

    def blocks(chunks, table, hyper):
        c, lane, warp = cuda.blockIdx.x, np.int64(cuda.threadIdx.x), cuda.threadIdx.y
        tensor, start, size = chunk_of(chunks, c, table)
        width: Any = np.int64(table[tensor, WIDTH])
        in_row: Any = codec.blocks_of(width)
        h, aligned = given(hyper, tensor, record), is_aligned(table, tensor, addresses)
        new, fewer = scratch(slots, EACH, real), scratch(slots, EACH, real)
        end = start + size
        if lazy:
            end = min(end, np.int64(table[tensor, SEGMENTS]))
        for k in range(start + warp, end, WARPS):
            row: Any = listed(table, tensor, ROWS, k) if lazy else np.int64(0)
            first, last = (row * in_row, (row + 1) * in_row) if lazy else (k, k + 1)
            factor = real(pending_decay(table, tensor, row)) if catch_up else real(1)
            for block in range(first, last):
                begin, column, count = codec.extent(block, in_row, width)
                whole = aligned and count == codec.CODE_BLOCK and begin % EACH == 0
                begin += lane * EACH
                place = k, begin, column + lane * EACH
                weights = locate(table, tensor, ADDRESS, begin, kinds)
                states = locate(table, tensor, first_state, begin, state_kinds)
                scales = locate(table, tensor, first_scale, block, scale_kinds)
                source = locate(table, tensor, first_grad, 0 if sparse else begin, grad_kinds)
                before = load(scales, 0)
                if whole and not sparse:
                    copies = begin_pack(weights, 0, EACH, False, reads)
                    codes = begin_pack(states, 0, EACH, True, slots)
                    pointers = copies, codes, begin_pack(source, 0, EACH, True, 1), new
                    tops = update_lane(table, tensor, place, pointers, before, EACH, h, factor)
                    codec.encode(codes, scales, new, EACH, tops)
                    end_pack(weights, 0, EACH, False, copies)
                    end_pack(states, 0, EACH, True, codes)
                else:
                    count = max(min(np.int64(EACH), count - lane * EACH), np.int64(0))
                    pointers = weights, states, source, fewer
                    tops = update_lane(table, tensor, place, pointers, before, count, h, factor)
                    codec.encode(states, scales, fewer, count, tops)

    return compiled(blocks, rule)
