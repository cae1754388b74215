"""Measuring of the gradients of a call before its update: sums of squares, norm and factor.

:mod:`fastopt._kernels.front` calls these functions by address, when gradients are scaled or clipped
by their global norm.

Tests: ``tests/engine/test_records.py``.
"""

from functools import cache

from numba import carray

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import copy, tensor_of
from fastopt._kernels.compiling import address_of
from fastopt._kernels.cpu_addresses import ON_CHUNKS
from fastopt._kernels.cpu_calls import limit_norm
from fastopt._kernels.objects import call, doubles, words
from fastopt._kernels.row_admission import enter_rows
from fastopt._kernels.strided import COPY_GRAD
from fastopt.kernels.rule import scalar


@scalar
def gather(x, k):
    """Enter where the gradient of a tensor lies, in the order of its record."""
    tensor = tensor_of(x, k)
    tensor[w.T_MEASURED] = tensor[w.T_GRAD]
    if tensor[w.T_GRAD_COPIED]:
        tensor[w.T_MEASURED] = tensor[w.T_SCRATCH]
        copy(x, k, COPY_GRAD, tensor[w.T_MEASURED])
    if tensor[w.T_LISTED]:
        record = words(tensor[w.T_RECORD])
        row = words(record[w.ROW])
        enter_rows(tensor, row)
        row[record[w.GRAD_COLUMN]] = tensor[w.T_MEASURED]


@scalar
def chunks_of(tensor):
    """Return the addresses of the chunks of a gradient and of their sums, and their number."""
    record = words(tensor[w.T_RECORD])
    if tensor[w.T_LISTED]:
        return tensor[w.T_CUTS], tensor[w.T_CUT_SUMS], tensor[w.T_CUT_COUNT]
    return record[w.FLAT], record[w.SUMS], record[w.FLAT_COUNT]


@scalar
def square(x, k, first, count):
    """Sum the squares of chunks of the gradient of tensor `k`."""
    tensor = tensor_of(x, k)
    chunks, partial, _ = chunks_of(tensor)
    chunks, partial = chunks + 24 * first, partial + 8 * first
    for c in range(count):
        doubles(partial)[c] = 0.0
    row = x[w.TENSORS] + 8 * (w.TENSOR * k + w.T_MEASURED)
    if tensor[w.T_LISTED]:
        row = words(tensor[w.T_RECORD])[w.ROW]
    call(words(tensor[w.T_KERNELS])[w.SQUARES], chunks, count, row, 0, partial)


@scalar
def added(tensor):
    """Return the sum of squares of a gradient, from those of its chunks."""
    _, partial, count = chunks_of(tensor)
    own = 0.0
    for c in range(count):
        own += doubles(partial)[c]
    return own


@scalar
def square_share(x, first, last, share, shares):
    """Sum the squares of one share of the chunks of the tensors from `first` to `last`."""
    total, before = 0, 0
    for k in range(first, last):
        total += chunks_of(tensor_of(x, k))[2]
    low, high = total * share // shares, total * (share + 1) // shares
    for k in range(first, last):
        count = chunks_of(tensor_of(x, k))[2]
        start, stop = max(low - before, 0), min(high - before, count)
        if start < stop:
            square(x, k, start, stop - start)
        before += count


@scalar
def conclude(x, total):
    """Compute the norm, and the factor of the gradients, from the sum of all squares."""
    norm = carray(doubles(x[w.NORM]), (w.NORM_NUMBERS,))
    limit_norm(total, norm)
    norm[w.FACTOR] *= norm[w.SHARE]


def measure_call(context, n, _, __, ___):
    """Measure the gradients of the admitted tensors."""
    x, total = words(context), 0.0
    for k in range(n):
        gather(x, k)
        square_share(x, k, k + 1, 0, 1)
        total += added(tensor_of(x, k))
    conclude(x, total)


GATHER, SQUARE = range(2)
"""Phases of the measurement of a large call."""


def share_call(context, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    x = words(context)
    shares = x[w.THREADS]
    if phase == GATHER:
        for k in range(first + share, last, shares):
            gather(x, k)
    else:
        square_share(x, first, last, share, shares)


def measure_large(context, n, _, __, ___):
    """Measure the gradients of a large call on several threads."""
    x, total = words(context), 0.0
    group = 1 if x[w.REPEATS] else max(n, 1)  # a tensor has one place for the sums of its chunks
    for first in range(0, n, group):
        last = first + group
        for phase in (GATHER, SQUARE):
            call(x[w.SPREAD], context, phase, first, last, x[w.MEASURE_SHARE])
        for k in range(first, last):
            total += added(tensor_of(x, k))
    conclude(x, total)


@cache
def measure() -> int:
    """Return the address of :func:`measure_call`."""
    return address_of(measure_call, ON_CHUNKS, None)


@cache
def run() -> tuple[int, int]:
    """Return the addresses of :func:`measure_large` and :func:`share_call`."""
    return address_of(measure_large, ON_CHUNKS, None), address_of(share_call, ON_CHUNKS, None)
