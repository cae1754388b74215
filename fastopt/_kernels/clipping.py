"""Adaptive clipping of the gradients of a call before its update, unit by unit.

:mod:`fastopt._kernels.front` calls these functions by address. A unit is a slice along the first
axis, or a whole array of fewer than two dimensions. Gradients with clipped units lie in scratch
memory, and replace those of the call; the rows of a row-sparse one are summed before, so that each
occurs once.

Tests: ``tests/engine/test_clip_adaptive.py``, ``tests/engine/test_records_settings.py``,
``tests/engine/test_records_rows.py``.
"""

from functools import cache

import numpy as np

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import copy, tensor_of, units_scratch_of
from fastopt._kernels.compiling import address_of
from fastopt._kernels.cpu_addresses import ON_CHUNKS
from fastopt._kernels.layout import WIDTH
from fastopt._kernels.numpy_abi import C_ORDER, F_ORDER
from fastopt._kernels.objects import after, call, doubles, singles, words
from fastopt._kernels.row_admission import cut_rows
from fastopt._kernels.strided import (
    COPY_GRAD,
    COPY_WEIGHT,
    copy_strided,
    grad_bytes,
    rounded,
    size_of,
)
from fastopt.kernels.rule import scalar

GATHER, UNITS, FINISH, PHASES = range(4)
"""Phases of the clip of a large call, and their number."""


@scalar
def enter_strides(record, order, size, target):
    """Write the strides of a contiguous array of the record's shape."""
    stride, ndim = size, record[w.NDIMS]
    for step in range(ndim):
        axis = step if order == F_ORDER else ndim - 1 - step
        target[axis] = stride
        stride *= record[w.LENGTHS + axis]


@scalar
def gather_whole(tensor):
    """Enter where the weight and a dense gradient lie in C order."""
    record = ordered = words(tensor[w.T_RECORD])
    code, weights, backward = record[w.GRAD_CODE], record[w.WEIGHT_CODE], record[w.ORDER] == F_ORDER
    size, out = rounded(record[w.SIZE] * size_of(code)), tensor[w.T_SCRATCH]
    grad_strides, strides = after(tensor, w.T_GRAD_STRIDES), after(tensor, w.T_STRIDES)
    if backward:
        if not tensor[w.T_GRAD_COPIED]:
            enter_strides(record, F_ORDER, size_of(code), grad_strides)
        if not tensor[w.T_COPIED]:
            enter_strides(record, F_ORDER, size_of(weights), strides)
        ordered = words(out + 2 * size + rounded(record[w.BYTES]))
        for k in range(w.LENGTHS + record[w.NDIMS]):
            ordered[k] = record[k]
        ordered[w.ORDER] = C_ORDER
        out += size
    grad, weight, own = tensor[w.T_GRAD], tensor[w.T_WEIGHT], out + size
    if backward or tensor[w.T_GRAD_COPIED]:
        copy_strided(ordered, grad_strides, grad, tensor[w.T_GRAD_CODE], out, code, False)
        grad = out
    if backward or tensor[w.T_COPIED]:
        copy_strided(ordered, strides, weight, weights, own, weights, False)
        weight = own
    tensor[w.T_UNIT_WEIGHT], tensor[w.T_UNIT_GRAD], tensor[w.T_UNIT_OUT] = weight, grad, out


@scalar
def gather_rows(x, k):
    """Enter where the weight and the values of a row-sparse gradient lie in C order."""
    tensor = tensor_of(x, k)
    first, size = tensor[w.T_SCRATCH], grad_bytes(tensor, words(tensor[w.T_RECORD]))
    tensor[w.T_UNIT_GRAD], tensor[w.T_UNIT_WEIGHT] = tensor[w.T_GRAD], tensor[w.T_WEIGHT]
    tensor[w.T_UNIT_OUT] = first + size
    if tensor[w.T_GRAD_COPIED]:
        copy(x, k, COPY_GRAD, first)
        tensor[w.T_UNIT_GRAD] = first
    if tensor[w.T_COPIED]:
        copy(x, k, COPY_WEIGHT, first + 2 * size)
        tensor[w.T_UNIT_WEIGHT] = first + 2 * size


@scalar
def gather(x, k):
    """Enter where weight and gradient lie in C order, after copying them if they do not."""
    if tensor_of(x, k)[w.T_LISTED]:
        gather_rows(x, k)
    else:
        gather_whole(tensor_of(x, k))


@scalar
def add_row(code, source, target, width, again):
    """Write numbers to `target`, or add them if there are some."""
    if code == w.FLOAT64:
        for i in range(width):
            value = doubles(source)[i]
            doubles(target)[i] = doubles(target)[i] + value if again else value
    else:
        for i in range(width):
            number = singles(source)[i]
            singles(target)[i] = singles(target)[i] + number if again else number


@scalar
def exchange(code, whole, rows, values, count, back):
    """Write numbers to their places in an array, or `back`."""
    for k in range(count):
        at = rows[k]
        if code == w.FLOAT64:
            if back:
                doubles(values)[k] = doubles(whole)[at]
            else:
                doubles(whole)[at] = doubles(values)[k]
        elif back:
            singles(values)[k] = singles(whole)[at]
        else:
            singles(whole)[at] = singles(values)[k]


@scalar
def clip_rows(tensor, numbers, first, last):
    """Sum and clip the rows of a gradient from `first` to `last`; those of a vector are a unit."""
    record, table = words(tensor[w.T_RECORD]), np.zeros(3, np.int64)
    code, width, vector = record[w.GRAD_CODE], words(record[w.ROW])[WIDTH], record[w.NDIMS] == 1
    units, place = words(tensor[w.T_KERNELS])[w.UNITS], np.int64(table.ctypes.data)
    rows, starts = words(tensor[w.T_ROWS]), words(tensor[w.T_STARTS])
    size, unit = width * size_of(code), width * size_of(record[w.WEIGHT_CODE])
    if vector:
        last = tensor[w.T_SEGMENTS]
    for k in range(first, last):
        out = tensor[w.T_UNIT_OUT] + k * size
        for entry in range(starts[k], starts[k + 1]):
            source = tensor[w.T_UNIT_GRAD] + words(tensor[w.T_ORDER])[entry] * size
            add_row(code, source, out, width, entry > starts[k])
        if not vector:
            table[0], table[1], table[2] = tensor[w.T_UNIT_WEIGHT] + rows[k] * unit, out, out
            call(units, 0, 1, place, numbers, width)
    if vector:
        out, count = tensor[w.T_UNIT_OUT], record[w.SIZE]
        whole = tensor[w.T_SCRATCH] + 2 * grad_bytes(tensor, record) + rounded(record[w.BYTES])
        for k in range(rounded(count * size) // 8):
            words(whole)[k] = 0
        exchange(code, whole, rows, out, last, False)
        table[0], table[1], table[2] = tensor[w.T_UNIT_WEIGHT], whole, whole
        call(units, 0, 1, place, numbers, count)
        exchange(code, whole, rows, out, last, True)
    table[0] = 0  # a use after the calls: arrays are freed after their last one


@scalar
def clip_units(x, k, share, shares):
    """Clip one share of the units of a tensor."""
    tensor = tensor_of(x, k)
    record, numbers = words(tensor[w.T_RECORD]), x[w.NORM] + 8 * w.UNIT_FACTOR
    units = tensor[w.T_SEGMENTS] if tensor[w.T_LISTED] else record[w.LENGTHS]
    if record[w.SIZE] == 0:
        return  # 2**63 units may have no elements
    if record[w.NDIMS] < 2:
        units = 1
    own = (share + k) % shares  # vectors have one unit, and are divided among the shares
    first, last = units * own // shares, units * (own + 1) // shares
    if first < last and tensor[w.T_LISTED]:
        clip_rows(tensor, numbers, first, last)
    elif first < last:
        row = x[w.TENSORS] + 8 * (w.TENSOR * k + w.T_UNIT_WEIGHT)
        width = record[w.SIZE] // max(units, 1)
        call(words(tensor[w.T_KERNELS])[w.UNITS], first, last - first, row, numbers, width)


@scalar
def finish(x, k):
    """Replace the gradient of a tensor, in the order of its record."""
    tensor = tensor_of(x, k)
    record, first = words(tensor[w.T_RECORD]), tensor[w.T_SCRATCH]
    code, strides = record[w.GRAD_CODE], after(tensor, w.T_GRAD_STRIDES)
    tensor[w.T_SCRATCH] += units_scratch_of(tensor, record)
    if tensor[w.T_LISTED]:
        first, tensor[w.T_LENGTH] = tensor[w.T_UNIT_OUT], tensor[w.T_SEGMENTS]
        tensor[w.T_STARTS] = tensor[w.T_ORDER] = x[w.COUNTING]
        cut_rows(tensor, record)
    elif record[w.ORDER] == F_ORDER:
        enter_strides(record, C_ORDER, size_of(code), strides)
        copy_strided(record, strides, tensor[w.T_UNIT_OUT], code, first, code, False)
    tensor[w.T_GRAD], tensor[w.T_GRAD_CODE], tensor[w.T_GRAD_COPIED] = first, code, 0


def share_call(context, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    x = words(context)
    shares = x[w.THREADS]
    if phase == UNITS:
        for k in range(first, last):
            clip_units(x, k, share, shares)
        return
    for k in range(first + share, last, shares):
        if phase == GATHER:
            gather(x, k)
        else:
            finish(x, k)


def clip_call(context, n, _, __, ___):
    """Clip the gradients of the admitted tensors."""
    x = words(context)
    for k in range(n):
        gather(x, k)
        clip_units(x, k, 0, 1)
        finish(x, k)


def clip_large(context, n, _, __, ___):
    """Clip the gradients of a large call on several threads."""
    x = words(context)
    for phase in range(PHASES):
        call(x[w.SPREAD], context, phase, 0, n, x[w.CLIP_SHARE])


@cache
def clip() -> int:
    """Return the address of :func:`clip_call`."""
    return address_of(clip_call, ON_CHUNKS, None)


@cache
def run() -> tuple[int, int]:
    """Return the addresses of :func:`clip_large` and :func:`share_call`."""
    return address_of(clip_large, ON_CHUNKS, None), address_of(share_call, ON_CHUNKS, None)
