"""Measuring of the gradients of a call before its update: sums of squares, norm and factor.

:mod:`fastopt._kernels.front` calls these functions by address, when gradients are scaled or clipped
by their global norm.

Tests: ``tests/engine/test_records.py``.
"""

from numba import carray

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import copy, divide, shares_of, tensor_of
from fastopt._kernels.cpu_calls import limit_norm
from fastopt._kernels.objects import call, doubles, words
from fastopt._kernels.row_admission import enter_rows
from fastopt._kernels.strided import COPY_GRAD
from fastopt.kernels.rule import scalar


@scalar
def gather(context, k):
    """Enter where the gradient of a tensor lies, in the order of its record."""
    tensor = tensor_of(context, k)
    tensor.measured = tensor.grad
    if tensor.grad_copied:
        tensor.measured = tensor.scratch
        copy(context, k, COPY_GRAD, tensor.measured)
    if tensor.listed:
        record = w.record_at(tensor.record)
        row = words(record.row)
        enter_rows(tensor, row)
        row[record.grad_column] = tensor.measured


@scalar
def chunks_of(tensor):
    """Return the addresses of the chunks of a gradient and of their sums, and their number."""
    record = w.record_at(tensor.record)
    if tensor.listed:
        return tensor.cuts, tensor.cut_sums, tensor.cut_count
    return record.flat, record.sums, record.flat_count


@scalar
def square(context, k, first, count):
    """Sum the squares of chunks of the gradient of tensor `k`."""
    tensor = tensor_of(context, k)
    chunks, partial, _ = chunks_of(tensor)
    chunks, partial = chunks + 24 * first, partial + 8 * first
    for c in range(count):
        doubles(partial)[c] = 0.0
    row = context.tensors + 8 * (w.TENSOR * k + w.T_MEASURED)
    if tensor.listed:
        row = w.record_at(tensor.record).row
    call(w.loops_at(tensor.kernels).squares, chunks, count, row, 0, partial)


@scalar
def added(tensor):
    """Return the sum of squares of a gradient, from those of its chunks."""
    _, partial, count = chunks_of(tensor)
    total = 0.0
    for c in range(count):
        total += doubles(partial)[c]
    return total


@scalar
def conclude(context, total):
    """Compute the norm, and the factor of the gradients, from the sum of all squares."""
    limit_norm(total, carray(doubles(context.norm), (w.NORM_NUMBERS,)))
    norm = w.norm_at(context.norm)
    norm.factor *= norm.share


GATHER, SQUARE = range(2)
"""Phases of a measurement."""


def share_call(at, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    context = w.context_at(at)
    shares, total, before = shares_of(context), 0, 0
    if phase == GATHER:
        for k in range(first + share, last, shares):
            gather(context, k)
        return
    for k in range(first, last):
        total += chunks_of(tensor_of(context, k))[2]
    low, high = total * share // shares, total * (share + 1) // shares
    for k in range(first, last):
        count = chunks_of(tensor_of(context, k))[2]
        start, stop = max(low - before, 0), min(high - before, count)
        if start < stop:
            square(context, k, start, stop - start)
        before += count


def measure_call(at, n, _, __, ___):
    """Measure the gradients of the admitted tensors."""
    context, total = w.context_at(at), 0.0
    # Tensors of small calls share the memory of copies, repeated ones that of their chunks' sums.
    group = 1 if context.repeats or shares_of(context) == 1 else max(n, 1)
    for first in range(0, n, group):
        last = first + group
        for phase in (GATHER, SQUARE):
            divide(context, phase, first, last, context.measure_share)
        for k in range(first, last):
            total += added(tensor_of(context, k))
    conclude(context, total)
