"""Adaptive clipping of the gradients of a call before its update, unit by unit.

:mod:`fastopt._kernels.front` calls these functions by address. A unit is a slice along the first
axis, or a whole array of fewer than two dimensions. Gradients with clipped units lie in scratch
memory, and replace those of the call.

Tests: ``tests/engine/test_clip_adaptive.py``, ``tests/engine/test_records_settings.py``.
"""

from functools import cache

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import tensor_of, units_scratch_of
from fastopt._kernels.compiling import address_of
from fastopt._kernels.cpu_addresses import ON_CHUNKS
from fastopt._kernels.numpy_abi import C_ORDER, F_ORDER
from fastopt._kernels.objects import after, call, words
from fastopt._kernels.strided import copy_strided, rounded, size_of
from fastopt.kernels.rule import scalar

__all__ = ["clip", "run"]

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
def gather(tensor):
    """Enter where weight and gradient lie in C order, after copying them if they do not."""
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
        for k in range(w.RECORD):
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
def clip_units(x, k, share, shares):
    """Clip one share of the units of a tensor."""
    record = words(tensor_of(x, k)[w.T_RECORD])
    units = record[w.LENGTHS] if record[w.NDIMS] > 1 else 1
    own = (share + k) % shares  # vectors have one unit, and are divided among the shares
    first, last = units * own // shares, units * (own + 1) // shares
    if first < last:
        row = x[w.TENSORS] + 8 * (w.TENSOR * k + w.T_UNIT_WEIGHT)
        numbers, width = x[w.NORM] + 8 * w.UNIT_FACTOR, record[w.SIZE] // max(units, 1)
        call(words(record[w.KERNELS])[w.UNITS], first, last - first, row, numbers, width)


@scalar
def finish(tensor):
    """Replace the gradient of a tensor, in the order of its record."""
    record, first = words(tensor[w.T_RECORD]), tensor[w.T_SCRATCH]
    code, strides = record[w.GRAD_CODE], after(tensor, w.T_GRAD_STRIDES)
    if record[w.ORDER] == F_ORDER:
        enter_strides(record, C_ORDER, size_of(code), strides)
        copy_strided(record, strides, tensor[w.T_UNIT_OUT], code, first, code, False)
    tensor[w.T_GRAD], tensor[w.T_GRAD_CODE], tensor[w.T_GRAD_COPIED] = first, code, 0
    tensor[w.T_SCRATCH] += units_scratch_of(record)


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
            gather(tensor_of(x, k))
        else:
            finish(tensor_of(x, k))


def clip_call(context, n, _, __, ___):
    """Clip the gradients of the admitted tensors."""
    x = words(context)
    for k in range(n):
        gather(tensor_of(x, k))
        clip_units(x, k, 0, 1)
        finish(tensor_of(x, k))


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
