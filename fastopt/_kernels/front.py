"""One call, compiled once for all rules: from Python objects to updated weights.

:func:`enter` takes the three arguments of a call as they are::

    updater(index, grad, weight)
      |  addresses of three objects, and of the context (settings, and memory for a call)
      v
    enter_call              (enter_headers, where Python writes what headers would say)
      |  admit_call        find the record of each index, check and read both headers:
      |                    a tensor (addresses, strides, what is copied) for each index
      |  divide_scratch    memory for copies; small or large? list_all copies row indices
      |  - - - - - - - - - until here nothing but the description of the call is written
      |  hold, release_gil of a large call only
      v
    perform
      |  order_and_clip    sort indexed rows; units of gradients      (clipping, by address, if set)
      |  measure           squares, norm and factor  (measuring, by address, if set)
      v
    update, for each tensor in the order of the list; or run, in phases on several threads
      |  advance           count, write the hyper-parameters of the step
      |  begin             copy what lies in another order or dtype, enter all addresses
      |  reduce, finalize  reductions of the rule, if it has some
      |  kernels.update    the loop of the rule, by address
      |  cover, end        deferred decay and averages of all rows; copy the weight back
      v
    status

What Python does for a status (:meth:`fastopt._engine.records.Records.resolve`):

====================  ======================================================================
OK                    nothing
MOVED                 keeps the new weight alive in place of the last one
SKIPPED               tells the loss scaler: gradients are not finite, and nothing has changed
NO_ROOM, NO_CAPACITY  makes scratch memory, or rows, for what NEED says; enters again
IS_LARGE              chooses threads, compiles what runs on several; enters again
ASKS                  computes schedules and ``hyper()``; enters again
REFUSED, UNKNOWN      checks in words, and enrolls what is new; or raises
====================  ======================================================================

With a negative status nothing has changed, whatever the position of the tensor that caused it.

A *record* (:mod:`fastopt._kernels.record_words`) describes the form of one parameter and never an
object: any weight and gradient of that form fit, at any address and in any memory order. Arrays in
another order or dtype are copied to scratch memory, and weights back
(:mod:`fastopt._kernels.strided`).

What this code relies on, and the tests that stand in for a coverage that compiled code has not:

*Owners.* The context, records, tensors, spans and scratch memory are NumPy arrays of
:class:`fastopt._engine.records.Records`, and so are the loops, hyper-parameters and table rows to
which records have addresses. They are replaced under the lock of the updater, which each call takes
in Python before it enters: between two calls, never during one.
``test_states_may_be_assigned_by_another_thread``,
``test_loops_that_two_threads_look_up_at_once_are_the_same_array``.

*Lifetime of arguments.* The frame of the caller keeps the three arguments, and the lists keep their
items as long as no other thread runs. A large call releases the GIL, so :func:`hold` counts a
reference to each array before, and :func:`hold` drops it once the GIL is back.
``test_gradients_that_another_thread_drops_stay_alive_during_the_call``,
``test_freed_memory_is_not_read``.

*The GIL.* A small call holds it from the first to the last word, and runs no Python: it is atomic
for other threads and for signal handlers. A large call may release it, as all that its loops read
lies in arrays of the owner, in arrays that are held, or in copies of row indices.
``test_interrupts.py``, ``test_any_number_of_threads_gives_the_same_bits``.

*Writing.* A thread of a large call writes its share of the chunks of a tensor, and no other one has
the same elements. Tensors whose memory meets (:func:`are_apart`) are updated one after the other.
``test_lists_of_arrays_that_share_memory_are_updated_one_by_one``, ``test_lists_machine.py``.

Tests: ``tests/engine/test_records.py``, ``tests/engine/test_parameters.py``,
``tests/test_fuzz.py``.
"""

import math
from functools import cache

import numpy as np
from numba import prange, types

from fastopt._kernels import admission, strided
from fastopt._kernels import record_words as w
from fastopt._kernels.chunks import LINE
from fastopt._kernels.clipping import PHASES as CLIPS
from fastopt._kernels.compiling import ON_WORDS, address_of, bind_to, compiled, entry_of
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
from fastopt.kernels.rule import scalar

ON_CALL = ON_WORDS


@scalar
def count(context, tensor, record):
    """Count an update of a tensor, and return its number."""
    if context.each and tensor.count >= 0:
        return tensor.count
    counts = words(context.counts)
    t = counts[record.count] + 1
    counts[record.count] = t
    counts[0] = max(counts[0], t)
    return t


@scalar
def advance(context, tensor):
    """Count an update of a tensor, write its hyper-parameters, and choose its record."""
    record, hyper = w.record_at(tensor.record), w.hyper_at(tensor.hyper)
    t = count(context, tensor, record)
    values, names, rescale = doubles(hyper.values), hyper.names, hyper.rescale
    source = 1
    if hyper.prepare:
        source = 1 + names
        if values[0] != t or hyper.carries:
            for f in range(names):
                values[source + f] = values[1 + f]
            values[0] = t
            carried = hyper.carried_numbers + 8 * record.carried
            prepare_step(hyper.prepare, np.float64(t), hyper.values + 8 * source, carried)
    for f in range(hyper.own):
        value = values[source + f]
        if f == rescale:
            value = value * w.norm_at(context.norm).factor
        if hyper.wide:
            doubles(record.fields)[f] = value
        else:
            singles(record.fields)[f] = np.float32(value)
    follows, tensor.follow = w.loops_at(tensor.kernels).follow, 0
    if hyper.skips:
        tensor.record, tensor.listed = context.nothing, 0
        tensor.kernels = w.record_at(context.nothing).kernels
    elif record.resting and (hyper.rests or follows):
        if not hyper.rests:
            tensor.follow = tensor.record
        resting = w.record_at(record.resting)
        tensor.record = record.resting
        tensor.kernels = resting.row_kernels if tensor.listed else resting.kernels
    if record.keyed:
        row = unsigned(w.record_at(tensor.record).row)
        row[KEY] = stream_key(record.seed, record.number, t)


@scalar
def scale(numbers, place, count, factor):
    """Multiply numbers by a factor, in their own precision."""
    for k in range(count):
        numbers(place)[k] *= type(numbers(place)[k])(factor)


@scalar
def begin(context, k):
    """Copy the arrays that are not in the record's order, and enter all addresses."""
    tensor = admission.tensor_of(context, k)
    record = w.record_at(tensor.record)
    row, grad, weight = words(record.row), tensor.grad, tensor.weight
    target = scratch = tensor.scratch
    if tensor.grad_copied:
        admission.copy(context, k, strided.COPY_GRAD, scratch)
        grad, target = scratch, scratch + strided.grad_bytes(tensor, record)
    if record.scaled and w.norm_at(context.norm).factor != 1:
        count = strided.grad_elements(tensor, record)
        strided.in_reals(scale, record.grad_code, grad, count, w.norm_at(context.norm).factor)
    if tensor.copied:
        admission.copy(context, k, strided.COPY_WEIGHT, target)
        weight = target
    if tensor.listed:
        enter_rows(tensor, row)
    row[record.weight_column], row[record.grad_column] = weight, grad
    if tensor.follow:
        follower = w.record_at(tensor.follow)
        words(follower.row)[follower.weight_column] = weight


@scalar
def end(context, k):
    """Copy a weight back."""
    tensor = admission.tensor_of(context, k)
    if tensor.copied:
        record = w.record_at(tensor.record)
        admission.copy(context, k, strided.COPY_BACK, words(record.row)[record.weight_column])


@scalar
def pass_of(tensor, step):
    """Return reduction `step` of a tensor."""
    return w.pass_at(tensor.kernels + 8 * (w.PASS + w.PASS_WORDS * step))


@scalar
def reduce(tensor, step, first, count):
    """Compute the sums of chunks of a reduction."""
    record, one = w.record_at(tensor.record), pass_of(tensor, step)
    partial = record.sums + 8 * one.count * first
    for k in range(one.count * count):
        doubles(partial)[k] = 0.0
    call(one.sums, record.flat + 24 * first, count, record.row, record.fields, partial)


@scalar
def finalize(tensor, step):
    """Compute the hyper-parameters that follow from the sums of a reduction."""
    record = w.record_at(tensor.record)
    finish = pass_of(tensor, step).finish
    call(finish, record.flat, record.flat_count, record.row, record.fields, record.sums)


@scalar
def covers(tensor):
    """Whether all rows are changed after an update of the indexed ones."""
    return w.loops_at(tensor.kernels).flush != 0 or tensor.follow != 0


@scalar
def cover(tensor, first, count):
    """Apply the deferred decay of rows, including this step's, and average them."""
    record, chunk = w.record_at(tensor.record), np.empty(3, np.int64)
    chunk[0], chunk[1], chunk[2] = 0, first, count
    place, flush = np.int64(chunk.ctypes.data), w.loops_at(tensor.kernels).flush
    if flush:
        totals = doubles(words(record.row)[DECAY])
        totals[0] = totals[1]
        call(flush, place, 1, record.row, record.fields, 0)
    if tensor.follow:
        record = w.record_at(tensor.follow)
        follow = w.loops_at(record.row_kernels).follow
        call(follow, place, 1, record.row, record.fields, 0)
    chunk[0] = 1  # a use after the calls: arrays are freed after their last one


@scalar
def update(context, k):
    """Count and update one tensor."""
    tensor = admission.tensor_of(context, k)
    advance(context, tensor)
    begin(context, k)
    record, kernels = w.record_at(tensor.record), w.loops_at(tensor.kernels)
    for step in range(kernels.passes):
        reduce(tensor, step, 0, record.flat_count)
        finalize(tensor, step)
    if kernels.update:
        call(kernels.update, tensor.chunks, 1, record.row, record.fields, 0)
    if covers(tensor):
        cover(tensor, 0, strided.lengths_of(record)[0])
    end(context, k)


@scalar
def admit_call(context, index, grad, weight):
    """Check the arguments of a call; return the number of its tensors and a status."""
    if admission.items_of(context, index) == 0:
        status = admission.admit(context, 0, index, grad, weight)
        return 1, w.REFUSED if status == w.LEFT_OUT else status
    return admission.admit_list(context, index, grad, weight)


@scalar
def is_asked(context):
    """Whether the hyper-parameters of the admitted call have been computed."""
    expected = context.expected == context.update_number and context.expected_time == context.time
    return context.asked != 0 or (expected and context.expected != 0 and context.uneven == 0)


@scalar
def divide_scratch(context, n):
    """Divide scratch memory among the tensors of a call; return a status.

    The rows of row-sparse gradients come first. Tensors of small calls share the memory of copies,
    as they are updated one by one.
    """
    total, need, largest, listed, counted, asked = 0, 0, 0, 0, 0, is_asked(context)
    for k in range(n):
        tensor = admission.tensor_of(context, k)
        record = w.record_at(tensor.record)
        if w.hyper_at(tensor.hyper).valid == 0 and (asked or not context.asking):
            return w.REFUSED
        if max(strided.elements_of(tensor, record), listed, need) > w.MOST:
            return w.REFUSED
        total += work_of(tensor, record)
        if tensor.listed:
            tensor.region = context.scratch + listed
            listed, counted = listed + row_room(tensor, record), max(counted, tensor.length)
        size = admission.scratch_of(context, tensor)
        tensor.scratch = context.scratch + need
        need, largest = need + size, max(largest, size)
    context.large, context.listed = total >= context.large_from, listed
    context.need_counted = counted + 1
    apart = context.large or context.clip or context.checks
    context.need = listed + (need if apart else largest)
    if context.need > context.room or (listed > 0 and counted >= context.counted):
        return w.NO_ROOM
    for k in range(n if listed > 0 or not apart else 0):
        tensor = admission.tensor_of(context, k)
        tensor.scratch = listed + (tensor.scratch if apart else context.scratch)
    if context.clip and context.repeats:
        return w.REFUSED
    if context.large and context.threads == 0 and not context.checks:
        return w.IS_LARGE
    return list_all(context, n) if listed > 0 else w.OK


@scalar
def list_all(context, n):
    """Copy the row indices of a call; return a status."""
    for k in range(n):
        tensor = admission.tensor_of(context, k)
        if tensor.listed:
            call(context.list_rows, context.self, k, 0, 0, 0)
            if tensor.status != w.OK:
                return tensor.status
    return w.OK


@scalar
def order_and_clip(context, n):
    """Order the rows of row-sparse gradients, as kernels read them, and clip units."""
    for k in range(n if context.listed else 0):
        if admission.tensor_of(context, k).listed:
            call(context.order_rows, context.self, k, 0, 0, 0)
    for phase in range(CLIPS if context.clip else 0):
        admission.divide(context, phase, 0, n, context.clip)


@scalar
def hold(context, n, held):
    """Keep the arrays of a call alive, or release them."""
    for k in range(0 if context.written else n):
        tensor = admission.tensor_of(context, k)
        if held:
            keep_alive(tensor.grad_id)
            keep_alive(tensor.weight_id)
        else:
            release(tensor.grad_id)
            release(tensor.weight_id)


@scalar
def perform(context, n):
    """Clip and measure the gradients of a call, and update; return a status."""
    asks = context.asking and not is_asked(context)
    if asks and not context.measure:
        return w.ASKS
    order_and_clip(context, n)
    if context.measure and not context.asked:
        call(context.measure, context.self, n, 0, 0, 0)
        if not math.isfinite(w.norm_at(context.norm).global_norm):
            return w.SKIPPED
    if asks:
        return w.ASKS
    if admission.shares_of(context) > 1:
        call(context.run, context.self, n, 0, 0, 0)
    else:
        for k in range(n):
            update(context, k)
    return w.OK


@scalar
def enter_at(context, index, grad, weight):
    """Update the tensors of a call, given the addresses of its arguments; return a status."""
    context.call_number += 1
    context.repeats = context.uneven = context.done = 0
    n, status = admit_call(context, index, grad, weight)
    if status < 0:
        return status
    refusal = divide_scratch(context, n)
    if refusal != w.OK or context.checks:
        return status if refusal == w.OK else refusal
    thread = 0
    if context.large:
        hold(context, n, True)
        thread = release_gil()
    outcome = perform(context, n)
    if context.large:
        restore_gil(thread)
        hold(context, n, False)
    if outcome != w.OK:
        return outcome
    context.done, context.asked, context.each, context.expected = 1, 0, 0, 0
    return status


def enter_call(at, index, grad, weight):
    """Update the tensors of a call; return a status."""
    return enter_at(w.context_at(at), address(index), address(grad), address(weight))


def enter_headers(at, index, grad, weight):
    """Like :func:`enter_call`, given the addresses of headers that Python has written.

    In the place of each index stands the address of its record.
    """
    context = w.context_at(at)
    context.written = 1
    status = enter_at(context, index, grad, weight)
    context.written = 0
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
def are_apart(context, n):
    """Whether no tensor writes to memory that another one reads or writes."""
    spans, count = words(context.spans), 0
    for k in range(n):
        tensor = admission.tensor_of(context, k)
        record = w.record_at(tensor.record)
        row = words(record.row)
        if record.size > 0:
            spans[2 * count], spans[2 * count + 1] = tensor.low, tensor.high
            count += 1
        for g in range(record.guarded):
            size = admission.guard_of(record, g).nbytes
            if size > 0:
                first = row[admission.column_of(record, g)]
                spans[2 * count], spans[2 * count + 1] = first, first + size
                count += 1
    sort_spans(spans, count)
    for i in range(1, count):
        if spans[2 * i] < spans[2 * i - 1]:
            return False
    for k in range(n):
        tensor = admission.tensor_of(context, k)
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if spans[2 * middle + 1] <= tensor.grad_low:
                low = middle + 1
            else:
                high = middle
        if low < count and spans[2 * low] < tensor.grad_high:
            return False
    return True


@scalar
def cut(place, tensor):
    """Return the number of items before some work, in whole cache lines of dense tensors."""
    record = w.record_at(tensor.record)
    if tensor.listed and w.loops_at(tensor.kernels).by_row:
        return rows_before(place, tensor, work_of(tensor, record))
    size, items = record.size, record.item_count
    if place <= 0 or place >= size:
        return 0 if place <= 0 else items
    line = LINE if items == size else 1
    return strided.proportion(place, size, items) // line * line


BEGIN, END, UPDATES, COVERS, REDUCTIONS = range(5)
"""Phases of a large call; reductions are numbered from REDUCTIONS on."""


def share_call(at, phase, first, last, share):
    """Do one share of a phase for the tensors from `first` to `last`."""
    context = w.context_at(at)
    shares = admission.shares_of(context)
    if phase in (BEGIN, END):
        for k in range(first + share, last, shares):
            if phase == BEGIN:
                begin(context, k)
            else:
                end(context, k)
        return
    if phase == COVERS:
        for k in range(first, last):
            tensor = admission.tensor_of(context, k)
            height = strided.lengths_of(w.record_at(tensor.record))[0]
            if covers(tensor):
                start, stop = height * share // shares, height * (share + 1) // shares
                cover(tensor, start, stop - start)
        return
    total, before = 0, 0
    for k in range(first, last):
        tensor = admission.tensor_of(context, k)
        record = w.record_at(tensor.record)
        total += work_of(tensor, record) if phase == UPDATES else record.flat_count
    low, high = total * share // shares, total * (share + 1) // shares
    chunk = np.empty(3, np.int64)
    chunk[0] = 0
    for k in range(first, last):
        tensor = admission.tensor_of(context, k)
        record, kernels = w.record_at(tensor.record), w.loops_at(tensor.kernels)
        if phase == UPDATES:
            chunk[1] = cut(low - before, tensor)
            chunk[2] = cut(high - before, tensor) - chunk[1]
            if chunk[2] > 0:
                place = np.int64(chunk.ctypes.data)
                call(kernels.update, place, 1, record.row, record.fields, 0)
            before += work_of(tensor, record)
        else:
            count, step = record.flat_count, phase - REDUCTIONS
            start, stop = max(low - before, 0), min(high - before, count)
            if start < stop and step < kernels.passes:
                reduce(tensor, step, start, stop - start)
            before += count


def spread_call(at, phase, first, last, function):
    """Do the shares of a phase on several threads, each by a call of the function."""
    for share in prange(w.context_at(at).threads):
        call(function, at, phase, first, last, np.int64(share))


def run_call(at, n, _, __, ___):
    """Update the admitted tensors of a large call on several threads."""
    context = w.context_at(at)
    group = 1 if context.repeats or (n > 1 and not are_apart(context, n)) else n
    for first in range(0, n, max(group, 1)):
        last, passes, copies, covered = first + group, 0, False, False
        for k in range(first, last):
            tensor = admission.tensor_of(context, k)
            advance(context, tensor)
            passes = max(passes, w.loops_at(tensor.kernels).passes)
            covered = covered or covers(tensor)
            copies = copies or tensor.copied != 0 or tensor.grad_copied != 0
            if not (tensor.copied or tensor.grad_copied):
                begin(context, k)
        if copies:
            admission.divide(context, BEGIN, first, last, context.update_share)
        for step in range(passes):
            admission.divide(context, REDUCTIONS + step, first, last, context.update_share)
            for k in range(first, last):
                tensor = admission.tensor_of(context, k)
                if step < w.loops_at(tensor.kernels).passes:
                    finalize(tensor, step)
        admission.divide(context, UPDATES, first, last, context.update_share)
        if covered:
            admission.divide(context, COVERS, first, last, context.update_share)
        if copies:
            admission.divide(context, END, first, last, context.update_share)


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
    return entry_of(run_call), entry_of(share_call)
