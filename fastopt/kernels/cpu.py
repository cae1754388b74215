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

from fastopt.kernels import numpy_abi, segments
from fastopt.kernels.advance import advance
from fastopt.kernels.compiling import compiled
from fastopt.kernels.context import cube, line, matrix
from fastopt.kernels.elements import gradient, keep, keep_state, missed
from fastopt.kernels.lanes import BLOCK, LANES, PART, add, add_squares, scratch, total
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
from fastopt.kernels.noise import dither_key, normal, run
from fastopt.kernels.numpy_abi import FITS, admit
from fastopt.kernels.rule import Rule, scalar
from fastopt.kernels.segments import collect, gather, listed
from fastopt.kernels.storage import checked, inside, load, locate, prefetch, private, store
from fastopt.kernels.weights import read_weight

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
    "totals",
    "whole",
]

AHEAD = 8
"""Listed rows between the one that is worked on and the one that is brought to the cache."""

FAR = 1024
"""Elements between one that is added up and one that is brought to the cache."""

GROUP = 4
"""Rows whose sums are added up before the first of them is updated, which has to wait for its sum
through a root and a division."""

MANY = 32
"""Chunks from which tensors are taken to be too large for a core's cache."""


@cache
def dense(layout: Layout, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper, context, objects)`` that applies the rule to every element.

    The last two are None; see :func:`whole`.
    """
    return _dense(layout, parallel)


@cache
def whole(layout: Layout, correct: Any, dtype: Any, carries: bool) -> Callable:
    """Kernel ``(None, None, None, context, objects)`` for whole calls on small tensors.

    It checks the arguments of the call, counts it, and applies the rule: nothing has changed if
    it returns a negative number. `context` is that of the arrays in :data:`CONTEXT`; `objects` is
    the id of the tuple of the call's arguments, which the interpreter's lock keeps alive, or 0 if
    they are checked already.
    """
    return _dense(layout, False, (correct, dtype, carries))


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
)
"""Arrays of a context, see :mod:`fastopt.kernels.advance` and :mod:`fastopt.kernels.numpy_abi`."""


def _dense(layout: Layout, parallel: bool, call: Any = None) -> Callable:
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update, noise, slots = rule.fn, rule.noise, len(rule.state)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    fused, keyed, record = call is not None, layout.keyed, rule.record(real)
    correct, dtype, carries = call or (None, None, False)
    rescale = rule.rescale

    def dense(chunks, table, hyper, context, objects):
        if fused:
            chunks, table = matrix(context, 0, np.int64), matrix(context, 1, np.uint64)
            hyper = line(context, 2, record)
            status = begin(context, table, objects, real, correct, dtype, carries, keyed, rescale)
            if status < 0:
                return status
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, ADDRESS, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            h, key = private(hyper, tensor), table[tensor, KEY]
            element = np.int64(table[tensor, OFFSET]) + start
            rounding, draw = dither_key(key, element), run(key, element)
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
                    keep(weights, i, weight, rounding, element + i, dither)
                    keep_state(states, i, state, rounding, element + i, draws)
        table[0, DONE] = 1
        return 0

    return compiled(dense, rule, parallel, nogil=not fused, also=(correct,))


@cache
def start(rule: Rule, real: Any, keyed: bool, correct: Any, dtype: Any, carries: bool) -> Callable:
    """Kernel like :func:`whole`, without the update: others follow."""
    rescale = rule.rescale

    def start(chunks, table, hyper, context, objects):
        table = matrix(context, 1, np.uint64)
        return begin(context, table, objects, real, correct, dtype, carries, keyed, rescale)

    return compiled(start, rule, parallel=False, nogil=False, also=(correct,))


@scalar
def begin(
    context: Any,
    table: Any,
    objects: Any,
    real: Any,
    correct: Any,
    dtype: Any,
    carries: Any,
    keyed: Any,
    rescale: Any,
) -> Any:
    """Check the arguments of a call, unless `objects` is 0, count it, and find its fields."""
    if objects != 0:
        places, guards = matrix(context, 4, np.uint64), cube(context, 5, np.uint64)
        written, known = matrix(context, 6, np.uint64), line(context, 7, np.uint64)
        length = np.int64(context[len(context) - 1])
        status = admit(table, guards, written, places, known, length, objects)
        if status < 0:
            return status
    fields, tensors = matrix(context, 3, real), matrix(context, 8, np.int64)
    counts, groups = line(context, 9, np.int64), cube(context, 10, np.float64)
    carried = line(context, 11, np.float64)
    advance(
        table, fields, tensors, counts, groups, carried, correct, dtype, carries, keyed, rescale
    )
    return FITS


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
                    ahead = listed(table, tensor, ROWS, k + AHEAD)
                    prefetch(locate(table, tensor, ADDRESS, ahead * width, kinds), width, True)
                    ahead = locate(table, tensor, first_state, ahead * width, state_kinds)
                    prefetch(ahead, width, True)
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
                rounding, draw = dither_key(key, element), run(key, element)
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
                            prefetch(
                                locate(table, tensor, ADDRESS, ahead * width, kinds), width, True
                            )
                            prefetch(
                                locate(table, tensor, first_state, ahead, state_kinds), 1, True
                            )
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
                    weights = locate(table, tensor, ADDRESS, place, kinds)
                    states = locate(table, tensor, first_state, row, state_kinds)
                    element = offset + place
                    rounding = dither_key(key, element)
                    mean = load(means, k - begin)[0]
                    state = new = load(states, 0)
                    for i in range(width):
                        grad = gradient(grads, place + i, buffer, at + i)
                        weight = read_weight(weights, i)
                        weight, new = checked(update(weight, grad, state, h, mean), slots)
                        keep(weights, i, weight, rounding, element + i, dither)
                    element = offset // max(width, 1) + row
                    keep_state(states, 0, new, dither_key(key, element), element, draws)
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
            key, offset = table[tensor, KEY], np.int64(table[tensor, OFFSET])
            for row in range(start, start + size):
                factor = real(missed(table, tensor, row))
                if factor == 1:
                    continue
                weights = locate(table, tensor, ADDRESS, row * width, kinds)
                element = offset + row * width
                rounding = dither_key(key, element)
                for i in range(width):
                    weight = read_weight(weights, i) * factor
                    keep(weights, i, weight, rounding, element + i, dither)

    return compiled(settle, layout.rule, parallel)


@cache
def sums(layout: Layout, step: int, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` that adds up pass `step` of the rule per chunk."""
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count = rule.passes[step][0], rule.sums[step]
    state_kinds, grad_kinds = layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_weight, kinds = layout.summed
    reads = rule.reads[step]
    read_weights = kinds if reads[0] else ()
    read_grads = grad_kinds if reads[1] and not sparse else ()
    read_states = state_kinds if any(reads[2:]) else ()

    def sums(chunks, table, hyper, partial):
        many = len(chunks) >= MANY

        def add_part(part, n, weights, states, grads, gathered, k, h, values, lanes):
            for i in range(n):
                grad = gradient(grads, part + i, gathered, k + i)
                weight, state = read_weight(weights, part + i), load(states, part + i)
                store(values, i, terms(weight, grad, state, h))
            add(lanes, values, n)

        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, first_weight, start, kinds)
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
                    k = part - first
                    if n == PART:
                        add_part(part, PART, weights, states, grads, gathered, k, h, values, lanes)
                    else:
                        add_part(part, n, weights, states, grads, gathered, k, h, values, lanes)
                totals = total(lanes)
                for k in range(count):
                    partial[c, k] += totals[k]

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

    return compiled(squares, None, parallel)


@cache
def addresses() -> Callable:
    """Kernel :func:`fastopt.kernels.numpy_abi.addresses`."""
    return compiled(numpy_abi.addresses, None, parallel=False, nogil=False)


@cache
def enter() -> Callable:
    """Kernel :func:`fastopt.kernels.numpy_abi.enter`."""
    return compiled(numpy_abi.enter, None, parallel=False, nogil=False)


@cache
def totals() -> Callable:
    """Kernel ``(chunks, partial, sums)`` that adds up the sums of chunks for each tensor."""

    def totals(chunks, partial, sums):
        for c in range(len(chunks)):
            sums[chunks[c, 0]] += partial[c]

    return compiled(totals, None, parallel=False)


@cache
def survey() -> Callable:
    """Kernel :func:`fastopt.kernels.segments.survey`."""
    return compiled(segments.survey, None, parallel=False)


@cache
def order_rows() -> Callable:
    """Kernel :func:`fastopt.kernels.segments.order_rows`."""
    return compiled(segments.order_rows, None, parallel=False)
