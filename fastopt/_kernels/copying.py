"""Copies of many segments of memory, and sums of parts of equal size, with all threads.

Stores of a copy to memory that no cache will hold bypass the caches: the processor then does not
read the target first, which saves a third of the traffic.

Tests: ``tests/distributed/test_plan.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.storage import load, locate, store
from fastopt.kernels.rule import scalar

CHUNK = 1 << 20
"""Bytes that a thread copies at a time."""

STREAM_FROM = 1 << 25
"""Bytes of a copy that no cache holds until MPI or the next pass reads them."""

PART = 1 << 12
"""Elements that a thread sums at a time: 16 KiB of float32, so that the sums stay in its cache."""

VECTOR = 32
"""Bytes of a store that bypasses the caches."""


@intrinsic
def move(typingctx, target, source, size):
    """Copy bytes between addresses of memory that does not overlap."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], ir.IntType(64)(1))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@intrinsic
def move_past_caches(typingctx, target, source):
    """Copy VECTOR bytes to an aligned address, with a store that bypasses the caches."""

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(64), VECTOR // 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], vector), align=1)
        stored = builder.store(value, builder.inttoptr(args[0], vector), align=VECTOR)
        one = builder.module.add_metadata([ir.IntType(32)(1)])
        stored.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Order memory: other threads and processes see all stores before any later one.

    Loads after it are not done before it. Stores past the caches take part.
    """

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@cache
def meet() -> Callable:
    """Kernel ``(counters, counter, rank, number)`` of ranks that share memory.

    It enters a number in a counter of a rank, if that is less, and returns whether those of all
    ranks have the number. What a rank wrote before, others then read.
    """

    def meet(counters, counter, rank, number):
        fence()
        if counters[rank, counter] < number:
            counters[rank, counter] = number
        for other in range(len(counters)):
            if counters[other, counter] < number:
                return False
        fence()
        return True

    return compiled(meet, None, False)


@scalar
def stream(target, source, size):
    """Copy bytes with stores that bypass the caches."""
    k = min(-target % VECTOR, size)
    move(target, source, k)
    while k + 4 * VECTOR <= size:
        for i in range(4):
            move_past_caches(target + k + i * VECTOR, source + k + i * VECTOR)
        k += 4 * VECTOR
    move(target + k, source + k, size - k)


@cache
def copy(parallel: bool) -> Callable:
    """Kernel ``(segments, used)`` with a row for each: source and target address, and bytes.

    If `parallel`, threads copy chunks of equal size, whatever the sizes of the segments. The copies
    bypass the caches if they have STREAM_FROM bytes or more, or `used`, which is how many bytes are
    used until they are read, is as much.
    """

    def copy(segments, used):
        ends = np.cumsum(segments[:, 2])
        total = ends[-1] if len(ends) else np.int64(0)
        past_caches = max(total, used) >= STREAM_FROM
        for c in prange(-(-total // CHUNK)):
            at, stop = c * CHUNK, min((c + 1) * CHUNK, total)
            k = np.searchsorted(ends, at, side="right")
            while at < stop:
                source, target, size = segments[k, 0], segments[k, 1], segments[k, 2]
                begin, end = at - (ends[k] - size), min(stop, ends[k])
                if past_caches:
                    stream(target + begin, source + begin, end - at)
                else:
                    move(target + begin, source + begin, end - at)
                at = end
                k += 1
            fence()

    return compiled(copy, None, parallel)


@cache
def convert(source: type, target: type) -> Callable:
    """Kernel ``(addresses, sizes)`` that converts segments from one storage type to another.

    `addresses` has a row for each segment, with the addresses of its source and its target, and
    `sizes` has the number of elements of each.
    """
    sources, targets = (source,), (target,)

    def convert(addresses, sizes):
        ends = np.cumsum(sizes)
        total = ends[-1] if len(ends) else np.int64(0)
        for c in prange(-(-total // PART)):
            at, stop = c * PART, min((c + 1) * PART, total)
            k = np.searchsorted(ends, at, side="right")
            while at < stop:
                first, count = at - (ends[k] - sizes[k]), min(stop, ends[k]) - at
                read = locate(addresses, k, 0, first, sources)
                written = locate(addresses, k, 1, first, targets)
                for i in range(count):
                    store(written, i, load(read, i))
                at += count
                k += 1

    return compiled(convert, None, parallel=True)


@cache
def add(kind: type, real: type, parallel: bool) -> Callable:
    """Kernel ``(parts, ends, total)`` that sums the arrays at the addresses `parts`, in order.

    `parts` has a row for each segment of `total`, with the addresses of the arrays of the storage
    type `kind` that are summed there in the arithmetic `real`; `ends` has the ends of the segments.
    """
    kinds = (kind,)

    def add(parts, ends, total):
        for c in prange(-(-len(total) // PART)):
            at, stop = c * PART, min((c + 1) * PART, len(total))
            k = np.searchsorted(ends, at, side="right")
            while at < stop:
                first = at - (ends[k - 1] if k > 0 else 0)
                sums = total[at : min(stop, ends[k])]
                part = locate(parts, k, 0, first, kinds)
                for i in range(len(sums)):
                    sums[i] = real(load(part, i)[0])
                for r in range(1, parts.shape[1]):
                    part = locate(parts, k, r, first, kinds)
                    for i in range(len(sums)):
                        sums[i] += load(part, i)[0]
                at += len(sums)
                k += 1

    return compiled(add, None, parallel)
