"""CPU kernels: factories that turn a rule into compiled loops over a table of tensors.

Every kernel takes the same three arrays (see :mod:`fastopt._kernels.table`): ``chunks`` with rows
``(tensor, start, size)``, ``table`` with a row of addresses for each tensor, and ``hyper`` with a
record for each tensor.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange

from fastopt._kernels import numpy_abi, segments
from fastopt._kernels.advance import advance
from fastopt._kernels.blocks import (
    CODE_BLOCK,
    blocks_of,
    decode,
    encode,
    extent,
    higher,
    lowest,
)
from fastopt._kernels.compiling import compiled
from fastopt._kernels.context import cube, line, matrix
from fastopt._kernels.elements import gradient, keep, keep_state, missed, row_locator
from fastopt._kernels.lanes import BLOCK, LANES, PART, add, add_squares, scratch, total
from fastopt._kernels.layout import (
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
from fastopt._kernels.noise import dither_run, normal, run
from fastopt._kernels.numpy_abi import FITS, admit
from fastopt._kernels.segments import collect, gather, listed
from fastopt._kernels.storage import (
    checked,
    inside,
    load,
    locate,
    prefetch,
    private,
    shifted,
    store,
)
from fastopt._kernels.weights import read_weight
from fastopt.kernels.rule import scalar

__all__ = [
    "addresses",
    "dense",
    "enter",
    "finish",
    "lazy",
    "order_rows",
    "rows",
    "settle",
    "squares",
    "start",
    "sums",
    "survey",
    "take_addresses",
    "take_rows",
    "totals",
    "whole",
]

AHEAD = 8
"""Prefetch distance in indexed rows."""

FAR = 1024
"""Prefetch distance in elements, for sums."""

GROUP = 4
"""Rows that are summed before the first of them is updated, to hide the latency of its root and
division."""

MANY = 32
"""Number of chunks from which tensors are assumed not to fit in a core's cache."""


CONTEXT = (
    "chunks",
    "table",
    "hyper",
    "fields",
    "places",
    "guards",
    "written",
    "known",
    "tensors",
    "counts",
    "groups",
    "carried",
    "flat",
    "norm",
    "squares",
)
"""Arrays of a context, see :mod:`fastopt._kernels.advance` and :mod:`fastopt._kernels.numpy_abi`.

Arrays of partial sums follow, one for each reduction of the rule.
"""

CHUNKS, TABLE, HYPER, FIELDS, PLACES, GUARDS, WRITTEN, KNOWN = range(8)
TENSORS, COUNTS, GROUPS, CARRIED, FLAT, NORM, SQUARES, PARTIALS = range(8, 16)

RESCALE, SCALE, LIMIT, FACTOR, LENGTH = range(5)
"""Numbers of a measured call: ``rescale_grad``, the other factor of the gradients, the maximum
global norm, the factor after clipping, and the norm before clipping."""

SKIPPED = 1
"""Status of a measured call with non-finite gradients: nothing has changed."""


@cache
def dense(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to every element."""
    return compiled(_by_element(layout), layout.rule, parallel)


def _by_element(layout: Layout) -> Callable:
    """Return a function that applies a rule without a row term."""
    return _blocks(layout) if layout.coded else _dense(layout)


@cache
def whole(layout: Layout, correct: Any, dtype: Any, carries: bool, measures: bool) -> Callable:
    """Kernel ``(context, objects)`` for whole calls on small tensors.

    It checks the arguments of the call, counts the step, and applies the rule with its reductions.
    If it returns a negative number, nothing has changed. `context` has the arrays in
    :data:`CONTEXT`; `objects` is the id of the tuple of the call's arguments, kept alive by the
    GIL, or 0 if they have already been checked and measured.

    With `measures`, gradients are scaled and clipped by their global norm, and the update is
    skipped if that is not finite.
    """
    rule, real, keyed, record = layout.rule, layout.real, layout.keyed, layout.record
    update, rescale = scalar(_rows(layout) if rule.row else _by_element(layout)), rule.rescale
    reduce = _passes(layout)
    squares = scalar(_squares((layout.grad,), real, layout.first_grad, False))

    def whole(context, objects):
        table, hyper = matrix(context, TABLE, np.uint64), line(context, HYPER, record)
        if objects != 0:
            status = check(context, table, objects)
            if status < 0:
                return status
            if measures:
                flat, partial = matrix(context, FLAT, np.int64), line(context, SQUARES, np.float64)
                partial[:] = 0
                squares(flat, table, partial)
                norm = line(context, NORM, np.float64)
                limit_norm(total_of(flat, partial), norm)
                if not math.isfinite(norm[LENGTH]):
                    return SKIPPED
                groups = cube(context, GROUPS, np.float64)
                groups[0, :, groups.shape[2] - 1] = norm[FACTOR]
        advance(table, counted(context, real), correct, dtype, carries, keyed, rescale)
        reduce(context, table, hyper)
        update(matrix(context, CHUNKS, np.int64), table, hyper)
        return FITS

    return compiled(whole, rule, parallel=False, nogil=False, also=(correct,))


@scalar
def total_of(chunks: Any, partial: Any) -> Any:
    """Return the sum over all tensors, whose chunks are consecutive."""
    added, own, tensor = 0.0, 0.0, 0
    for c in range(len(chunks)):
        if chunks[c, 0] != tensor:
            added, own, tensor = added + own, 0.0, chunks[c, 0]
        own += partial[c]
    return added + own


@scalar
def limit_norm(total: Any, norm: Any) -> Any:
    """Write the global norm, from the sum of squares `total`, and the clipping factor."""
    norm[LENGTH] = math.sqrt(total) * abs(norm[RESCALE] * norm[SCALE])
    norm[FACTOR] = norm[SCALE]
    if norm[LENGTH] > norm[LIMIT]:
        norm[FACTOR] = norm[SCALE] * (norm[LIMIT] / norm[LENGTH])


def _passes(layout: Layout) -> Callable:
    """Return a function ``(context, table, hyper)`` that runs all reductions of a rule in order."""

    def none(context, table, hyper):
        pass

    reduce = scalar(none)
    for step in range(len(layout.rule.passes)):
        reduce = _after(reduce, layout, step)
    return reduce


def _after(before: Callable, layout: Layout, step: int) -> Callable:
    """Return a function that runs `before` and then reduction `step`."""
    add_up, end = scalar(_sums(layout, step)), scalar(_finish(layout, step))
    place = PARTIALS + step

    def reduce(context, table, hyper):
        before(context, table, hyper)
        flat = matrix(context, FLAT, np.int64)
        partial = matrix(context, place, np.float64)
        partial[:] = 0
        add_up(flat, table, hyper, partial)
        end(flat, table, hyper, partial)

    return scalar(reduce)


def _dense(layout: Layout) -> Callable:
    real, sparse = layout.real, layout.sparse
    update, noise, slots = layout.rule.fn, layout.rule.noise, len(layout.rule.state)
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
            rounding, draw = dither_run(key, element), run(key, element)
            if sparse:
                grads = locate(table, tensor, first_grad, 0, grad_kinds)
                buffer, step = np.empty((1, BLOCK), real), BLOCK
            else:
                grads = locate(table, tensor, first_grad, start, grad_kinds)
                buffer, step = None, max(size, 1)
            for first in range(0, size, step):
                count = min(step, size - first)
                if sparse:
                    gather(table, tensor, grads, start + first, count, inside(buffer))
                for i in range(first, first + count):
                    weight, state = read_weight(weights, i), load(states, i)
                    grad = gradient(grads, i, buffer, i - first)
                    if noise:
                        new = update(weight, grad, state, h, normal(draw, i))
                    else:
                        new = update(weight, grad, state, h)
                    weight, state = checked(new, slots)
                    keep(weights, i, weight, rounding, dither)
                    keep_state(states, i, state, rounding, draws)
        table[0, DONE] = 1

    return dense


def _blocks(layout: Layout) -> Callable:
    """Like :func:`_dense` and :func:`lazy`, for 8-bit state, which is updated block by block.

    Chunk starts and sizes are in blocks, or indexed rows in a lazy update.
    """
    rule, real, sparse, lazy = layout.rule, layout.real, layout.sparse, layout.lazy
    catch_up, reals, direct = layout.catch_up, (real,), layout.grad == layout.real
    update, noise, slots = rule.fn, rule.noise, len(rule.state)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, scale_kinds = layout.dither or None, layout.scales
    first_state, first_grad = layout.first_state, layout.first_grad
    first_scale, locate_row = layout.first_scale, row_locator(layout.pitched)

    def blocks(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            in_row = blocks_of(width)
            h, key = private(hyper, tensor), table[tensor, KEY]
            offset: Any = np.int64(table[tensor, OFFSET])
            values = scratch(slots, CODE_BLOCK, real)
            if lazy:
                buffer, items = np.empty((1, width), real), size
            elif sparse:
                buffer, items = np.empty((1, CODE_BLOCK), real), 1
            else:
                buffer, items = None, 1
            factor = real(1)
            for k in range(start, start + items):
                if lazy:
                    if k + AHEAD < table[tensor, SEGMENTS]:
                        ahead = listed(table, tensor, ROWS, k + AHEAD)
                        there = locate_row(table, tensor, ADDRESS, ahead, width, kinds)
                        prefetch(there, width, True)
                        there = locate_row(table, tensor, first_state, ahead, width, state_kinds)
                        prefetch(there, width, True)
                        there = locate_row(table, tensor, first_scale, ahead, in_row, scale_kinds)
                        prefetch(there, in_row, True)
                    one = listed(table, tensor, STARTS, k)
                    if direct and listed(table, tensor, STARTS, k + 1) == one + 1:
                        start_of = listed(table, tensor, ORDER, one) * width
                        source = locate(table, tensor, first_grad, start_of, reals)
                    else:
                        source = inside(buffer)
                        grads = locate(table, tensor, first_grad, 0, grad_kinds)
                        collect(table, tensor, grads, k, 0, width, source, 0)
                    row = listed(table, tensor, ROWS, k)
                    if catch_up:
                        factor = real(missed(table, tensor, row))
                    first, last = row * in_row, (row + 1) * in_row
                    row_weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
                    row_states = locate_row(table, tensor, first_state, row, width, state_kinds)
                    row_scales = locate_row(table, tensor, first_scale, row, in_row, scale_kinds)
                else:
                    first, last = start, start + size
                for block in range(first, last):
                    place, column, count = extent(block, in_row, width)
                    if lazy:
                        weights, states = shifted(row_weights, column), shifted(row_states, column)
                        scales, at = shifted(row_scales, block - first), column
                    else:
                        weights = locate(table, tensor, ADDRESS, place, kinds)
                        states = locate(table, tensor, first_state, place, state_kinds)
                        scales, at = locate(table, tensor, first_scale, block, scale_kinds), 0
                        if sparse:
                            source = inside(buffer)
                            grads = locate(table, tensor, first_grad, 0, grad_kinds)
                            gather(table, tensor, grads, place, count, source)
                        else:
                            source = locate(table, tensor, first_grad, place, grad_kinds)
                    element = offset + place
                    rounding, draw = dither_run(key, element), run(key, element)
                    before, tops = load(scales, 0), lowest(values)
                    for i in range(count):
                        weight, grad = read_weight(weights, i), load(source, at + i)[0]
                        state = decode(states, i, before)
                        if catch_up:
                            weight = weight * factor
                        if noise:
                            new = update(weight, grad, state, h, normal(draw, i))
                        else:
                            new = update(weight, grad, state, h)
                        weight, state = checked(new, slots)
                        keep(weights, i, weight, rounding, dither)
                        store(values, i, state)
                        tops = higher(states, tops, state)
                    encode(states, scales, values, count, tops)
        table[0, DONE] = 1

    return blocks


@cache
def start(
    rescale: int, real: Any, keyed: bool, correct: Any, dtype: Any, carries: bool
) -> Callable:
    """Kernel like :func:`whole`, without the update, for which other kernels are launched.

    `rescale` is the position of ``rescale_grad`` in the fields, -1 without it.
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
def lazy(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to the indexed rows.

    Chunk starts and sizes are in indexed rows.
    """
    if layout.coded:
        return compiled(_blocks(layout), layout.rule, parallel)
    rule, real, catch_up = layout.rule, layout.real, layout.catch_up
    reals, direct = (real,), layout.grad == layout.real
    update, noise, slots = rule.fn, rule.noise, len(rule.state)
    kinds, grad_kinds = layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    state_kinds, locate_row = layout.state, row_locator(layout.pitched)

    def lazy(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            grads = locate(table, tensor, first_grad, 0, grad_kinds)
            h, key = private(hyper, tensor), table[tensor, KEY]
            buffer = np.empty((1, width), real)
            for k in range(start, start + size):
                if k + AHEAD < table[tensor, SEGMENTS]:
                    ahead = listed(table, tensor, ROWS, k + AHEAD)
                    prefetch(locate_row(table, tensor, ADDRESS, ahead, width, kinds), width, True)
                    ahead = locate_row(table, tensor, first_state, ahead, width, state_kinds)
                    prefetch(ahead, width, True)
                begin = listed(table, tensor, STARTS, k)
                if direct and listed(table, tensor, STARTS, k + 1) == begin + 1:
                    start_of = listed(table, tensor, ORDER, begin) * width
                    source = locate(table, tensor, first_grad, start_of, reals)
                else:
                    source = inside(buffer)
                    collect(table, tensor, grads, k, 0, width, source, 0)
                row = listed(table, tensor, ROWS, k)
                weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
                states = locate_row(table, tensor, first_state, row, width, state_kinds)
                element = np.int64(table[tensor, OFFSET]) + row * width
                rounding, draw = dither_run(key, element), run(key, element)
                factor = real(missed(table, tensor, row)) if catch_up else real(1)
                for i in range(width):
                    weight, grad = read_weight(weights, i), load(source, i)[0]
                    state = load(states, i)
                    if catch_up:
                        weight = weight * factor
                    if noise:
                        new = update(weight, grad, state, h, normal(draw, i))
                    else:
                        new = update(weight, grad, state, h)
                    weight, state = checked(new, slots)
                    keep(weights, i, weight, rounding, dither)
                    keep_state(states, i, state, rounding, draws)
        table[0, DONE] = 1

    return compiled(lazy, rule, parallel)


@cache
def rows(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules with one state number for each row.

    Chunk starts and sizes are in rows of the tensor, or indexed rows.
    """
    return compiled(_rows(layout), layout.rule, parallel)


def _rows(layout: Layout) -> Callable:
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update: Any = rule.fn
    term: Any = rule.row
    slots, kinds, grad_kinds = len(rule.state), layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    state_kinds, locate_row = layout.state, row_locator(layout.pitched)

    def rows(chunks, table, hyper):
        def add_part(grads, place, buffer, at, n, h, terms, lanes):
            for i in range(n):
                grad = gradient(grads, place + i, buffer, at + i)
                store(terms, i, (term(grad, h),))
            add(lanes, terms, n)

        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            h, key = private(hyper, tensor), table[tensor, KEY]
            offset: Any = np.int64(table[tensor, OFFSET])
            grads = locate(table, tensor, first_grad, 0, grad_kinds)
            buffer = np.empty((1, GROUP * width), real) if sparse else None
            terms, lanes = scratch(1, PART, real), scratch(1, LANES, np.float64)
            means = scratch(1, GROUP, real)
            far = (start + size) * width - FAR if len(chunks) >= MANY else 0
            for begin in range(start, start + size, GROUP):
                end = min(begin + GROUP, start + size)
                for k in range(begin, end):
                    if sparse:
                        if k + AHEAD < table[tensor, SEGMENTS]:
                            ahead = listed(table, tensor, ROWS, k + AHEAD)
                            there = locate_row(table, tensor, ADDRESS, ahead, width, kinds)
                            prefetch(there, width, True)
                            there = locate_row(table, tensor, first_state, ahead, 1, state_kinds)
                            prefetch(there, 1, True)
                        collect(
                            table, tensor, grads, k, 0, width, inside(buffer), (k - begin) * width
                        )
                    added = 0.0
                    for first in range(0, width, BLOCK):
                        for part in range(first, min(first + BLOCK, width), PART):
                            place, at, n = (
                                k * width + part,
                                (k - begin) * width + part,
                                width - part,
                            )
                            if not sparse and place < far:
                                ahead = place + FAR
                                prefetch(locate(table, tensor, ADDRESS, ahead, kinds), PART, True)
                                prefetch(
                                    locate(table, tensor, first_grad, ahead, grad_kinds),
                                    PART,
                                    False,
                                )
                            if n >= PART:
                                add_part(grads, place, buffer, at, PART, h, terms, lanes)
                            else:
                                add_part(grads, place, buffer, at, n, h, terms, lanes)
                        added += total(lanes)[0]
                    store(means, k - begin, (real(added / width),))
                for k in range(begin, end):
                    row = listed(table, tensor, ROWS, k) if sparse else k
                    place, at = row * width, (k - begin) * width
                    weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
                    states = locate_row(table, tensor, first_state, row, 1, state_kinds)
                    element = offset + place
                    rounding = dither_run(key, element)
                    mean = load(means, k - begin)[0]
                    state = new = load(states, 0)
                    for i in range(width):
                        grad = gradient(grads, place + i, buffer, at + i)
                        weight = read_weight(weights, i)
                        weight, new = checked(update(weight, grad, state, h, mean), slots)
                        keep(weights, i, weight, rounding, dither)
                    element = offset // max(width, 1) + row
                    keep_state(states, 0, new, dither_run(key, element), draws)
        table[0, DONE] = 1

    return rows


@cache
def settle(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table)`` that applies deferred weight decay to all rows.

    Chunk starts and sizes are in rows.
    """
    real, kinds, dither = layout.real, layout.weight, layout.dither or None
    locate_row = row_locator(layout.pitched)

    def settle(chunks, table):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            width: Any = np.int64(table[tensor, WIDTH])
            key, offset = table[tensor, KEY], np.int64(table[tensor, OFFSET])
            for row in range(start, start + size):
                factor = real(missed(table, tensor, row))
                if factor == 1:
                    continue
                weights = locate_row(table, tensor, ADDRESS, row, width, kinds)
                element = offset + row * width
                rounding = dither_run(key, element)
                for i in range(width):
                    weight = read_weight(weights, i) * factor
                    keep(weights, i, weight, rounding, dither)

    return compiled(settle, layout.rule, parallel)


@cache
def sums(layout: Layout, step: int, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` for the partial sums of reduction `step`."""
    return compiled(_sums(layout, step), layout.rule, parallel)


def _sums(layout: Layout, step: int) -> Callable:
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count = rule.passes[step][0], rule.sums[step]
    state_kinds, grad_kinds = layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_weight, kinds = layout.summed
    reads = rule.reads[step]
    read_weights = kinds if reads[0] else ()
    read_grads = grad_kinds if reads[1] and not sparse else ()
    read_states = state_kinds if any(reads[2:]) else ()
    coded, slots = layout.coded, len(rule.state)
    decode_part: Any = _decode_part(layout) if coded else None

    def sums(chunks, table, hyper, partial):
        many = len(chunks) >= MANY

        def add_part(part, n, weights, states, first, grads, gathered, k, h, values, lanes):
            for i in range(n):
                grad = gradient(grads, part + i, gathered, k + i)
                weight, state = read_weight(weights, part + i), load(states, first + i)
                store(values, i, terms(weight, grad, state, h))
            add(lanes, values, n)

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
                    n = min(PART, end - part)
                    if part < far:
                        ahead = start + part + FAR
                        prefetch(
                            locate(table, tensor, first_weight, ahead, read_weights), PART, False
                        )
                        prefetch(
                            locate(table, tensor, first_state, ahead, read_states), PART, False
                        )
                        prefetch(locate(table, tensor, first_grad, ahead, read_grads), PART, False)
                    k, at = part - first, part
                    if coded:
                        at = 0
                        decode_part(table, tensor, start + part, n, states)
                    if n == PART:
                        add_part(
                            part, PART, weights, states, at, grads, gathered, k, h, values, lanes
                        )
                    else:
                        add_part(part, n, weights, states, at, grads, gathered, k, h, values, lanes)
                totals = total(lanes)
                for k in range(count):
                    partial[c, k] += totals[k]

    return sums


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


@cache
def finish(layout: Layout, step: int) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` that finalizes reduction `step`.

    Partial sums are added in the order of the chunks.
    """
    return compiled(_finish(layout, step), layout.rule, parallel=False)


def _finish(layout: Layout, step: int) -> Callable:
    fill, count = layout.rule.passes[step][1], layout.rule.sums[step]
    first_kept, kinds, keeps = layout.first_kept, layout.kept, bool(layout.kept)

    def finish(chunks, table, hyper, partial):
        first = 0
        for tensor in range(len(hyper)):
            total = np.zeros(count)
            while first < len(chunks) and chunks[first, 0] == tensor:
                total += partial[first]
                first += 1
            if keeps:
                numbers = locate(table, tensor, first_kept, 0, kinds)
                store(numbers, 0, fill(total, hyper[tensor], load(numbers, 0)))
            else:
                fill(total, hyper[tensor])

    return finish


@cache
def squares(kind: Any, real: Any, column: int, sparse: bool, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, partial)`` that sums the squares of gradients per chunk.

    The gradients' addresses are in `column`. Chunk starts and sizes are in elements, or in indexed
    rows.
    """
    return compiled(_squares((kind,), real, column, sparse), None, parallel)


def _squares(kinds: Any, real: Any, column: int, sparse: bool) -> Callable:
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
def totals() -> Callable:
    """Kernel ``(chunks, partial, sums)`` that adds the partial sums of each tensor."""

    def totals(chunks, partial, sums):
        for c in range(len(chunks)):
            sums[chunks[c, 0]] += partial[c]

    return compiled(totals, None, parallel=False)


@cache
def survey() -> Callable:
    """Kernel :func:`fastopt._kernels.segments.survey`."""
    return compiled(segments.survey, None, parallel=False)


@cache
def order_rows() -> Callable:
    """Kernel :func:`fastopt._kernels.segments.order_rows`."""
    return compiled(segments.order_rows, None, parallel=False)
