"""The stages of an admitted call, one by one, for callers that do something between them.

:mod:`fastopt._kernels.front` goes through a call without a break. Where tensors are slices of
larger ones, sums of all slices are combined before a reduction ends, and elements are updated as
their gradients arrive (:mod:`fastopt.distributed.shard`).

Tests: ``tests/kernels/test_chunks.py``.
"""

from functools import cache

import numpy as np
from numba import types

from fastopt._kernels import front
from fastopt._kernels.admission import divide, shares_of, tensor_of
from fastopt._kernels.chunks import LINE
from fastopt._kernels.compiling import address_of, bind_to, compiled
from fastopt._kernels.lanes import larger
from fastopt._kernels.measuring import added
from fastopt._kernels.objects import call, doubles, words
from fastopt._kernels.record_words import context_at, loops_at, record_at
from fastopt.kernels.rule import scalar

IS_ASKED, CLIP, MEASURE, START, REDUCE, COMPLETE, PARTS, UPDATE = range(8)
"""Stages: return whether the hyper-parameters have been computed; clip units; sum the squares of
each gradient; count, and enter all addresses; sum the terms of a reduction; merge the sums of all
slices; update parts of tensors; update all, and copy back."""

share_of_call = scalar(front.share_call)


@scalar
def cut(place, count):
    """Return the number of elements before some work, in whole cache lines."""
    if place <= 0 or place >= count:
        return 0 if place <= 0 else count
    return place // LINE * LINE


@scalar
def update_parts(context, parts, count, share):
    """Update one share of parts of tensors: tensor, first element, number of elements."""
    total, before, chunk, shares = 0, 0, np.empty(3, np.int64), shares_of(context)
    for k in range(count):
        total += words(parts)[3 * k + 2]
    low, high = total * share // shares, total * (share + 1) // shares
    chunk[0], place = 0, np.int64(chunk.ctypes.data)
    for k in range(count):
        part = words(parts + 24 * k)
        tensor = tensor_of(context, part[0])
        record, kernels = record_at(tensor.record), loops_at(tensor.kernels)
        start, size = cut(low - before, part[2]), part[2]
        chunk[1], chunk[2] = part[1] + start, cut(high - before, size) - start
        if chunk[2] > 0 and record.size > 0:
            call(kernels.update, place, 1, record.row, record.fields, 0)
        before += size
    chunk[0] = 1  # a use after the calls: arrays are freed after their last one


PARTS_OF = -1
"""Phase of a call besides those of the front."""


def share_stage(at, phase, first, last, share):
    """Do one share of a phase, see :func:`fastopt._kernels.front.share_call`."""
    if phase == PARTS_OF:
        update_parts(context_at(at), first, last, share)
    else:
        share_of_call(at, phase, first, last, share)


@scalar
def merge_chunks(tensor, step, target):
    """Write the sums of a tensor, or maxima, from those of its chunks."""
    record, one = record_at(tensor.record), front.pass_of(tensor, step)
    count, largest, partial = one.count, one.largest, doubles(record.sums)
    for k in range(count):
        total = 0.0
        for c in range(record.flat_count):
            value = partial[count * c + k]
            total = larger(total, value) if largest else total + value
        target[k] = total


@scalar
def merge_slices(tensor, step, sums, width, apart, slices):
    """End a reduction with the sums of all slices of a tensor, which lie `apart`."""
    record, one = record_at(tensor.record), front.pass_of(tensor, step)
    count, finish = one.count, one.finish
    chunks, partial = np.zeros((slices, 3), np.int64), np.empty((slices, count))
    for s in range(slices):
        for k in range(count):
            partial[s, k] = doubles(sums)[s * apart + k]
    first, source = np.int64(chunks.ctypes.data), np.int64(partial.ctypes.data)
    call(finish, first, slices, record.row, record.fields, source)
    chunks[0, 0] = np.int64(partial[0, 0] > 0)  # a use after the call


def stage_call(at, name, n, step, place, width, slices):
    """Do a stage of the admitted call of `n` tensors; return 0, or the answer of IS_ASKED.

    Sums are at `place`, `width` of them for each tensor and reduction `step`, one after the other
    for each of the `slices`; so are the rows of PARTS, whose number is `step`.
    """
    context = context_at(at)
    if name == IS_ASKED:
        return 1 if front.is_asked(context) else 0
    if name == CLIP:
        front.order_and_clip(context, n)
    elif name == MEASURE:
        call(context.measure, at, n, 0, 0, 0)
        for k in range(n):
            doubles(place)[k] = added(tensor_of(context, k))
    elif name == START:
        for k in range(n):
            front.advance(context, tensor_of(context, k))
            front.begin(context, k)
    elif name == PARTS:
        divide(context, PARTS_OF, place, step, context.update_share)
    elif name == UPDATE:
        for phase in (front.UPDATES, front.COVERS, front.END):
            divide(context, phase, 0, n, context.update_share)
    else:
        if name == REDUCE:
            divide(context, front.REDUCTIONS + step, 0, n, context.update_share)
        for k in range(n):
            tensor = tensor_of(context, k)
            if step < loops_at(tensor.kernels).passes:
                sums = place + 8 * width * k
                if name == REDUCE:
                    merge_chunks(tensor, step, doubles(sums))
                else:
                    merge_slices(tensor, step, sums, width, width * n, slices)
    return 0


@cache
def stage():
    """Return the compiled function of :func:`stage_call`."""
    return bind_to(compiled(stage_call, None, parallel=False), *[types.int64] * 7)


@cache
def share() -> int:
    """Return the address of :func:`share_stage`."""
    return address_of(share_stage, front.ON_CALL, None)
