"""What compiled code does in a call on devices: counts and hyper-parameters, before the launches.

Python reads the arrays (:mod:`fastopt._kernels.cuda_arrays`), and launches what updates them. Their
records have no loops and no arrays: a record has the count, the hyper-parameters and the key of a
parameter, which :func:`advance_call` writes to the rows of the tables that are launched.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import enter_count, tensor_of
from fastopt._kernels.compiling import bind_to, compiled
from fastopt._kernels.front import advance, is_asked
from fastopt._kernels.layout import DONE, KEY
from fastopt._kernels.objects import doubles, singles, unsigned, words
from fastopt._kernels.record_words import context_at, hyper_at, record_at

TARGET = 4
"""Words of a target: the address of a tensor's hyper-parameters, their number, the address of its
row in the table, and whether that has the key of random numbers."""


def admit_call(at, places, n, found):
    """Enter the records at `places` as the tensors of a call; return a status.

    At `found` there will be the addresses of their hyper-parameters, and whether the step does not
    average their weights.
    """
    context = context_at(at)
    context.call_number += 1
    context.repeats = context.uneven = context.done = 0
    if n > context.capacity:
        context.need = n
        return w.NO_CAPACITY
    loops = record_at(context.nothing).kernels
    for k in range(n):
        tensor, record = tensor_of(context, k), record_at(words(places)[k])
        tensor.record, tensor.kernels, tensor.listed = words(places)[k], loops, 0
        if context.each == 0:
            tensor.hyper = record.hyper
        if context.scheduled or context.timed:
            enter_count(context, k, record)
        if record.mark == context.call_number:
            context.repeats = 1
        record.mark = context.call_number
    asks = context.asking != 0 and not is_asked(context)
    for k in range(n):
        hyper = hyper_at(tensor_of(context, k).hyper)
        if hyper.valid == 0 and not asks:
            return w.REFUSED
        words(found)[k], words(found)[n + k] = tensor_of(context, k).hyper, hyper.rests
    return w.ASKS if asks else w.OK


def advance_call(at, targets, n):
    """Count the admitted tensors and write their hyper-parameters; return how many only count."""
    context, skipped = context_at(at), np.int64(0)
    for k in range(n):
        tensor, target = tensor_of(context, k), words(targets + 8 * TARGET * k)
        record, wide = record_at(tensor.record), hyper_at(tensor.hyper).wide
        advance(context, tensor)
        row, skips = unsigned(target[2]), np.int64(tensor.record == context.nothing)
        row[DONE], skipped = np.uint64(skips), skipped + skips
        if target[3]:
            row[KEY] = unsigned(record.row)[KEY]
        for f in range(target[1]):
            if wide:
                doubles(target[0])[f] = doubles(record.fields)[f]
            else:
                singles(target[0])[f] = singles(record.fields)[f]
    return skipped


@cache
def admit() -> Callable[..., int]:
    """Return the compiled ``(context, places, n, found)``, see :func:`admit_call`."""
    kernel = compiled(admit_call, None, parallel=False, nogil=False)
    return bind_to(kernel, *[types.int64] * 4)


@cache
def advance_all() -> Callable[..., int]:
    """Return the compiled ``(context, targets, n)``, see :func:`advance_call`."""
    kernel = compiled(advance_call, None, parallel=False, nogil=False)
    return bind_to(kernel, *[types.int64] * 3)
