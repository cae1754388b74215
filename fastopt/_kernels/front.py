"""One call, compiled once for all rules: from Python objects to updated weights.

:func:`enter` takes the three arguments of a call as they are. It finds the record of each index,
checks the headers of all arrays against it (:mod:`fastopt._kernels.admission`), counts the update,
and calls the loops of the record's layout by address. A negative status means that nothing has
changed; Python then does what the status asks for, or reports the error in words.

A *record* (:mod:`fastopt._kernels.record_words`) describes the form of one parameter and never an
object: any weight and gradient of that form fit, at any address and in any memory order. Arrays in
another order or dtype are copied to scratch memory, and weights back
(:mod:`fastopt._kernels.strided`).

Tests: ``tests/engine/test_records.py``.
"""

import math
from functools import cache

import numpy as np
from numba import prange, types

from fastopt._kernels import numpy_abi
from fastopt._kernels import record_words as w
from fastopt._kernels.admission import (
    admit,
    admit_list,
    column_of,
    copy,
    items_of,
    scratch_of,
    tensor_of,
)
from fastopt._kernels.chunks import LINE
from fastopt._kernels.compiling import address_of, bind_to, compiled
from fastopt._kernels.layout import DECAY, KEY
from fastopt._kernels.noise import stream_key
from fastopt._kernels.objects import (
    Object,
    address,
    call,
    doubles,
    keep_alive,
    prepare_step,
    release,
    release_gil,
    restore_gil,
    singles,
    unsigned,
    words,
)
from fastopt._kernels.row_admission import enter_rows, row_room, rows_before, work_of
from fastopt._kernels.strided import (
    COPY_BACK,
    COPY_GRAD,
    COPY_WEIGHT,
    elements_of,
    grad_bytes,
    grad_elements,
    proportion,
)
from fastopt.kernels.rule import scalar

ON_CALL = types.void(*[types.int64] * 5)


@scalar
def count(x, tensor, record):
    """Count an update of a tensor, and return its number."""
    if x[w.EACH] and tensor[w.T_COUNT] >= 0:
        return tensor[w.T_COUNT]
    counts = words(x[w.COUNTS])
    t = counts[record[w.COUNT]] + 1
    counts[record[w.COUNT]] = t
    counts[0] = max(counts[0], t)
    return t


@scalar
def advance(x, tensor):
    """Count an update of a tensor, write its hyper-parameters, and choose its record."""
    record, hyper = words(tensor[w.T_RECORD]), words(tensor[w.T_HYPER])
    t = count(x, tensor, record)
    values, names, rescale = doubles(hyper[w.VALUES]), hyper[w.NAMES], hyper[w.RESCALE]
    source = 1
    if hyper[w.PREPARE]:
        source = 1 + names
        if values[0] != t or hyper[w.CARRIES]:
            for f in range(names):
                values[source + f] = values[1 + f]
            values[0] = t
            carried = hyper[w.CARRIED_NUMBERS] + 8 * record[w.CARRIED]
            prepare_step(hyper[w.PREPARE], np.float64(t), hyper[w.VALUES] + 8 * source, carried)
    for f in range(hyper[w.OWN]):
        value = values[source + f]
        if f == rescale:
            value = value * doubles(x[w.NORM])[w.FACTOR]
        if hyper[w.WIDE]:
            doubles(record[w.FIELDS])[f] = value
        else:
            singles(record[w.FIELDS])[f] = np.float32(value)
    follows, tensor[w.T_FOLLOW] = words(tensor[w.T_KERNELS])[w.FOLLOW], 0
    if hyper[w.SKIPS]:
        tensor[w.T_RECORD], tensor[w.T_LISTED] = x[w.NOTHING], 0
        tensor[w.T_KERNELS] = words(x[w.NOTHING])[w.KERNELS]
    elif record[w.RESTING] and (hyper[w.RESTS] or follows):
        if not hyper[w.RESTS]:
            tensor[w.T_FOLLOW] = tensor[w.T_RECORD]
        resting = words(record[w.RESTING])
        tensor[w.T_RECORD] = record[w.RESTING]
        tensor[w.T_KERNELS] = resting[w.ROW_KERNELS if tensor[w.T_LISTED] else w.KERNELS]
    if record[w.KEYED]:
        row = unsigned(words(tensor[w.T_RECORD])[w.ROW])
        row[KEY] = stream_key(record[w.SEED], record[w.NUMBER], t)


@scalar
def scale(code, place, count, factor):
    """Multiply numbers by a factor, in their own precision."""
    if code == w.FLOAT64:
        for k in range(count):
            doubles(place)[k] *= factor
    else:
        for k in range(count):
            singles(place)[k] *= np.float32(factor)


@scalar
def begin(x, k):
    """Copy the arrays that are not in the record's order, and enter all addresses."""
    tensor = tensor_of(x, k)
    record = words(tensor[w.T_RECORD])
    row, grad, weight = words(record[w.ROW]), tensor[w.T_GRAD], tensor[w.T_WEIGHT]
    own = scratch = tensor[w.T_SCRATCH]
    if tensor[w.T_GRAD_COPIED]:
        copy(x, k, COPY_GRAD, scratch)
        grad, own = scratch, scratch + grad_bytes(tensor, record)
    if record[w.SCALED] and doubles(x[w.NORM])[w.FACTOR] != 1:
        count = grad_elements(tensor, record)
        scale(record[w.GRAD_CODE], grad, count, doubles(x[w.NORM])[w.FACTOR])
    if tensor[w.T_COPIED]:
        copy(x, k, COPY_WEIGHT, own)
        weight = own
    if tensor[w.T_LISTED]:
        enter_rows(tensor, row)
    row[record[w.WEIGHT_COLUMN]], row[record[w.GRAD_COLUMN]] = weight, grad
    if tensor[w.T_FOLLOW]:
        follower = words(tensor[w.T_FOLLOW])
        words(follower[w.ROW])[follower[w.WEIGHT_COLUMN]] = weight


@scalar
def end(x, k):
    """Copy a weight back."""
    tensor = tensor_of(x, k)
    if tensor[w.T_COPIED]:
        record = words(tensor[w.T_RECORD])
        copy(x, k, COPY_BACK, words(record[w.ROW])[record[w.WEIGHT_COLUMN]])


@scalar
def reduce(tensor, step, first, count):
    """Compute the sums of chunks of a reduction."""
    record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
    place = w.PASS + w.PASS_WORDS * step
    each = kernels[place + 2]
    partial = record[w.SUMS] + 8 * each * first
    for k in range(each * count):
        doubles(partial)[k] = 0.0
    chunks = record[w.FLAT] + 24 * first
    call(kernels[place], chunks, count, record[w.ROW], record[w.FIELDS], partial)


@scalar
def finalize(tensor, step):
    """Compute the hyper-parameters that follow from the sums of a reduction."""
    record = words(tensor[w.T_RECORD])
    finish = words(tensor[w.T_KERNELS])[w.PASS + w.PASS_WORDS * step + 1]
    call(
        finish,
        record[w.FLAT],
        record[w.FLAT_COUNT],
        record[w.ROW],
        record[w.FIELDS],
        record[w.SUMS],
    )


@scalar
def covers(tensor):
    """Whether all rows are changed after an update of the indexed ones."""
    return words(tensor[w.T_KERNELS])[w.FLUSH] != 0 or tensor[w.T_FOLLOW] != 0


@scalar
def cover(tensor, first, count):
    """Apply the deferred decay of rows, including this step's, and average them."""
    record, chunk = words(tensor[w.T_RECORD]), np.empty(3, np.int64)
    chunk[0], chunk[1], chunk[2] = 0, first, count
    place, flush = np.int64(chunk.ctypes.data), words(tensor[w.T_KERNELS])[w.FLUSH]
    if flush:
        totals = doubles(words(record[w.ROW])[DECAY])
        totals[0] = totals[1]
        call(flush, place, 1, record[w.ROW], record[w.FIELDS], 0)
    if tensor[w.T_FOLLOW]:
        record = words(tensor[w.T_FOLLOW])
        follow = words(record[w.ROW_KERNELS])[w.FOLLOW]
        call(follow, place, 1, record[w.ROW], record[w.FIELDS], 0)
    chunk[0] = 1  # a use after the calls: arrays are freed after their last one


@scalar
def update(x, k):
    """Count and update one tensor."""
    tensor = tensor_of(x, k)
    advance(x, tensor)
    begin(x, k)
    record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
    for step in range(kernels[w.PASSES]):
        reduce(tensor, step, 0, record[w.FLAT_COUNT])
        finalize(tensor, step)
    if kernels[w.UPDATE]:
        call(kernels[w.UPDATE], tensor[w.T_CHUNKS], 1, record[w.ROW], record[w.FIELDS], 0)
    if covers(tensor):
        cover(tensor, 0, record[w.LENGTHS])
    end(x, k)


@scalar
def admit_call(x, index, grad, weight):
    """Check the arguments of a call; return the number of its tensors and a status."""
    if items_of(x, index) == 0:
        status = admit(x, 0, index, grad, weight)
        return 1, w.REFUSED if status == w.LEFT_OUT else status
    return admit_list(x, index, grad, weight)


@scalar
def is_asked(x):
    """Whether the hyper-parameters of the admitted call have been computed."""
    expected = x[w.EXPECTED] == x[w.UPDATE_NUMBER] and x[w.EXPECTED_TIME] == x[w.TIME]
    return x[w.ASKED] != 0 or (expected and x[w.EXPECTED] != 0 and x[w.UNEVEN] == 0)


@scalar
def divide_scratch(x, n):
    """Divide scratch memory among the tensors of a call; return a status.

    The rows of row-sparse gradients come first. Tensors of small calls share the memory of copies,
    as they are updated one by one.
    """
    total, need, largest, listed, counted, asked = 0, 0, 0, 0, 0, is_asked(x)
    for k in range(n):
        tensor = tensor_of(x, k)
        record = words(tensor[w.T_RECORD])
        if words(tensor[w.T_HYPER])[w.VALID] == 0 and (asked or not x[w.ASKING]):
            return w.REFUSED
        if max(elements_of(tensor, record), listed, need) > w.MOST:
            return w.REFUSED
        total += work_of(tensor, record)
        if tensor[w.T_LISTED]:
            tensor[w.T_REGION] = x[w.SCRATCH] + listed
            listed, counted = listed + row_room(tensor, record), max(counted, tensor[w.T_LENGTH])
        size = scratch_of(x, tensor)
        tensor[w.T_SCRATCH] = x[w.SCRATCH] + need
        need, largest = need + size, max(largest, size)
    x[w.LARGE], x[w.LISTED], x[w.NEED_COUNTED] = total >= x[w.LARGE_FROM], listed, counted + 1
    apart = x[w.LARGE] or x[w.CLIP] or x[w.CHECKS]
    x[w.NEED] = listed + (need if apart else largest)
    if x[w.NEED] > x[w.ROOM] or (listed > 0 and counted >= x[w.COUNTED]):
        return w.NO_ROOM
    for k in range(n if listed > 0 or not apart else 0):
        tensor = tensor_of(x, k)
        tensor[w.T_SCRATCH] = listed + (tensor[w.T_SCRATCH] if apart else x[w.SCRATCH])
    if x[w.CLIP] and x[w.REPEATS]:
        return w.REFUSED
    if x[w.LARGE] and x[w.THREADS] == 0 and not x[w.CHECKS]:
        return w.IS_LARGE
    return list_all(x, n) if listed > 0 else w.OK


@scalar
def list_all(x, n):
    """Copy the row indices of a call; return a status."""
    for k in range(n):
        tensor = tensor_of(x, k)
        if tensor[w.T_LISTED]:
            call(x[w.LIST_ROWS], x[w.SELF], k, 0, 0, 0)
            if tensor[w.T_STATUS] != w.OK:
                return tensor[w.T_STATUS]
    return w.OK


@scalar
def order_all(x, n):
    """Order the rows of row-sparse gradients, as kernels read them."""
    for k in range(n if x[w.LISTED] else 0):
        if tensor_of(x, k)[w.T_LISTED]:
            call(x[w.ORDER_ROWS], x[w.SELF], k, 0, 0, 0)


@scalar
def hold(x, n, held):
    """Keep the arrays of a call alive, or release them."""
    for k in range(0 if x[w.WRITTEN] else n):
        tensor = tensor_of(x, k)
        if held:
            keep_alive(tensor[w.T_GRAD_ID])
            keep_alive(tensor[w.T_WEIGHT_ID])
        else:
            release(tensor[w.T_GRAD_ID])
            release(tensor[w.T_WEIGHT_ID])


@scalar
def perform(x, context, n):
    """Clip and measure the gradients of a call, and update; return a status."""
    shared, asks = x[w.LARGE] and x[w.RUN], x[w.ASKING] and not is_asked(x)
    if asks and not x[w.MEASURE]:
        return w.ASKS
    order_all(x, n)
    if x[w.CLIP]:
        call(x[w.CLIP_LARGE if shared else w.CLIP], context, n, x[w.THREADS], 0, 0)
    if x[w.MEASURE] and not x[w.ASKED]:
        call(x[w.MEASURE_LARGE if shared else w.MEASURE], context, n, x[w.THREADS], 0, 0)
        if not math.isfinite(doubles(x[w.NORM])[w.GLOBAL_NORM]):
            return w.SKIPPED
    if asks:
        return w.ASKS
    if shared:
        call(x[w.RUN], context, n, x[w.THREADS], 0, 0)
    else:
        for k in range(n):
            update(x, k)
    return w.OK


@scalar
def enter_at(x, context, index, grad, weight):
    """Update the tensors of a call, given the addresses of its arguments; return a status."""
    x[w.CALL_NUMBER] += 1
    x[w.REPEATS] = x[w.UNEVEN] = x[w.DONE] = 0
    n, status = admit_call(x, index, grad, weight)
    if status < 0:
        return status
    refusal = divide_scratch(x, n)
    if refusal != w.OK or x[w.CHECKS]:
        return status if refusal == w.OK else refusal
    thread = 0
    if x[w.LARGE]:
        hold(x, n, True)
        thread = release_gil()
    outcome = perform(x, context, n)
    if x[w.LARGE]:
        restore_gil(thread)
        hold(x, n, False)
    if outcome != w.OK:
        return outcome
    x[w.DONE], x[w.ASKED], x[w.EACH], x[w.EXPECTED] = 1, 0, 0, 0
    return status


def enter_call(context, index, grad, weight):
    """Update the tensors of a call; return a status."""
    return enter_at(words(context), context, address(index), address(grad), address(weight))


def enter_headers(context, index, grad, weight):
    """Like :func:`enter_call`, given the addresses of headers that Python has written.

    In the place of each index stands the address of its record.
    """
    x = words(context)
    x[w.WRITTEN] = 1
    status = enter_at(x, context, index, grad, weight)
    x[w.WRITTEN] = 0
    return status


# Large calls, on several threads


@scalar
def sort_spans(spans, count):
    """Sort pairs of words by their first word."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            low, high, j = spans[2 * i], spans[2 * i + 1], i
            while j >= gap and spans[2 * (j - gap)] > low:
                spans[2 * j], spans[2 * j + 1] = spans[2 * (j - gap)], spans[2 * (j - gap) + 1]
                j -= gap
            spans[2 * j], spans[2 * j + 1] = low, high
        gap //= 3


@scalar
def are_apart(x, n):
    """Whether no tensor writes to memory that another one reads or writes."""
    spans, count = words(x[w.SPANS]), 0
    for k in range(n):
        tensor = tensor_of(x, k)
        record = words(tensor[w.T_RECORD])
        row, guard, width = words(record[w.ROW]), words(record[w.GUARDS]), record[w.GUARD_WIDTH]
        if record[w.SIZE] > 0:
            spans[2 * count], spans[2 * count + 1] = tensor[w.T_LOW], tensor[w.T_HIGH]
            count += 1
        for g in range(record[w.GUARDED]):
            size = guard[g * width + numpy_abi.NBYTES]
            if size > 0:
                first = row[column_of(record, g)]
                spans[2 * count], spans[2 * count + 1] = first, first + size
                count += 1
    sort_spans(spans, count)
    for i in range(1, count):
        if spans[2 * i] < spans[2 * i - 1]:
            return False
    for k in range(n):
        tensor = tensor_of(x, k)
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if spans[2 * middle + 1] <= tensor[w.T_GRAD_LOW]:
                low = middle + 1
            else:
                high = middle
        if low < count and spans[2 * low] < tensor[w.T_GRAD_HIGH]:
            return False
    return True


@scalar
def cut(place, tensor):
    """Return the number of items before some work, in whole cache lines of dense tensors."""
    record = words(tensor[w.T_RECORD])
    if tensor[w.T_LISTED] and words(tensor[w.T_KERNELS])[w.BY_ROW]:
        return rows_before(place, tensor, work_of(tensor, record))
    size, items = record[w.SIZE], record[w.ITEM_COUNT]
    if place <= 0 or place >= size:
        return 0 if place <= 0 else items
    line = LINE if items == size else 1
    return proportion(place, size, items) // line * line


BEGIN, END, UPDATES, COVERS, REDUCTIONS = range(5)
"""Phases of a large call; reductions are numbered from REDUCTIONS on."""


def share_call(context, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    x = words(context)
    shares = x[w.THREADS]
    if phase in (BEGIN, END):
        for k in range(first + share, last, shares):
            if phase == BEGIN:
                begin(x, k)
            else:
                end(x, k)
        return
    if phase == COVERS:
        for k in range(first, last):
            tensor = tensor_of(x, k)
            height = words(tensor[w.T_RECORD])[w.LENGTHS]
            if covers(tensor):
                start, stop = height * share // shares, height * (share + 1) // shares
                cover(tensor, start, stop - start)
        return
    total, before = 0, 0
    for k in range(first, last):
        tensor = tensor_of(x, k)
        record = words(tensor[w.T_RECORD])
        total += work_of(tensor, record) if phase == UPDATES else record[w.FLAT_COUNT]
    low, high = total * share // shares, total * (share + 1) // shares
    chunk = np.empty(3, np.int64)
    chunk[0] = 0
    for k in range(first, last):
        tensor = tensor_of(x, k)
        record, kernels = words(tensor[w.T_RECORD]), words(tensor[w.T_KERNELS])
        if phase == UPDATES:
            chunk[1] = cut(low - before, tensor)
            chunk[2] = cut(high - before, tensor) - chunk[1]
            if chunk[2] > 0:
                place = np.int64(chunk.ctypes.data)
                call(kernels[w.UPDATE], place, 1, record[w.ROW], record[w.FIELDS], 0)
            before += work_of(tensor, record)
        else:
            count, step = record[w.FLAT_COUNT], phase - REDUCTIONS
            start, stop = max(low - before, 0), min(high - before, count)
            if start < stop and step < kernels[w.PASSES]:
                reduce(tensor, step, start, stop - start)
            before += count


def spread_call(context, phase, first, last, function):
    """Do the shares of a phase on several threads, each by a call of the function."""
    for share in prange(words(context)[w.THREADS]):
        call(function, context, phase, first, last, np.int64(share))


def run_call(context, n, _, __, ___):
    """Update the admitted tensors of a large call on several threads."""
    x = words(context)
    group = 1 if x[w.REPEATS] or (n > 1 and not are_apart(x, n)) else n
    for first in range(0, n, max(group, 1)):
        last, passes, copies, covered = first + group, 0, False, False
        for k in range(first, last):
            tensor = tensor_of(x, k)
            advance(x, tensor)
            passes = max(passes, words(tensor[w.T_KERNELS])[w.PASSES])
            covered = covered or covers(tensor)
            copies = copies or tensor[w.T_COPIED] != 0 or tensor[w.T_GRAD_COPIED] != 0
            if not (tensor[w.T_COPIED] or tensor[w.T_GRAD_COPIED]):
                begin(x, k)
        for number in range(passes + 4):
            # In order: copies, reductions, updates, all rows, copies back.
            phase = BEGIN if number == 0 else REDUCTIONS + number - 1
            if number > passes:
                phase = END if number == passes + 3 else UPDATES + number - passes - 1
            if phase >= REDUCTIONS or phase == UPDATES or (copies if phase < UPDATES else covered):
                call(x[w.SPREAD], context, phase, first, last, x[w.UPDATE_SHARE])
            if phase >= REDUCTIONS:
                for k in range(first, last):
                    tensor = tensor_of(x, k)
                    if phase - REDUCTIONS < words(tensor[w.T_KERNELS])[w.PASSES]:
                        finalize(tensor, phase - REDUCTIONS)


@cache
def enter():
    """Return the compiled ``(context, index, grad, weight)``, see :func:`enter_call`."""
    kernel = compiled(enter_call, None, parallel=False, nogil=False)
    return bind_to(kernel, types.int64, Object, Object, Object)


@cache
def enter_written():
    """Return the compiled ``(context, index, grad, weight)``, see :func:`enter_headers`."""
    kernel = compiled(enter_headers, None, parallel=False, nogil=False)
    return bind_to(kernel, *[types.int64] * 4)


@cache
def spread() -> int:
    """Return the address of :func:`spread_call`."""
    return address_of(spread_call, ON_CALL, None, parallel=True)


@cache
def run() -> tuple[int, int]:
    """Return the addresses of :func:`run_call` and :func:`share_call`."""
    return address_of(run_call, ON_CALL, None), address_of(share_call, ON_CALL, None)
