"""CUDA kernels: the counterparts of :mod:`fastopt._kernels.cpu`, derived from the same rules.

They take the same three arrays, on the device, and call the same scalar functions. Only the
distribution of work differs: a block takes a row of ``chunks``, and its threads stride over the
elements. Sums have the same order as on the CPU: a warp has the 32 partial sums of
:mod:`fastopt._kernels.lanes`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from fastopt._kernels import cuda_packs as packs
from fastopt._kernels import elements
from fastopt._kernels.compiling import created, name_entry
from fastopt._kernels.lanes import BLOCK, LANES, MAXIMUM, SUM, added, scratch
from fastopt._kernels.layout import (
    ADDRESS,
    DONE,
    KEY,
    OFFSET,
    ROWS,
    SEGMENTS,
    WIDTH,
    Layout,
    wide_of,
)
from fastopt._kernels.noise import dither_run, run
from fastopt._kernels.segments import listed, scattered, summed
from fastopt._kernels.storage import given, load, locate, private, store
from fastopt._kernels.weights import read_weight
from fastopt.kernels.rule import Rule, scalar

THREADS = 256
"""Threads of a block."""

WARPS = 4
"""Warps of a block in the reduction kernels."""

ALL_LANES = 0xFFFFFFFF
"""Mask of the lanes of a warp."""

BLOCKS = 32
"""Blocks of terms that are summed before other groups, like the blocks of a chunk on the CPU."""


def compiled(kernel: Callable, rule: Rule | None) -> Callable:
    """Compile `kernel` on first launch, or load it from numba's disk cache."""
    name_entry(kernel, rule, "cuda")
    return created(cuda.jit, kernel)


@scalar
def exchange(value, distance):
    """Return the value of the lane whose number differs in the bit `distance`."""
    return cuda.shfl_xor_sync(ALL_LANES, value, distance)


@scalar
def meet():
    """Wait for the other lanes of the warp."""
    cuda.syncwarp()


@scalar
def warp_sum(value):
    """Return the sum of a value of each lane of a warp, added pairwise by halves, to all lanes."""
    half = LANES // 2
    while half:
        value += exchange(value, half)
        half //= 2
    return value


@scalar
def chunk_of(chunks, c, table):
    """Return the tensor of a chunk, its first item and the number of items, 0 in a skipped step."""
    tensor = chunks[c, 0]
    return tensor, chunks[c, 1], np.int64(0) if table[tensor, DONE] else chunks[c, 2]


@cache
def dense(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to every element in place.

    `hyper` has a record for each tensor, or is a tuple of the numbers that all tensors share.

    A thread updates packs of consecutive elements, and single ones at the end of a chunk, of arrays
    that are not aligned, and of row-sparse gradients.
    """
    rule, real, sparse, record = layout.rule, layout.real, layout.sparse, layout.record
    update, slots, pack = elements.element_step(layout), len(rule.state), packs.pack_size(layout)
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad, wide = layout.first_state, layout.first_grad, layout.wide_grad
    addresses, reads = (*range(ADDRESS, first_state + slots), first_grad), layout.read_weights

    def dense(chunks, table, hyper):
        c, t, across = cuda.blockIdx.x, np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
        tensor, start, size = chunk_of(chunks, c, table)
        weights = locate(table, tensor, ADDRESS, start, kinds)
        states = locate(table, tensor, first_state, start, state_kinds)
        grads = locate(table, tensor, first_grad, 0 if sparse else start, grad_kinds)
        h, key = given(hyper, tensor, record), table[tensor, KEY]
        element = np.int64(table[tensor, OFFSET]) + start
        draw, done = run(key, element), np.int64(0)

        def step(copies, slot, at, i, weight, state, grad, rounding):
            weight, state = update(weight, grad, state, h, real(1), draw, i)
            elements.keep(copies, at, weight, rounding, dither)
            elements.keep_state(slot, at, state, rounding, draws)

        if not sparse and is_aligned(table, tensor, addresses):
            done = size // pack * pack
            for i in range(t * pack, done, across * pack):
                copies = packs.begin_pack(weights, i, pack, False, reads)
                slot = packs.begin_pack(states, i, pack, True, slots)
                source = packs.begin_pack(grads, i, pack, True, 1)
                rounding = dither_run(key, element + i)
                for k in range(pack):
                    weight, state, grad = read_weight(copies, k), load(slot, k), load(source, k)[0]
                    step(copies, slot, k, i + k, weight, state, grad, rounding)
                packs.end_pack(weights, i, pack, False, copies)
                packs.end_pack(states, i, pack, True, slot)
        rounding = dither_run(key, element)
        for i in range(done + t, size, across):
            weight, state = read_weight(weights, i), load(states, i)
            if sparse:
                grad = scattered(table, tensor, grads, start + i, real(0), wide)
            else:
                grad = load(grads, i)[0]
            step(weights, states, i, i, weight, state, grad, rounding)

    return compiled(dense, rule)


@cache
def lazy(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies the rule to the indexed rows in place.

    Chunk starts and sizes are in indexed rows. Threads in y take rows, two at a time, and threads
    in x take elements.
    """
    rule, real, catch_up, record = layout.rule, layout.real, layout.catch_up, layout.record
    update, wide = elements.element_step(layout), layout.wide_grad
    kinds, state_kinds, grad_kinds = layout.weight, layout.state, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad = layout.first_state, layout.first_grad

    def lazy(chunks, table, hyper):
        c, t, across = cuda.blockIdx.x, np.int64(cuda.threadIdx.x), np.int64(cuda.blockDim.x)
        tensor, start, size = chunk_of(chunks, c, table)
        width: Any = np.int64(table[tensor, WIDTH])
        h, key = given(hyper, tensor, record), table[tensor, KEY]
        offset = np.int64(table[tensor, OFFSET])
        grads = locate(table, tensor, first_grad, 0, grad_kinds)

        def row_at(k):
            row = listed(table, tensor, ROWS, k)
            weights = locate(table, tensor, ADDRESS, row * width, kinds)
            states = locate(table, tensor, first_state, row * width, state_kinds)
            element = offset + row * width
            rounding, draw = dither_run(key, element), run(key, element)
            factor = real(elements.pending_decay(table, tensor, row)) if catch_up else real(1)
            return weights, states, k, rounding, draw, factor

        def taken(place, i):
            weight, state = read_weight(place[0], i), load(place[1], i)
            return weight, state, summed(table, tensor, grads, place[2], i, wide)

        def step(place, i, values):
            weights, states, _, rounding, draw, factor = place
            weight, state, grad = values
            weight, state = update(weight, grad, state, h, factor, draw, i)
            elements.keep(weights, i, weight, rounding, dither)
            elements.keep_state(states, i, state, rounding, draws)

        k, height = start + cuda.threadIdx.y, np.int64(cuda.blockDim.y)
        last = min(start + size, np.int64(table[tensor, SEGMENTS]))
        while k + height < last:
            one, other = row_at(k), row_at(k + height)
            for i in range(t, width, across):
                values, others = taken(one, i), taken(other, i)
                step(one, i, values)
                step(other, i, others)
            k += 2 * height
        if k < last:
            one = row_at(k)
            for i in range(t, width, across):
                step(one, i, taken(one, i))

    return compiled(lazy, rule)


@scalar
def is_aligned(table, tensor, columns):
    """Whether all addresses in `columns` of a table are multiples of ALIGNMENT."""
    bits = np.uint64(0)
    for column in columns:
        bits |= table[tensor, column]
    return bits & np.uint64(packs.ALIGNMENT - 1) == 0


HELD = 8
"""Sums of a repeated row's gradients that each lane of a warp keeps; more are summed twice."""


@cache
def rows(layout: Layout) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules that use the mean of a row.

    Chunk starts and sizes are in rows of the tensor, or indexed rows; a warp takes a row.
    """
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    update: Any = elements.element_step(layout)
    term: Any = rule.row
    kinds, grad_kinds = layout.weight, (layout.grad,)
    dither, draws = layout.dither or None, layout.keyed or None
    first_state, first_grad, wide = layout.first_state, layout.first_grad, layout.wide_grad
    record, grad_real, of_rows = layout.record, wide[0], layout.first_row_state
    cell_kinds, state_kinds = layout.split_state
    join, split = elements.row_split(layout)

    def rows(chunks, table, hyper):
        held = cuda.local.array(HELD, grad_real)
        c, lane, warp = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        tensor, start, size = chunk_of(chunks, c, table)
        width: Any = np.int64(table[tensor, WIDTH])
        h, key = given(hyper, tensor, record), table[tensor, KEY]
        offset = np.int64(table[tensor, OFFSET])
        grads = locate(table, tensor, first_grad, 0, grad_kinds)
        if sparse:
            size = min(size, np.int64(table[tensor, SEGMENTS]) - start)
        for k in range(start + warp, start + size, WARPS):
            row: Any = listed(table, tensor, ROWS, k) if sparse else k
            weights = locate(table, tensor, ADDRESS, row * width, kinds)
            cells = locate(table, tensor, first_state, row * width, cell_kinds)
            states = locate(table, tensor, of_rows, row, state_kinds)
            state = left = load(states, 0)
            element = offset + row * width
            rounding = dither_run(key, element)
            total = 0.0
            for block in range(0, width, BLOCK):
                value = 0.0
                for i in range(block + lane, min(block + BLOCK, width), LANES):
                    if sparse:
                        grad = summed(table, tensor, grads, k, i, wide)
                        if i < HELD * LANES:
                            held[i // LANES] = grad
                    else:
                        grad = load(grads, row * width + i)[0]
                    value += np.float64(real(term(grad, h)))
                total += warp_sum(value)
            mean = real(total / width)
            for i in range(lane, width, LANES):
                weight = read_weight(weights, i)
                if not sparse:
                    grad = load(grads, row * width + i)[0]
                elif i < HELD * LANES:
                    grad = held[i // LANES]
                else:
                    grad = summed(table, tensor, grads, k, i, wide)
                weight, new = update(weight, grad, join(cells, i, state), h, real(1), mean, i)
                elements.keep(weights, i, weight, rounding, dither)
                left = split(cells, i, new, rounding, draws)
            meet()  # all lanes have read the state
            if lane == 0:
                element = offset // max(width, 1) + row
                elements.keep_state(states, 0, left, dither_run(key, element), draws)

    return compiled(rows, rule)


@cache
def flush_decay(layout: Layout) -> Callable:
    """Kernel ``(chunks, table)`` that applies deferred weight decay to all rows.

    Chunk starts and sizes are in rows. :func:`mark_decay` then marks the decay as applied.
    """
    real, kinds, dither = layout.real, layout.weight, layout.dither or None

    def flush_decay(chunks, table):
        c = cuda.blockIdx.x
        tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        width = np.int64(table[tensor, WIDTH])
        key, offset = table[tensor, KEY], np.int64(table[tensor, OFFSET])
        for row in range(start + cuda.threadIdx.y, start + size, cuda.blockDim.y):
            factor = real(elements.pending_decay(table, tensor, row))
            if factor != 1:
                weights = locate(table, tensor, ADDRESS, row * width, kinds)
                element = offset + row * width
                rounding = dither_run(key, element)
                for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                    weight = read_weight(weights, i) * factor
                    elements.keep(weights, i, weight, rounding, dither)

    return compiled(flush_decay, layout.rule)


@cache
def mark_decay(sparse: bool) -> Callable:
    """Kernel ``(chunks, table)`` that marks decay as applied, of the indexed rows or of all.

    Chunk starts and sizes are in rows.
    """

    def mark_decay(chunks, table):
        c = cuda.blockIdx.x
        tensor, start, size = chunk_of(chunks, c, table)
        if sparse:
            size = min(size, np.int64(table[tensor, SEGMENTS]) - start)
        first = cuda.threadIdx.x + cuda.threadIdx.y * cuda.blockDim.x
        for k in range(start + first, start + size, cuda.blockDim.x * cuda.blockDim.y):
            elements.mark_applied(table, tensor, listed(table, tensor, ROWS, k) if sparse else k)

    return compiled(mark_decay, None)


@scalar
def chunk_lane(pack):
    """Return the chunk of a lane in reductions, and the first element that it takes.

    A pack has `pack` elements, so that a block of LANES elements has ``LANES // pack`` packs: as
    many lanes take a chunk, and a warp `pack` chunks. A lane has the partial sums of its elements.
    """
    across = LANES // pack
    warp = np.int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.y
    lane = np.int64(cuda.threadIdx.x)
    return warp * pack + lane // across, lane % across * pack


@scalar
def chunk_or_none(chunks, c):
    """Return chunk `c`, or an empty one if there are fewer."""
    index = min(c, np.int64(len(chunks) - 1))
    return chunks[index, 0], chunks[index, 1], chunks[index, 2] if index == c else np.int64(0)


@scalar
def lanes_merged(values, pack, merge):
    """Return the partial sums of the lanes of a chunk, merged pairwise by halves.

    `values` has `pack` of them, of consecutive elements.
    """
    half = LANES // 2
    while half >= pack:
        for k in range(pack):
            values[k] = merge(values[k], exchange(values[k], half // pack))
        half //= 2
    while half:
        for k in range(half):
            values[k] = merge(values[k], values[k + half])
        half //= 2
    return values[0]


@cache
def sums(layout: Layout, step: int) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` for the partial sums of reduction `step`.

    A chunk has at most BLOCK elements; a warp takes as many chunks as a pack has elements, see
    :func:`chunk_lane`.
    """
    rule, real, sparse = layout.rule, layout.real, layout.sparse
    terms, count, pack = rule.passes[step][0], rule.sums[step], packs.sum_pack(layout)
    state_kinds, grad_kinds, slots = layout.state, (layout.grad,), len(rule.state)
    first_state, first_grad, wide = layout.first_state, layout.first_grad, layout.wide_grad
    first_weight, kinds = layout.summed
    columns = (
        *(first_weight + k for k in range(len(kinds))),
        *(first_state + k for k in range(slots)),
        first_grad,
    )
    _, _, merge, take = MAXIMUM if rule.passes[step].largest else SUM

    def sums(chunks, table, hyper, partial):
        c, first = chunk_lane(pack)
        tensor, start, size = chunk_or_none(chunks, c)
        weights = locate(table, tensor, first_weight, start, kinds)
        states = locate(table, tensor, first_state, start, state_kinds)
        grads = locate(table, tensor, first_grad, 0 if sparse else start, grad_kinds)
        h, parts = private(hyper, tensor), scratch(count, pack, np.float64)
        whole = np.int64(0)
        if not sparse and is_aligned(table, tensor, columns):
            whole = size // pack * pack

        def add(k, weight, state, grad):
            store(parts, k, take(load(parts, k), terms(weight, grad, state, h), real))

        i = first
        while i < whole:
            copies, slot = packs.read_pack(weights, i, pack), packs.read_pack(states, i, pack)
            source = packs.read_pack(grads, i, pack)
            for k in range(pack):
                add(k, read_weight(copies, k), load(slot, k), load(source, k)[0])
            i += LANES
        while i < size:
            for k in range(pack):
                if i + k < size:
                    weight, state = read_weight(weights, i + k), load(states, i + k)
                    if sparse:
                        grad = scattered(table, tensor, grads, start + i + k, real(0), wide)
                    else:
                        grad = load(grads, i + k)[0]
                    add(k, weight, state, grad)
            i += LANES
        for j in range(count):
            value = lanes_merged(parts[j], pack, merge)
            if first == 0 and c < len(chunks):
                partial[c, j] = value

    return compiled(sums, rule)


@cache
def totals(count: int, largest: bool = False) -> Callable:
    """Kernel ``(firsts, partial, total)`` that adds the partial sums of each tensor.

    With `largest`, it takes the largest of them instead.

    The partial sums of tensor t are in rows ``firsts[t]`` to ``firsts[t + 1]`` of `partial`. A
    block takes a tensor: each thread adds a group of BLOCKS, and the first thread the groups' sums,
    in order.
    """
    merge = (MAXIMUM if largest else SUM).merge

    def totals(firsts, partial, total):
        groups = cuda.shared.array(THREADS, np.float64)
        values = cuda.local.array(BLOCKS, np.float64)
        tensor, t = cuda.blockIdx.x, np.int64(cuda.threadIdx.x)
        end = firsts[tensor + 1]
        for k in range(count):
            whole = 0.0
            for first in range(firsts[tensor], end, BLOCKS * THREADS):
                group = first + BLOCKS * t
                part = 0.0
                if group + BLOCKS <= end:
                    for c in range(BLOCKS):  # all loads are issued before the first addition
                        values[c] = partial[group + c, k]
                    for c in range(BLOCKS):
                        part = merge(part, values[c])
                else:
                    for c in range(group, end):
                        part = merge(part, partial[c, k])
                groups[t] = part
                cuda.syncthreads()
                if t == 0:
                    for other in range(min(np.int64(THREADS), -(-(end - first) // BLOCKS))):
                        whole = merge(whole, groups[other])
                cuda.syncthreads()
            if t == 0:
                total[tensor, k] = whole

    return compiled(totals, None)


@cache
def finish(layout: Layout, step: int) -> Callable:
    """Kernel ``(table, hyper, total)`` that finalizes reduction `step` for each tensor."""
    fill = layout.rule.passes[step][1]
    first_kept, kinds, keeps = layout.first_kept, layout.kept, bool(layout.kept)

    def finish(table, hyper, total):
        tensor = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if tensor < len(hyper) and not table[tensor, DONE]:
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
    row; a warp takes as many chunks as a pack has elements, see :func:`chunk_lane`.
    """
    kinds, wide, pack = (kind,), wide_of(kind), packs.square_pack(kind, sparse)

    def squares(chunks, table, partial):
        c, first = chunk_lane(pack)
        tensor, start, size = chunk_or_none(chunks, c)
        grads = locate(table, tensor, column, 0 if sparse else start, kinds)
        (parts,) = scratch(1, pack, np.float64)
        whole = np.int64(0)
        if sparse:
            segments = np.int64(table[tensor, SEGMENTS])
            size = np.int64(table[tensor, WIDTH]) if size and start < segments else np.int64(0)
        elif is_aligned(table, tensor, (column,)):
            whole = size // pack * pack
        i = first
        while i < whole:
            source = packs.read_pack(grads, i, pack)
            for k in range(pack):
                parts[k] += np.float64(load(source, k)[0]) ** 2
            i += LANES
        while i < size:
            for k in range(pack):
                if i + k < size:
                    if sparse:
                        grad = summed(table, tensor, grads, start, i + k, wide)
                    else:
                        grad = load(grads, i + k)[0]
                    parts[k] += np.float64(grad) ** 2
            i += LANES
        value = lanes_merged(parts, pack, added)
        if first == 0 and c < len(chunks):
            partial[c, 0] = value

    return compiled(squares, None)


@cache
def copy(kind: Any, index: Any) -> Callable:
    """Kernel ``(addresses, layout, size)`` that copies an array with any strides.

    `addresses` has the addresses of target and source, whose elements have the unsigned type
    `kind`. `layout` has three rows: the lengths of the axes, and the strides of target and source
    in elements. `index` is an unsigned type for the numbers of elements.
    """
    kinds = (kind,)

    def copy(addresses, layout, size):
        stride = np.int64(cuda.blockDim.x) * cuda.gridDim.x
        first = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        for element in range(first, size, stride):
            rest, to, of = index(element), np.int64(0), np.int64(0)
            for back in range(layout.shape[1]):
                axis = layout.shape[1] - 1 - back
                length = index(layout[0, axis])
                at = np.int64(rest % length)
                rest = index(rest // length)
                to += at * layout[1, axis]
                of += at * layout[2, axis]
            source = locate(addresses, 0, 1, of, kinds)[0]
            locate(addresses, 0, 0, to, kinds)[0][0] = source[0]

    return compiled(copy, None)
