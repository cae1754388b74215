"""Copies between arrays in any order and contiguous scratch memory, in compiled code.

Tests: ``tests/engine/test_records.py``.
"""

import numpy as np

from fastopt._kernels import numpy_abi
from fastopt._kernels import record_words as w
from fastopt._kernels.copying import move
from fastopt._kernels.half import widen_bfloat16, widen_float16
from fastopt._kernels.objects import after, doubles, halves, singles
from fastopt.kernels.rule import scalar

COPY_GRAD, COPY_WEIGHT, COPY_BACK = range(3)
"""What :func:`copy_call` copies."""


@scalar
def size_of(code):
    """Return the bytes of a number."""
    if code == w.FLOAT64:
        return 8
    return 4 if code == w.FLOAT32 else 2


@scalar
def rounded(size):
    """Return a size in bytes, rounded up to whole cache lines."""
    return (size + 63) & -64


@scalar
def proportion(place, whole, count):
    """Return how many of `count` items are before `place` of `whole`.

    The product of two sizes may overflow an integer.
    """
    return int(np.float64(place) / np.float64(whole) * np.float64(count))


@scalar
def in_reals(function, code, *arguments):
    """Call a function of float64 or float32 numbers, by their code, and of `arguments`.

    The first argument of the function makes pointers to such numbers from addresses.
    """
    if code == w.FLOAT64:
        function(doubles, *arguments)
    else:
        function(singles, *arguments)


@scalar
def copy_reals(numbers, wanted, source, stride, target, step, count):
    """Copy numbers with strides in elements, as float64 or float32."""
    if wanted == w.FLOAT64:
        for j in range(count):
            doubles(target)[j * step] = np.float64(numbers(source)[j * stride])
    else:
        for j in range(count):
            singles(target)[j * step] = np.float32(numbers(source)[j * stride])


@scalar
def copy_run(code, wanted, source, stride, target, step, count):
    """Copy `count` numbers with strides in elements, converting their dtype."""
    if size_of(code) > 2:
        in_reals(copy_reals, code, wanted, source, stride, target, step, count)
    elif wanted == code:
        for j in range(count):
            halves(target)[j * step] = halves(source)[j * stride]
    else:
        for j in range(count):
            bits = halves(source)[j * stride]
            value = widen_float16(bits) if code == w.FLOAT16 else widen_bfloat16(bits)
            if wanted == w.FLOAT32:
                singles(target)[j * step] = value
            else:
                doubles(target)[j * step] = np.float64(value)


@scalar
def copy_unaligned(code, wanted, far, stride, near, step, count, back):
    """Copy numbers at any addresses, `stride` bytes apart, to aligned ones or `back`."""
    itemsize, number = size_of(code), np.empty(1, np.int64)
    place = np.int64(number.ctypes.data)
    for j in range(count):
        item, target = far + j * stride, near + j * step * size_of(wanted)
        if back:
            copy_run(wanted, code, target, 1, place, 1, 1)
            move(item, place, itemsize)
        else:
            move(place, item, itemsize)
            copy_run(code, wanted, place, 1, target, 1, 1)
    number[0] = 0  # a use after the copies: arrays are freed after their last one


TILE = 64
"""Rows that are copied together, so that columns of one array and rows of the other are cached."""


@scalar
def copy_form(form, strides, array, code, scratch, wanted, back):
    """Copy a strided array to contiguous scratch memory, or `back`.

    `form` is ``(axes, lengths, elements, backward)``; elements in scratch memory are in C order, or
    in Fortran order if `backward`, and have the dtype `wanted`.
    """
    ndim, lengths, elements, backward = form
    size, wanted_size, uneven = size_of(code), size_of(wanted), array
    for axis in range(ndim):
        uneven |= strides[axis]
    inner = 0 if backward else ndim - 1  # the fastest axis in scratch memory
    outward = 1 if backward else -1
    length = lengths[inner] if ndim > 0 else 1
    stride = strides[inner] if ndim > 0 else 0
    height = lengths[inner + outward] if ndim > 1 else 1
    pitch = strides[inner + outward] if ndim > 1 else 0
    across = height > 1 and abs(pitch) < abs(stride)
    for plane in range(elements // max(length * height, 1)):
        place, rest = array, plane
        for step in range(2, ndim):
            axis = inner + outward * step
            place += rest % lengths[axis] * strides[axis]
            rest //= lengths[axis]
        for first in range(0, height, TILE):
            rows = min(TILE, height - first)
            target = scratch + (plane * height + first) * length * wanted_size
            source = place + first * pitch
            for j in range(length if across else rows):
                far, near = source + j * pitch, target + j * length * wanted_size
                count, step_far, step_near = length, stride, 1
                if across:
                    far, near = source + j * stride, target + j * wanted_size
                    count, step_far, step_near = rows, pitch, length
                if uneven & (size - 1):
                    copy_unaligned(code, wanted, far, step_far, near, step_near, count, back)
                elif back:
                    copy_run(wanted, code, near, step_near, far, step_far // size, count)
                else:
                    copy_run(code, wanted, far, step_far // size, near, step_near, count)


@scalar
def lengths_of(record):
    """Return a pointer to the lengths of the axes of a record's arrays."""
    return after(record, w.LENGTHS)


@scalar
def form_of(record):
    """Return axes, lengths, elements and order of a record's arrays."""
    backward = record.order == numpy_abi.F_ORDER
    return record.ndims, lengths_of(record), record.size, backward


@scalar
def copy_strided(record, strides, array, code, scratch, wanted, back):
    """Copy an array of a record's shape to scratch memory in the record's order, or `back`."""
    copy_form(form_of(record), strides, array, code, scratch, wanted, back)


@scalar
def grad_elements(tensor, record):
    """Return the number of elements of a gradient, or of the values of a row-sparse one."""
    if tensor.listed:
        return tensor.length * (record.size // max(lengths_of(record)[0], 1))
    return record.size


@scalar
def elements_of(tensor, record):
    """Return the number of elements of the weight, or of values or indices if they are more."""
    count = max(record.size, grad_elements(tensor, record))
    return max(count, tensor.length) if tensor.listed else count


@scalar
def grad_bytes(tensor, record):
    """Return the bytes of scratch memory for the gradient of a tensor."""
    return rounded(grad_elements(tensor, record) * size_of(record.grad_code))


@scalar
def copy_grad(tensor, record, scratch):
    """Copy a gradient to scratch memory, in the record's dtype and order."""
    grad, code, wanted = tensor.grad, tensor.grad_code, record.grad_code
    axes, lengths, elements, backward = form_of(record)
    if tensor.listed:
        axes, lengths, backward = tensor.grad_axes, after(tensor, w.T_GRAD_LENGTHS), False
        elements = grad_elements(tensor, record)
    form, strides = (axes, lengths, elements, backward), after(tensor, w.T_GRAD_STRIDES)
    copy_form(form, strides, grad, code, scratch, wanted, False)


def copy_call(at, what, target, _, __):
    """Copy an array of a tensor to scratch memory at `target`, or its weight back."""
    tensor = w.tensor_at(at)
    record = w.record_at(tensor.record)
    if what == COPY_GRAD:
        copy_grad(tensor, record, target)
    else:
        code, strides = record.weight_code, after(tensor, w.T_STRIDES)
        copy_strided(record, strides, tensor.weight, code, target, code, what == COPY_BACK)
