"""What compiled code does in a call on devices: counts, hyper-parameters and repeated launches.

Python reads the arrays (:mod:`fastopt._kernels.cuda_arrays`), and launches what updates them. Their
records have no loops and no arrays: a record has the count, the hyper-parameters and the key of a
parameter, which :func:`advance_all` writes to the rows of the tables that are launched. A call with
the weights of the one before needs nothing but that, the addresses of new gradients, and the same
launches: :func:`repeat_call`.

What that relies on:

*Addresses.* Arrays of numba never move. Compiled code compares the ids of the objects with those
that Python has read last, whose deaths weak references report.
``test_a_gradient_that_is_gone_is_not_read``,
``test_gradients_of_which_one_is_replaced_are_read_again``.

*Attributes.* Gradients that were not seen before are read with C functions of CPython, in each
call: of objects whose exact type has no properties, so that no Python runs and their attributes
stay while they are read (:func:`read`). ``test_new_gradients_run_no_python_and_do_the_same``,
``test_a_new_gradient_that_is_written_to_or_of_another_form_is_no_new_gradient``.

*Tables.* The launches have tables of their own in the memory of the device, to which nothing else
writes. If gradients are read, or random numbers drawn, each call uploads them on their stream, and
hyper-parameters that tensors do not share.
``test_a_norm_that_is_measured_in_between_uses_other_memory_of_the_table``.

*Owners.* A :class:`~fastopt._engine.device_call.Repeat` keeps the memory of arguments, tables and
kernels alive, and records live as long as those of all other calls: settings drop both, under the
lock of the updater. ``test_warm_calls_run_no_python_and_do_the_same``.

*The GIL* is held up to the launches. They may wait for the device, and with it for functions of
other threads, so it is released for them, when nothing but the memory of the call is read.

Tests: ``tests/gpu/test_cuda_repeats.py``, ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from fastopt._kernels import record_words as w
from fastopt._kernels.admission import enter_count, items_of, record_of, tensor_of
from fastopt._kernels.compiling import bind_to, compiled
from fastopt._kernels.front import advance, is_asked
from fastopt._kernels.layout import DONE, KEY
from fastopt._kernels.objects import (
    Object,
    address,
    after,
    attribute,
    clear_error,
    compare,
    doubles,
    invoke,
    long_value,
    release,
    release_gil,
    restore_gil,
    singles,
    small_words,
    unsigned,
    words,
)
from fastopt.kernels.rule import scalar

TARGET = 5
"""Words of a target: the address of a tensor's hyper-parameters, their number, the address of its
row in the table, whether that has the key of random numbers, and bytes between hyper-parameters."""

NOT_READY = 600
"""Status of an event that the driver has not reached."""


@scalar
def enter_places(context, places, n, output):
    """Enter the records at `places` as the tensors of a call; return a status.

    At `output` there will be the addresses of their hyper-parameters, and whether the step does not
    average their weights.
    """
    context.call_number += 1
    context.repeats = context.uneven = context.done = 0
    if n > context.capacity:
        context.need = n
        return w.NO_CAPACITY
    loops = w.record_at(context.nothing).kernels
    for k in range(n):
        tensor, record = tensor_of(context, k), w.record_at(words(places)[k])
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
        hyper = w.hyper_at(tensor_of(context, k).hyper)
        if hyper.valid == 0 and not asks:
            return w.REFUSED
        words(output)[k], words(output)[n + k] = tensor_of(context, k).hyper, hyper.rests
    return w.ASKS if asks else w.OK


@scalar
def advance_all(context, targets, n):
    """Count the admitted tensors and write their hyper-parameters; return how many only count."""
    skipped = np.int64(0)
    for k in range(n):
        tensor, target = tensor_of(context, k), words(targets + 8 * TARGET * k)
        record, wide = w.record_at(tensor.record), w.hyper_at(tensor.hyper).wide
        advance(context, tensor)
        row, skips = unsigned(target[2]), np.int64(tensor.record == context.nothing)
        row[DONE], skipped = np.uint64(skips), skipped + skips
        if target[3]:
            row[KEY] = unsigned(record.row)[KEY]
        for f in range(target[1]):
            place = target[0] + target[4] * f
            if wide:
                doubles(place)[0] = doubles(record.fields)[f]
            else:
                singles(place)[0] = singles(record.fields)[f]
    return skipped


@scalar
def is_same(context, repeat, index, grad, weight):
    """Whether a call has the parameters and the living arrays of the call that is repeated.

    Gradients that are read in each call may be any.
    """
    n, objects, places = repeat.count, words(repeat.objects), words(repeat.places)
    if repeat.listed:
        lists = items_of(context, index), items_of(context, grad), items_of(context, weight)
        if lists[0] == 0 or lists[1] == 0 or lists[2] == 0:
            return False
        for argument in (index, grad, weight):
            if w.header_at(argument).length != n:
                return False
        index, grad, weight = lists
    if w.header_at(repeat.dead).length:
        return False
    for k in range(n):
        key, g, x = index, grad, weight
        if repeat.listed:
            key, g, x = words(index)[k], words(grad)[k], words(weight)[k]
        if x != objects[n + k] or (g != objects[k] and repeat.reader == 0):
            return False
        if record_of(context, key, places[k]) != places[k]:
            return False
    return True


@scalar
def is_even(context, repeat):
    """Whether the tensors of each table have the same hyper-parameters, and all are updated.

    The weights that are averaged must be those of the launches, too.
    """
    counts, rests = words(context.counts), words(repeat.output + 8 * repeat.count)
    for k in range(repeat.count):
        tensor = tensor_of(context, k)
        first = tensor_of(context, words(repeat.firsts)[k])
        hyper = w.hyper_at(tensor.hyper)
        if tensor.hyper != first.hyper or hyper.skips or hyper.carries:
            return False
        if rests[k] != words(repeat.rests)[k]:
            return False
        here, there = w.record_at(tensor.record).count, w.record_at(first.record).count
        if counts[here] != counts[there] and hyper.prepare:
            return False
    return context.each == 0 and context.repeats == 0


@scalar
def is_ready(repeat):
    """Whether the device is the current one, and no graph is captured."""
    state = words(repeat.state)
    state[0] = state[1] = 0
    driver = w.driver_at(repeat.driver)
    if invoke(driver.current, (repeat.state,)) or state[0] != repeat.context:
        return False
    return not (invoke(driver.capturing, (repeat.stream, repeat.state + 8)) or state[1])


@scalar
def borrowed(value, name):
    """Return an attribute that its owner keeps alive, or 0 with an error set."""
    result = attribute(value, name)
    if result:
        release(result)
    return result


@scalar
def is_like(value, wanted):
    """Whether an attribute, or 0, equals an object."""
    return value == wanted or (value != 0 and compare(value, wanted, np.int32(2)) == 1)


@scalar
def read(reader, form, array):
    """Return the address of the memory of a gradient, 0 if it is of another form."""
    if w.header_at(array).type != reader.kind:
        return 0
    names, wanted = after(reader, w.READ_SHAPE), after(form, w.FORM_SHAPE)
    for k in range(3):
        if not is_like(borrowed(array, names[k]), wanted[k]):
            return 0
    if borrowed(array, reader.stream) != form.stream:
        return 0
    memory = borrowed(array, reader.memory)
    if memory == 0 or w.header_at(memory).type != reader.memory_kind:
        return 0
    part = borrowed(memory, reader.part) if reader.device else 0
    if reader.device and (part == 0 or borrowed(part, reader.context) != reader.device):
        return 0
    pointer = borrowed(memory, reader.pointer)
    number = attribute(pointer, reader.value) if pointer else 0
    if number == 0:
        return 0
    first = long_value(number)
    release(number)
    return max(first, 0)


@scalar
def is_apart(reader, first, end):
    """Whether memory overlaps no range that is written to."""
    low, high = 0, reader.count
    while low < high:
        middle = (low + high) // 2
        if words(reader.last)[middle] <= first:
            low = middle + 1
        else:
            high = middle
    return low == reader.count or words(reader.first)[low] >= end


@scalar
def read_all(context, repeat, grad):
    """Enter the addresses of gradients into the tables; return whether all fit."""
    reader, items = w.reader_at(repeat.reader), grad
    if repeat.listed:
        items = items_of(context, grad)
    for k in range(repeat.count):
        form = w.form_at(reader.forms + 8 * w.FORM * k)
        first, slot = read(reader, form, words(items)[k] if repeat.listed else grad), form.slot
        if first == 0:
            clear_error()
            return False
        if first != words(slot)[0]:
            if first % form.unit or not is_apart(reader, first, first + form.size):
                return False
            words(slot)[0] = first
    return True


@scalar
def transfer(driver, ring, stream):
    """Upload what the next slot is to have, or download to it; return the error of the driver."""
    place = ring.last % ring.slot_count
    slot, event, error = ring.slots + place * ring.pitch, words(ring.events)[place], np.int32(0)
    if ring.source:
        error = invoke(driver.query, (event,))
        if error == NOT_READY:  # the device has not read what was uploaded many calls ago
            error = invoke(driver.wait, (event,))
        for k in range(ring.size // 4):
            small_words(slot)[k] = small_words(ring.source)[k]
        if error == 0:
            error = invoke(driver.upload, (ring.memory, slot, ring.size, stream))
    else:
        error = invoke(driver.download, (slot, ring.memory, ring.size, stream))
    if error == 0:
        ring.last += 1
        error = invoke(driver.record, (event, stream))
    return error


@scalar
def launch_all(repeat):
    """Upload, launch the kernels and report until something fails; return the driver's error."""
    one, error, thread = np.uint32(1), np.int32(0), release_gil()
    driver = w.driver_at(repeat.driver)
    for k in range(repeat.upload_count):
        if error == 0:
            error = transfer(driver, w.ring_at(words(repeat.uploads)[k]), repeat.stream)
    for k in range(repeat.launch_count):
        launch = w.launch_at(repeat.launches + 8 * w.LAUNCH * k)
        grid = np.uint32(launch.blocks), one, one
        block = np.uint32(launch.across), np.uint32(launch.down), one
        none = np.int64(0)
        if error == 0:
            last = np.uint32(0), repeat.stream, launch.arguments, none
            error = invoke(driver.launching, (launch.handle, *grid, *block, *last))
    if error == 0 and repeat.measured:
        error = transfer(driver, w.ring_at(repeat.reports), repeat.stream)
    restore_gil(thread)
    return error


@scalar
def find(context, place, index, grad, weight):
    """Admit a call whose arrays are known; return where it is, or a status.

    It is at `place`, or with other gradients at one of those that follow.
    """
    while place != 0 and not is_same(context, w.repeat_at(place), index, grad, weight):
        place = w.repeat_at(place).following
    if place == 0 or context.checks or context.clip:
        return np.int64(w.REFUSED)
    repeat = w.repeat_at(place)
    if repeat.measured != (context.measure != 0) or not is_ready(repeat):
        return np.int64(w.REFUSED)
    if repeat.reader and not read_all(context, repeat, grad):
        return np.int64(w.REFUSED)
    status = enter_places(context, repeat.places, repeat.count, repeat.output)
    return place if status == w.OK else np.int64(status)


@scalar
def is_sent(context, repeat):
    """Whether the device has the counts and the hyper-parameters, and all tensors are updated."""
    counts = words(context.counts)
    for k in range(repeat.count):
        tensor = tensor_of(context, k)
        count = counts[w.record_at(tensor.record).count]
        if tensor.hyper != words(repeat.hypers)[k] or count != words(repeat.counts)[k]:
            return False
        if w.hyper_at(tensor.hyper).skips:
            return False
    return True


def repeat_call(at, place, index, grad, weight):
    """Make a call again whose weights are known not to have moved; return a status.

    The call is refused, with nothing changed, if anything besides gradients, counts and
    hyper-parameters differs. The caller holds the updater's lock.
    """
    context = w.context_at(at)
    place = find(context, place, address(index), address(grad), address(weight))
    if place < 0:
        return place
    repeat, counts = w.repeat_at(place), words(context.counts)
    largest = counts[0]
    if repeat.measured:
        if not is_sent(context, repeat):
            return w.REFUSED
    elif not is_even(context, repeat) or not (repeat.folds or w.norm_at(context.norm).factor == 1):
        return w.REFUSED
    else:
        advance_all(context, repeat.targets, repeat.count)
    error = launch_all(repeat)
    if error:
        counts[0] = largest
        for k in range(repeat.count if not repeat.measured else 0):
            counts[w.record_at(words(repeat.places)[k]).count] -= 1
        words(repeat.state)[0] = error
        return w.FAILED
    context.done, context.asked, context.each, context.expected = 1, 0, 0, 0
    return w.OK


def report_call(driver, ring, stream):
    """See :func:`transfer`."""
    return transfer(w.driver_at(driver), w.ring_at(ring), stream)


def follow_call(driver, ring, waits):
    """Whether the oldest report has arrived, 1 or 0, or minus the error of the driver.

    With `waits` it waits for that, without the GIL.
    """
    functions, reports = w.driver_at(driver), w.ring_at(ring)
    event = words(reports.events)[reports.first % reports.slot_count]
    error = invoke(functions.query, (event,))
    if error == NOT_READY and waits:
        thread = release_gil()
        error = invoke(functions.wait, (event,))
        restore_gil(thread)
    if error == 0:
        reports.first += 1
        return 1
    return 0 if error == NOT_READY else -error


def admit_call(at, places, n, output):
    """See :func:`enter_places`."""
    return enter_places(w.context_at(at), places, n, output)


def advance_call(at, targets, n):
    """See :func:`advance_all`."""
    return advance_all(w.context_at(at), targets, n)


@cache
def functions() -> dict[str, Callable[..., int]]:
    """Return the compiled functions by their names."""
    numbers, arguments = [types.int64] * 4, [types.int64, types.int64, *[Object] * 3]
    signatures: dict[Callable[..., int], list[Any]] = {
        admit_call: numbers,
        advance_call: numbers[:3],
        repeat_call: arguments,
        report_call: numbers[:3],
        follow_call: numbers[:3],
    }
    return {
        kernel.__name__: bind_to(compiled(kernel, None, parallel=False, nogil=False), *signature)
        for kernel, signature in signatures.items()
    }
