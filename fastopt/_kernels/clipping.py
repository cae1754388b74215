"""Adaptive clipping of the gradients of a call before its update, unit by unit.

:mod:`fastopt._kernels.front` calls :func:`share_call` by address. A unit is a slice along the first
axis, or a whole array of fewer than two dimensions. Gradients with clipped units lie in scratch
memory, and replace those of the call; the rows of a row-sparse one are summed before, so that each
occurs once.

Tests: ``tests/engine/test_clip_adaptive.py``, ``tests/engine/test_records.py``.
"""

import numpy as np

from fastopt._kernels import record_words as w
from fastopt._kernels import strided
from fastopt._kernels.admission import copy, shares_of, tensor_of, units_scratch_of
from fastopt._kernels.layout import WIDTH
from fastopt._kernels.numpy_abi import C_ORDER, F_ORDER
from fastopt._kernels.objects import after, call, words
from fastopt._kernels.row_admission import cut_rows
from fastopt.kernels.rule import scalar

GATHER, UNITS, FINISH, PHASES = range(4)
"""Phases of a clip, and their number."""


@scalar
def enter_strides(record, order, size, target):
    """Write the strides of a contiguous array of the record's shape."""
    stride, ndim = size, record.ndims
    for step in range(ndim):
        axis = step if order == F_ORDER else ndim - 1 - step
        target[axis] = stride
        stride *= strided.lengths_of(record)[axis]


@scalar
def gather_whole(tensor):
    """Enter where the weight and a dense gradient lie in C order."""
    record = ordered = w.record_at(tensor.record)
    code, weights, backward = record.grad_code, record.weight_code, record.order == F_ORDER
    size, out = strided.rounded(record.size * strided.size_of(code)), tensor.scratch
    grad_strides, strides = after(tensor, w.T_GRAD_STRIDES), after(tensor, w.T_STRIDES)
    if backward:
        if not tensor.grad_copied:
            enter_strides(record, F_ORDER, strided.size_of(code), grad_strides)
        if not tensor.copied:
            enter_strides(record, F_ORDER, strided.size_of(weights), strides)
        place = out + 2 * size + strided.rounded(record.bytes)
        for k in range(w.LENGTHS + record.ndims):
            words(place)[k] = after(record, 0)[k]
        ordered = w.record_at(place)
        ordered.order = C_ORDER
        out += size
    grad, weight, target = tensor.grad, tensor.weight, out + size
    if backward or tensor.grad_copied:
        strided.copy_strided(ordered, grad_strides, grad, tensor.grad_code, out, code, False)
        grad = out
    if backward or tensor.copied:
        strided.copy_strided(ordered, strides, weight, weights, target, weights, False)
        weight = target
    tensor.unit_weight, tensor.unit_grad, tensor.unit_out = weight, grad, out


@scalar
def gather_rows(context, k):
    """Enter where the weight and the values of a row-sparse gradient lie in C order."""
    tensor = tensor_of(context, k)
    first, size = tensor.scratch, strided.grad_bytes(tensor, w.record_at(tensor.record))
    tensor.unit_grad, tensor.unit_weight = tensor.grad, tensor.weight
    tensor.unit_out = first + size
    if tensor.grad_copied:
        copy(context, k, strided.COPY_GRAD, first)
        tensor.unit_grad = first
    if tensor.copied:
        copy(context, k, strided.COPY_WEIGHT, first + 2 * size)
        tensor.unit_weight = first + 2 * size


@scalar
def gather(context, k):
    """Enter where weight and gradient lie in C order, after copying them if they do not."""
    if tensor_of(context, k).listed:
        gather_rows(context, k)
    else:
        gather_whole(tensor_of(context, k))


@scalar
def add_row(numbers, source, target, width, again):
    """Write numbers to `target`, or add them if there are some."""
    for i in range(width):
        value = numbers(source)[i]
        numbers(target)[i] = numbers(target)[i] + value if again else value


@scalar
def exchange(numbers, whole, rows, values, count, back):
    """Write numbers to their places in an array, or `back`."""
    for k in range(count):
        if back:
            numbers(values)[k] = numbers(whole)[rows[k]]
        else:
            numbers(whole)[rows[k]] = numbers(values)[k]


@scalar
def clip_rows(tensor, numbers, first, last):
    """Sum and clip the rows of a gradient from `first` to `last`; those of a vector are a unit."""
    record, table = w.record_at(tensor.record), np.zeros(3, np.int64)
    code, width, vector = record.grad_code, words(record.row)[WIDTH], record.ndims == 1
    units, place = w.loops_at(tensor.kernels).units, np.int64(table.ctypes.data)
    rows, starts = words(tensor.rows), words(tensor.starts)
    size, unit = width * strided.size_of(code), width * strided.size_of(record.weight_code)
    if vector:
        last = tensor.segments
    for k in range(first, last):
        out = tensor.unit_out + k * size
        for entry in range(starts[k], starts[k + 1]):
            source = tensor.unit_grad + words(tensor.order)[entry] * size
            strided.in_reals(add_row, code, source, out, width, entry > starts[k])
        if not vector:
            table[0], table[1], table[2] = tensor.unit_weight + rows[k] * unit, out, out
            call(units, 0, 1, place, numbers, width)
    if vector:
        out, count = tensor.unit_out, record.size
        whole = (
            tensor.scratch + 2 * strided.grad_bytes(tensor, record) + strided.rounded(record.bytes)
        )
        for k in range(strided.rounded(count * size) // 8):
            words(whole)[k] = 0
        strided.in_reals(exchange, code, whole, rows, out, last, False)
        table[0], table[1], table[2] = tensor.unit_weight, whole, whole
        call(units, 0, 1, place, numbers, count)
        strided.in_reals(exchange, code, whole, rows, out, last, True)
    table[0] = 0  # a use after the calls: arrays are freed after their last one


@scalar
def clip_units(context, k, share, shares):
    """Clip one share of the units of a tensor."""
    tensor = tensor_of(context, k)
    record, numbers = w.record_at(tensor.record), context.norm + 8 * w.UNIT_FACTOR
    units = tensor.segments if tensor.listed else strided.lengths_of(record)[0]
    if record.size == 0:
        return  # 2**63 units may have no elements
    if record.ndims < 2:
        units = 1
    part = (share + k) % shares  # vectors have one unit, and are divided among the shares
    first, last = units * part // shares, units * (part + 1) // shares
    if first < last and tensor.listed:
        clip_rows(tensor, numbers, first, last)
    elif first < last:
        row = context.tensors + 8 * (w.TENSOR * k + w.T_UNIT_WEIGHT)
        width = record.size // max(units, 1)
        call(w.loops_at(tensor.kernels).units, first, last - first, row, numbers, width)


@scalar
def finish(context, k):
    """Replace the gradient of a tensor, in the order of its record."""
    tensor = tensor_of(context, k)
    record, first = w.record_at(tensor.record), tensor.scratch
    code, strides = record.grad_code, after(tensor, w.T_GRAD_STRIDES)
    tensor.scratch += units_scratch_of(tensor, record)
    if tensor.listed:
        first, tensor.length = tensor.unit_out, tensor.segments
        tensor.starts = tensor.order = context.counting
        cut_rows(tensor, record)
    elif record.order == F_ORDER:
        enter_strides(record, C_ORDER, strided.size_of(code), strides)
        strided.copy_strided(record, strides, tensor.unit_out, code, first, code, False)
    tensor.grad, tensor.grad_code, tensor.grad_copied = first, code, 0


def share_call(at, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    context = w.context_at(at)
    shares = shares_of(context)
    if phase == UNITS:
        for k in range(first, last):
            clip_units(context, k, share, shares)
        return
    for k in range(first + share, last, shares):
        if phase == GATHER:
            gather(context, k)
        else:
            finish(context, k)
