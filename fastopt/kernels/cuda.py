"""CUDA kernels: the counterparts of :mod:`fastopt.kernels.cpu`, derived from the same rules.

They take the same three arrays, on the device, and call the same scalar functions. Only the
distribution of work differs: a block takes a row of ``chunks``, and its threads stride over the
elements. Sums have the same order as on the CPU: a warp has the 32 partial sums of
:mod:`fastopt.kernels.lanes`.

Under numba's simulator the kernels and all functions that they call are plain Python.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba import cuda

from fastopt.kernels.compiling import compiled_kernels, keep_apart, log_uncached, name_entry
from fastopt.kernels.cuda_driver import SIMULATED, launch
from fastopt.kernels.elements import keep, keep_state, owed, pay
from fastopt.kernels.lanes import BLOCK, LANES, put
from fastopt.kernels.layout import ADDRESS, KEY, OFFSET, ROWS, SEGMENTS, WIDTH, Layout
from fastopt.kernels.noise import dither_run, normal, run
from fastopt.kernels.rule import Rule, scalar
from fastopt.kernels.segments import listed, scattered, summed
from fastopt.kernels.storage import checked, given, load, locate, private, store
from fastopt.kernels.weights import read_weight

__all__ = [
    "BLOCKS",
    "SIMULATED",
    "THREADS",
    "WARPS",
    "compiled",
    "copy",
    "dense",
    "finish",
    "launch",
    "lazy",
    "paid",
    "rows",
    "settle",
    "squares",
    "sums",
    "totals",
]

THREADS = 4 if SIMULATED else 256
"""Threads of a block; the simulator starts a Python thread for each."""

WARPS = 1 if SIMULATED else 4
"""Warps of a block in the reduction kernels."""

SUMMERS = WARPS * LANES
"""Threads of a block in the reduction kernels."""

BLOCKS = 32
"""Blocks of terms that are summed before other groups, like the blocks of a chunk on the CPU."""


def compiled(kernel: Callable, rule: Rule | None) -> Callable:
    """Compile `kernel` on first launch, or load it from numba's disk cache."""
    if SIMULATED:
        return cuda.jit(_quiet(kernel))
    name_entry(kernel, rule, "cuda")
    try:
        made = cuda.jit(cache=True)(kernel)
        keep_apart(made)
    except RuntimeError:
        log_uncached()
        made = cuda.jit(kernel)
    compiled_kernels.append(made)
    return made


def _quiet(kernel: Callable) -> Callable:
    """Wrap a kernel to suppress NumPy's warnings, which a GPU does not give."""
    errstate = np.errstate

    def quiet(*arguments: Any) -> None:
        with errstate(all="ignore"):
            kernel(*arguments)

    # The simulator replaces `cuda` in the globals of the function that it gets.
    return FunctionType(quiet.__code__, kernel.__globals__, closure=quiet.__closure__)


@scalar
def add_lanes(lanes, place, lane):
    """Sum the lanes of every warp pairwise by halves into its first lane, for each row."""
    half = LANES // 2
    while half:
        cuda.syncthreads()
        if lane < half:
            for k in range(len(lanes)):
                lanes[k, place] += lanes[k, place + half]
        half //= 2


@cache
def dense(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to every element in place.

    `hyper` has a record for each tensor, or is a tuple of the numbers that all tensors share.

    With a lazy layout, chunk starts and sizes are in indexed rows, and only these are updated;
    threads in y take rows, threads in x take elements.
    """
    rule, real, sparse, by_row = layout.rule, layout.real, layout.sparse, layout.lazy
    update, noise, slots, catch_up = rule.fn, rule.noise, len(rule.state), layout.catch_up
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    record = layout.record

    def dense(chunks, table, hyper):
        c = cuda.blockIdx.x
        tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        grads = locate(table, tensor, first_grad, 0, grad_kinds)
        h, key = given(hyper, tensor, record), table[tensor, KEY]
        first: Any
        last: Any
        count: Any
        if by_row:
            first, count = start, np.int64(table[tensor, WIDTH])
            last = min(start + size, np.int64(table[tensor, SEGMENTS]))
        else:
            first, last, count = np.int64(0), np.int64(1), size  # the chunk is one row

        def update_row(k):
            row = listed(table, tensor, ROWS, k) if by_row else np.int64(0)
            begin = row * count if by_row else start
            weights = locate(table, tensor, ADDRESS, begin, kinds)
            states = locate(table, tensor, first_state, begin, state_kinds)
            element = np.int64(table[tensor, OFFSET]) + begin
            rounding, draw = dither_run(key, element), run(key, element)
            factor = real(owed(table, tensor, row)) if catch_up else real(1)

            def taken(i):
                if by_row:
                    grad = summed(table, tensor, grads, k, i)
                elif sparse:
                    grad = scattered(table, tensor, grads, begin + i, real(0))
                else:
                    grad = load(grads, begin + i)[0]
                return read_weight(weights, i), load(states, i), grad

            def step(i, values):
                weight, state, grad = values
                if catch_up:
                    weight = weight * factor
                if noise:
                    new = update(weight, grad, state, h, normal(draw, i))
                else:
                    new = update(weight, grad, state, h)
                weight, state = checked(new, slots)
                keep(weights, i, weight, rounding, dither)
                keep_state(states, i, state, rounding, draws)

            i, across = np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
            if not by_row:
                while i + 3 * across < count:  # issue four loads before the first store
                    one, two = taken(i), taken(i + across)
                    three, four = taken(i + 2 * across), taken(i + 3 * across)
                    step(i, one)
                    step(i + across, two)
                    step(i + 2 * across, three)
                    step(i + 3 * across, four)
                    i += 4 * across
            while i < count:
                step(i, taken(i))
                i += across

        for k in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
            update_row(k)

    return compiled(dense, rule)


lazy = dense


@cache
def rows(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules with one state number for each row.

    Chunk starts and sizes are in rows of the tensor, or indexed rows; a warp takes a row.
    """
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update: Any = rule.fn
    term: Any = rule.row
    slots, kinds, grad_kinds = len(rule.state), layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad
    state_kinds, record = layout.state, layout.record

    def rows(chunks, table, hyper):
        lanes = cuda.shared.array((1, SUMMERS), np.float64)
        c, lane, warp = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        width: Any = np.int64(table[tensor, WIDTH])
        place = warp * LANES + lane
        h, key = given(hyper, tensor, record), table[tensor, KEY]
        offset = np.int64(table[tensor, OFFSET])
        grads = locate(table, tensor, first_grad, 0, grad_kinds)
        if sparse:
            size = min(size, np.int64(table[tensor, SEGMENTS]) - start)
        for first in range(0, size, WARPS):  # all threads do equal iterations: they synchronize
            active = first + warp < size
            k = start + first + warp
            row: Any = np.int64(0)
            if active:
                row = listed(table, tensor, ROWS, k) if sparse else k
            weights = locate(table, tensor, ADDRESS, row * width, kinds)
            states = locate(table, tensor, first_state, row, state_kinds)
            total = 0.0
            for block in range(0, width, BLOCK):
                lanes[0, place] = 0
                if active:
                    for i in range(block + lane, min(block + BLOCK, width), LANES):
                        if sparse:
                            grad = summed(table, tensor, grads, k, i)
                        else:
                            grad = load(grads, row * width + i)[0]
                        lanes[0, place] += np.float64(real(term(grad, h)))
                add_lanes(lanes, place, lane)
                cuda.syncthreads()
                total += lanes[0, warp * LANES]
                cuda.syncthreads()
            mean = real(total / width)
            if active:
                state = new = load(states, 0)
                element = offset + row * width
                rounding = dither_run(key, element)
                for i in range(lane, width, LANES):
                    if sparse:
                        grad = summed(table, tensor, grads, k, i)
                    else:
                        grad = load(grads, row * width + i)[0]
                    weight = read_weight(weights, i)
                    weight, new = checked(update(weight, grad, state, h, mean), slots)
                    keep(weights, i, weight, rounding, dither)
            cuda.syncthreads()  # all lanes have read the state
            if active and lane == 0:
                element = offset // max(width, 1) + row
                keep_state(states, 0, new, dither_run(key, element), draws)

    return compiled(rows, rule)


@cache
def settle(layout: Layout) -> Callable:
    """Kernel ``(chunks, table)`` that applies deferred weight decay to all rows.

    Chunk starts and sizes are in rows. :func:`paid` then marks the decay as applied.
    """
    real, kinds, dither = layout.real, layout.weight, layout.dither or None

    def settle(chunks, table):
        c = cuda.blockIdx.x
        tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        width = np.int64(table[tensor, WIDTH])
        key, offset = table[tensor, KEY], np.int64(table[tensor, OFFSET])
        for row in range(start + cuda.threadIdx.y, start + size, cuda.blockDim.y):
            factor = real(owed(table, tensor, row))
            if factor != 1:
                weights = locate(table, tensor, ADDRESS, row * width, kinds)
                element = offset + row * width
                rounding = dither_run(key, element)
                for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                    weight = read_weight(weights, i) * factor
                    keep(weights, i, weight, rounding, dither)

    return compiled(settle, layout.rule)


@cache
def paid(sparse: bool) -> Callable:
    """Kernel ``(chunks, table)`` that marks decay as applied, of the indexed rows or of all.

    Chunk starts and sizes are in rows.
    """

    def paid(chunks, table):
        c = cuda.blockIdx.x
        tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        if sparse:
            size = min(size, np.int64(table[tensor, SEGMENTS]) - start)
        first = cuda.threadIdx.x + cuda.threadIdx.y * cuda.blockDim.x
        for k in range(start + first, start + size, cuda.blockDim.x * cuda.blockDim.y):
            pay(table, tensor, listed(table, tensor, ROWS, k) if sparse else k)

    return compiled(paid, None)


@cache
def sums(layout: Layout, step: int) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` for the partial sums of reduction `step`.

    A chunk has at most BLOCK elements; a warp takes a chunk.
    """
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count = rule.passes[step][0], rule.sums[step]
    state_kinds, grad_kinds = layout.state, (layout.grad,)
    first_state, first_grad = layout.first_state, layout.first_grad
    first_weight, kinds = layout.summed

    def sums(chunks, table, hyper, partial):
        values = cuda.shared.array((count, SUMMERS), real)
        lanes = cuda.shared.array((count, SUMMERS), np.float64)
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        c, place = cuda.blockIdx.x * WARPS + warp, warp * LANES + lane
        for k in range(count):
            lanes[k, place] = 0
        if c < len(chunks):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            weights = locate(table, tensor, first_weight, start, kinds)
            states = locate(table, tensor, first_state, start, state_kinds)
            grads = locate(table, tensor, first_grad, 0 if sparse else start, grad_kinds)
            h = private(hyper, tensor)
            for i in range(lane, size, LANES):
                if sparse:
                    grad = scattered(table, tensor, grads, start + i, real(0))
                else:
                    grad = load(grads, i)[0]
                put(values, place, terms(read_weight(weights, i), grad, load(states, i), h))
                for k in range(count):
                    lanes[k, place] += np.float64(values[k, place])
        add_lanes(lanes, place, lane)
        if lane == 0 and c < len(chunks):
            for k in range(count):
                partial[c, k] = lanes[k, place]

    return compiled(sums, rule)


@cache
def totals(count: int) -> Callable:
    """Kernel ``(firsts, partial, total)`` that adds the partial sums of each tensor.

    The partial sums of tensor t are in rows ``firsts[t]`` to ``firsts[t + 1]`` of `partial`; a
    block takes a tensor.
    """

    def totals(firsts, partial, total):
        tensor = cuda.blockIdx.x
        first, end = firsts[tensor], firsts[tensor + 1]
        for group in range(first + BLOCKS * cuda.threadIdx.x, end, BLOCKS * cuda.blockDim.x):
            for k in range(count):
                added = 0.0
                for c in range(group, min(group + BLOCKS, end)):
                    added += partial[c, k]
                partial[group, k] = added
        cuda.syncthreads()
        for k in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            added = 0.0
            for group in range(first, end, BLOCKS):
                added += partial[group, k]
            total[tensor, k] = added

    return compiled(totals, None)


@cache
def finish(layout: Layout, step: int) -> Callable:
    """Kernel ``(table, hyper, total)`` that finalizes reduction `step` for each tensor."""
    fill = layout.rule.passes[step][1]
    first_kept, kinds, keeps = layout.first_kept, layout.kept, bool(layout.kept)

    def finish(table, hyper, total):
        tensor = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if tensor < len(hyper):
            if keeps:
                numbers = locate(table, tensor, first_kept, 0, kinds)
                store(numbers, 0, fill(total[tensor], hyper[tensor], load(numbers, 0)))
            else:
                fill(total[tensor], hyper[tensor])

    return compiled(finish, layout.rule)


@cache
def squares(kind: Any, column: int, sparse: bool) -> Callable:
    """Kernel ``(chunks, table, partial)`` that sums the squares of gradients per chunk.

    The gradients' addresses are in `column`. A chunk has at most BLOCK elements, or is an indexed
    row; a warp takes a chunk.
    """
    kinds = (kind,)

    def squares(chunks, table, partial):
        lanes = cuda.shared.array((1, SUMMERS), np.float64)
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        c, place = cuda.blockIdx.x * WARPS + warp, warp * LANES + lane
        lanes[0, place] = 0
        if c < len(chunks):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            grads = locate(table, tensor, column, 0 if sparse else start, kinds)
            if sparse:
                segments = np.int64(table[tensor, SEGMENTS])
                size = np.int64(table[tensor, WIDTH]) if start < segments else np.int64(0)
            for i in range(lane, size, LANES):
                grad = summed(table, tensor, grads, start, i) if sparse else load(grads, i)[0]
                lanes[0, place] += np.float64(grad) * np.float64(grad)
        add_lanes(lanes, place, lane)
        if lane == 0 and c < len(chunks):
            partial[c, 0] = lanes[0, place]

    return compiled(squares, None)


@cache
def copy() -> Callable:
    """Kernel ``(addresses, layout, size, itemsize)`` that copies an array with any strides.

    `addresses` has the addresses of target and source. `layout` has three rows: the lengths of the
    axes, and the strides of target and source in bytes.
    """
    byte = (np.uint8,)

    def copy(addresses, layout, size, itemsize):
        stride = cuda.blockDim.x * cuda.gridDim.x
        for element in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, size, stride):
            rest, to, of = element, np.int64(0), np.int64(0)
            for back in range(layout.shape[1]):
                axis = layout.shape[1] - 1 - back
                at = rest % layout[0, axis]
                rest //= layout[0, axis]
                to += at * layout[1, axis]
                of += at * layout[2, axis]
            target, source = locate(addresses, 0, 0, to, byte), locate(addresses, 0, 1, of, byte)
            for k in range(itemsize):
                store(target, k, load(source, k))

    return compiled(copy, None)
