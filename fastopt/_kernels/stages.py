"""The stages of an admitted call, one by one, for callers that do something between them.

:mod:`fastopt._kernels.front` goes through a call without a break. Where tensors are slices of
larger ones, sums of all slices are combined before a reduction ends, and elements are updated as
their gradients arrive (:mod:`fastopt.distributed.stages`).

Tests: ``tests/kernels/test_slices.py``.
"""

from functools import cache

import numpy as np
from numba import types

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import tensor_of
from fastopt._kernels.chunks import LINE
from fastopt._kernels.compiling import address_of, bind_to, compiled
from fastopt._kernels.front import (
    COVERS,
    END,
    ON_CALL,
    REDUCTIONS,
    UPDATES,
    advance,
    begin,
    order_all,
    share_call,
)
from fastopt._kernels.lanes import larger
from fastopt._kernels.measuring import added
from fastopt._kernels.objects import call, doubles, words
from fastopt.kernels.rule import scalar

CLIP, MEASURE, START, REDUCE, COMPLETE, PARTS, UPDATE = range(7)
"""Stages: clip units; sum the squares of each gradient; count, and enter all addresses; sum the
terms of a reduction; merge the sums of all slices; update parts of tensors; update all, and copy
back."""

share_of_call = scalar(share_call)


@scalar
def cut(place, count):
    """Return the number of elements before some work, in whole cache lines."""
    if place <= 0 or place >= count:
        return 0 if place <= 0 else count
    return place // LINE * LINE


@scalar
def update_parts(x, parts, count, share):
    """Update one share of parts of tensors: tensor, first element, number of elements."""
    total, before, chunk = 0, 0, np.empty(3, np.int64)
    for k in range(count):
        total += words(parts)[3 * k + 2]
    low, high = total * share // x[w.THREADS], total * (share + 1) // x[w.THREADS]
    chunk[0], place = 0, np.int64(chunk.ctypes.data)
    for k in range(count):
        part = words(parts + 24 * k)
        tensor = tensor_of(x, part[0])
        record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
        start, size = cut(low - before, part[2]), part[2]
        chunk[1], chunk[2] = part[1] + start, cut(high - before, size) - start
        if chunk[2] > 0 and record[w.SIZE] > 0:
            call(kernels[w.UPDATE], place, 1, record[w.ROW], record[w.FIELDS], 0)
        before += size
    chunk[0] = 1  # a use after the calls: arrays are freed after their last one


PARTS_OF = -1
"""Phase of a call besides those of the front."""


def share_stage(context, phase, first, last, share):
    """Do one share of a phase, see :func:`fastopt._kernels.front.share_call`."""
    if phase == PARTS_OF:
        update_parts(words(context), first, last, share)
    else:
        share_of_call(context, phase, first, last, share)


@scalar
def divide(x, context, phase, first, last):
    """Do all shares of a phase."""
    if x[w.THREADS] > 1:
        call(x[w.SPREAD], context, phase, first, last, x[w.UPDATE_SHARE])
    else:
        call(x[w.UPDATE_SHARE], context, phase, first, last, 0)


@scalar
def merge_chunks(tensor, step, target):
    """Write the sums of a tensor, or maxima, from those of its chunks."""
    record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
    place = w.PASS + w.PASS_WORDS * step
    each, largest, partial = kernels[place + 2], kernels[place + 3], doubles(record[w.SUMS])
    for k in range(each):
        total = 0.0
        for c in range(record[w.FLAT_COUNT]):
            value = partial[each * c + k]
            total = larger(total, value) if largest else total + value
        target[k] = total


@scalar
def merge_slices(tensor, step, sums, width, apart, slices):
    """End a reduction with the sums of all slices of a tensor, which lie `apart`."""
    record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
    place = w.PASS + w.PASS_WORDS * step
    each, finish = kernels[place + 2], kernels[place + 1]
    chunks, partial = np.zeros((slices, 3), np.int64), np.empty((slices, each))
    for s in range(slices):
        for k in range(each):
            partial[s, k] = doubles(sums)[s * apart + k]
    first, own = np.int64(chunks.ctypes.data), np.int64(partial.ctypes.data)
    call(finish, first, slices, record[w.ROW], record[w.FIELDS], own)
    chunks[0, 0] = np.int64(partial[0, 0] > 0)  # a use after the call


def stage_call(context, name, n, step, place, width, slices):
    """Do a stage of the admitted call of `n` tensors.

    Sums are at `place`, `width` of them for each tensor and reduction `step`, one after the other
    for each of the `slices`; so are the rows of PARTS, whose number is `step`.
    """
    x = words(context)
    if name == CLIP:
        order_all(x, n)
        if x[w.CLIP]:
            call(x[w.CLIP_LARGE if x[w.THREADS] > 1 else w.CLIP], context, n, x[w.THREADS], 0, 0)
    elif name == MEASURE:
        call(x[w.MEASURE_LARGE if x[w.THREADS] > 1 else w.MEASURE], context, n, 0, 0, 0)
        for k in range(n):
            doubles(place)[k] = added(tensor_of(x, k))
    elif name == START:
        for k in range(n):
            advance(x, tensor_of(x, k))
            begin(x, k)
    elif name == PARTS:
        divide(x, context, PARTS_OF, place, step)
    elif name == UPDATE:
        for phase in (UPDATES, COVERS, END):
            divide(x, context, phase, 0, n)
    else:
        if name == REDUCE:
            divide(x, context, REDUCTIONS + step, 0, n)
        for k in range(n):
            tensor = tensor_of(x, k)
            if step < words(tensor[w.T_KERNELS])[w.PASSES]:
                sums = place + 8 * width * k
                if name == REDUCE:
                    merge_chunks(tensor, step, doubles(sums))
                else:
                    merge_slices(tensor, step, sums, width, width * n, slices)


@cache
def stage():
    """Return the compiled function of :func:`stage_call`."""
    return bind_to(compiled(stage_call, None, parallel=False), *[types.int64] * 7)


@cache
def share() -> int:
    """Return the address of :func:`share_stage`."""
    return address_of(share_stage, ON_CALL, None)
