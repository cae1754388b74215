"""Checks of the arguments of a call, in compiled code.

Nothing is written but the description of the call and caches of what was checked, so a call that
does not fit has changed nothing (``test_updater.py``, ``test_parameters.py``).

*Identity is no proof.* Address, type, dtype, shape and flags are read from the header in each call,
of weight, gradient and states alike: an id or an address may belong to a new object, and an array
may be resized or made read-only in place.
``test_memory_that_grows_or_shrinks_is_updated_as_it_is``,
``test_a_gradient_at_the_address_of_a_freed_one_is_checked_again``.

*Guesses.* ``clear_weight`` and ``clear_grad`` are addresses that were found to meet no other array
of the parameter. They are compared and never followed; as sizes are those of the record, and other
arrays stay where they are while it lasts, what was clear at an address is clear again, whoever owns
that memory now. The record of the last call at a position is a guess too: its ``index_id`` is that
of a key of the dictionary of records, which keeps the key alive.

*No Python runs.* A key is looked up only if it is exactly an int, a str or an ``np.int64``: their
hashes and comparisons are C code. True, 1.0 and subclasses go to Python.
``test_indices_of_other_types_are_those_of_python``.

Tests: ``tests/engine/test_records.py``, ``tests/engine/test_parameters.py``.
"""

from fastopt._kernels import record_words as w
from fastopt._kernels.layout import ADDRESS, PITCH
from fastopt._kernels.numpy_abi import ALIGNED, F_ORDER, FIRST, HEAD, WRITEABLE
from fastopt._kernels.objects import (
    after,
    call,
    dictionary_item,
    long_value,
    new_int,
    release,
    words,
)
from fastopt._kernels.record_words import guard_at, header_at, hyper_at, record_at, tensor_at
from fastopt._kernels.strided import grad_bytes, lengths_of, rounded, size_of
from fastopt.kernels.rule import scalar


@scalar
def has_shape(array, record, pairs):
    """Whether an array has the shape of a record, in which each complex number is a pair."""
    ndim, shape = record.ndims - pairs, words(array.shape)
    if array.ndim != ndim:
        return False
    same = True
    for axis in range(ndim):
        same = same and shape[axis] == lengths_of(record)[axis]
    return same


@scalar
def column_of(record, k):
    """Return the column in the table of array `k` besides the weight and the gradient."""
    column = ADDRESS + k
    return column + 1 if column >= record.weight_column else column


@scalar
def has_form(array, wanted):
    """Whether an array has the properties in a guard, see :func:`numpy_abi.guard`."""
    if array.type != wanted.type or header_at(array.dtype).kind != wanted.dtype:
        return False
    if array.flags & wanted.flags != wanted.flags or array.ndim != wanted.ndim:
        return False
    shape, lengths, same = words(array.shape), after(wanted, w.GUARD_SHAPE), True
    for axis in range(wanted.ndim):
        same = same and shape[axis] == lengths[axis]
    return same


@scalar
def guard_of(record, k):
    """Return the guard of array `k` besides the weight and the gradient."""
    return guard_at(record.guards + 8 * k * record.guard_width)


@scalar
def holds_arrays(record):
    """Whether all arrays besides the weight and the gradient are as they were."""
    row = words(record.row)
    for k in range(record.guarded):
        wanted = guard_of(record, k)
        array = header_at(wanted.id)
        if not has_form(array, wanted) or array.data != row[column_of(record, k)]:
            return False
    return True


@scalar
def meets(record, low, high):
    """Whether a range of addresses overlaps an array of the parameter besides its weight."""
    row = words(record.row)
    for k in range(record.guarded):
        first = row[column_of(record, k)]
        if low < first + guard_of(record, k).nbytes and high > first:
            return True
    return False


@scalar
def enter_strides(array, record, size, target, low, high):
    """Write strides to `target`, and the bounds of an array of numbers to `low` and `high`.

    The parts of complex numbers are `size` bytes apart. Returns whether elements share an address.
    """
    strides, shared = words(array.strides), False
    for axis in range(record.ndims):
        stride, length = strides[axis] if axis < array.ndim else size, lengths_of(record)[axis]
        target[axis] = stride
        shared = shared or (stride == 0 and length > 1)
        if stride < 0:
            low[0] += (length - 1) * stride
        else:
            high[0] += (length - 1) * stride
    return shared


@scalar
def admit_pitched(tensor, record, strides, pitch):
    """Check a weight whose rows have a common stride; its memory was checked in Python."""
    first, height, size = tensor.low, lengths_of(record)[0], size_of(record.weight_code)
    if first != record.clear_weight or strides[0] != pitch or strides[1] != size:
        return w.REFUSED
    tensor.copied, tensor.high = 0, first + (height - 1) * pitch
    tensor.high += lengths_of(record)[1] * size
    return w.OK


@scalar
def admit_weight(context, tensor, record, weight):
    """Check a weight, and enter where it lies."""
    array = header_at(weight)
    if array.type != context.ndarray:
        return w.REFUSED
    kind = header_at(array.dtype).kind
    pairs = kind != record.weight_dtype
    if pairs and kind != record.pair_dtype:
        return w.REFUSED
    flags, order = array.flags, record.order | ALIGNED
    if flags & WRITEABLE == 0 or not has_shape(array, record, pairs):
        return w.REFUSED
    first, pitch = array.data, words(record.row)[PITCH]
    tensor.weight = tensor.low = first
    tensor.high = first + record.bytes
    if pitch:
        return admit_pitched(tensor, record, words(array.strides), pitch)
    tensor.copied = 0 if flags & order == order else 1
    if tensor.copied:
        size = size_of(record.weight_code)
        tensor.high = first + size
        low, high = after(tensor, w.T_LOW), after(tensor, w.T_HIGH)
        if enter_strides(array, record, size, after(tensor, w.T_STRIDES), low, high):
            return w.REFUSED
    if tensor.copied or first != record.clear_weight:
        record.clear_weight = record.clear_grad = 0
        overlaps = meets(record, tensor.low, tensor.high)
        if overlaps and not (context.apart and tensor.copied):
            return w.REFUSED
        if not tensor.copied:
            record.clear_weight = first
    return w.OK


@scalar
def code_in(kinds, count, kind):
    """Return the code of a dtype, given the words of those with the first codes; 0 for others."""
    for code in range(1, count + 1):
        if kind == kinds[code - 1]:
            return code
    return 0


@scalar
def code_of_number(context, kind):
    """Return the code of the type of a number, 0 for other objects."""
    return w.FLOAT64 if kind == context.float else code_in(after(context, w.NUMBERS), 3, kind)


@scalar
def code_of_array(context, array):
    """Return the code of the dtype of an array, 0 if gradients cannot have it."""
    return code_in(after(context, w.DTYPES), 6, header_at(array.dtype).kind)


@scalar
def parts_of(code, record):
    """Return the code of the real numbers in an array, and whether two of them are one element.

    The code is 0 if a record does not read them.
    """
    if code <= w.BFLOAT16:
        return code, False
    return (code - w.BFLOAT16 if record.pair_dtype else 0), True


@scalar
def admit_grad(context, k, tensor, record, grad):
    """Check the gradient of tensor `k`, and enter where it lies."""
    array, wanted, strides = header_at(grad), record.grad_code, after(tensor, w.T_GRAD_STRIDES)
    is_array = array.type == context.ndarray
    code = code_of_array(context, array) if is_array else code_of_number(context, array.type)
    code, pairs = parts_of(code, record)
    by_row = record.row_kernels != 0 and record.kernels == 0
    if context.admit_rows and (by_row or (code == 0 and not is_array)):
        call(context.admit_rows, context.self, k, grad, 0, 0)
        return tensor.status
    if code == 0 or (code != wanted and size_of(wanted) == 2) or record.kernels == 0:
        return w.REFUSED
    tensor.listed, tensor.kernels = 0, record.kernels
    tensor.chunks = record.chunks
    copied, size = code != wanted or record.scaled != 0, size_of(code)
    if is_array:
        order = record.order | ALIGNED
        if not has_shape(array, record, pairs):
            return w.REFUSED
        first = array.data
        copied = copied or array.flags & order != order
    else:
        if record.size != 1:
            return w.REFUSED
        first = grad + HEAD
        for axis in range(record.ndims):
            strides[axis] = 0
    tensor.grad = tensor.grad_low = first
    tensor.grad_high = first + size
    tensor.grad_code, tensor.grad_copied = code, copied
    if record.size == 0:
        tensor.grad_high, tensor.grad_copied = first, 0
        return w.OK
    if not copied:
        tensor.grad_high = first + size * record.size
        if first == record.clear_grad:
            return w.OK
    elif is_array:
        bounds = after(tensor, w.T_GRAD_LOW), after(tensor, w.T_GRAD_HIGH)
        enter_strides(array, record, size, strides, bounds[0], bounds[1])
    low, high = tensor.grad_low, tensor.grad_high
    if (low < tensor.high and high > tensor.low) or meets(record, low, high):
        if not (context.apart and is_array):
            return w.REFUSED
        if not copied:
            tensor.grad_copied, tensor.grad_high = 1, first + size
            bounds = after(tensor, w.T_GRAD_LOW), after(tensor, w.T_GRAD_HIGH)
            enter_strides(array, record, size, strides, bounds[0], bounds[1])
        return w.OK
    if not (copied or tensor.copied):
        record.clear_grad = first
    return w.OK


@scalar
def record_of(context, index, guess):
    """Return the address of an index's record, or a status.

    `guess` is the record at this position of the last call: comparing costs less than looking up.
    """
    if guess != 0 and record_at(guess).index_id == index:
        return guess
    if context.written:
        return index
    kind = header_at(index).type
    if kind == context.int64:
        key = new_int(header_at(index).data)
        slot = dictionary_item(context.slots, key)
        release(key)
    elif kind == context.int or kind == context.str:
        slot = dictionary_item(context.slots, index)
    else:
        return w.REFUSED
    return long_value(slot) if slot else w.UNKNOWN


@scalar
def units_scratch_of(tensor, record):
    """Return the bytes of scratch memory in which the units of a gradient are clipped."""
    size = rounded(record.size * size_of(record.grad_code))
    if tensor.listed:  # the values, their sums, and the dense gradient of a vector
        rows = 2 * grad_bytes(tensor, record) + rounded(record.bytes)
        return rows + size if record.ndims == 1 else rows
    if record.order == F_ORDER:
        size += size + rounded(8 * (w.LENGTHS + record.ndims))
    return size + rounded(record.bytes)


@scalar
def scratch_of(context, tensor):
    """Return the bytes of scratch memory that a tensor needs."""
    record, size = record_at(tensor.record), 0
    if context.clip:
        size = units_scratch_of(tensor, record)
    elif tensor.grad_copied:
        size = grad_bytes(tensor, record)
    return size + rounded(record.bytes) if tensor.copied else size


@scalar
def enter_count(context, k, record):
    """Enter the number of the update and the count, or that those of the tensors differ."""
    counts, ahead = words(context.counts), hyper_at(record.hyper).ahead
    t = counts[record.count] + 1
    update, time = max(counts[0], t - 1 + ahead), t if context.timed else 0
    even = ahead and update == context.update_number and time == context.time
    if k > 0 and (not even or record.mark == context.call_number):
        context.uneven = 1
    context.update_number, context.time = update, time


@scalar
def admit(context, k, index, grad, weight):
    """Check one tensor of a call, and enter it as tensor `k`."""
    tensor = tensor_of(context, k)
    address = record_of(context, index, tensor.record)
    if address <= 0:
        tensor.record = 0
        return address
    record = record_at(address)
    if record.frozen:
        return w.LEFT_OUT
    tensor.record, tensor.grad_id, tensor.weight_id = address, grad, weight
    status = admit_weight(context, tensor, record, weight)
    if status == w.OK:
        status = admit_grad(context, k, tensor, record, grad)
    if status == w.OK and not holds_arrays(record):
        status = w.REFUSED
    if context.each == 0:
        tensor.hyper = record.hyper
    if status == w.OK and (context.scheduled or context.timed):
        enter_count(context, k, record)
    if record.mark == context.call_number:
        context.repeats = 1
    record.mark = context.call_number
    if status == w.OK and weight != record.weight_id:
        return w.MOVED
    return status


@scalar
def place_of(context, k):
    """Return the address of the words of tensor `k` of the call."""
    return context.tensors + 8 * w.TENSOR * k


@scalar
def copy(context, k, what, target):
    """Copy an array of tensor `k`, see :func:`fastopt._kernels.strided.copy_call`."""
    if context.copy:  # there is no scratch memory before, so arrays without elements alone
        call(context.copy, place_of(context, k), what, target, 0, 0)


@scalar
def tensor_of(context, k):
    """Return the words of tensor `k` of the call."""
    return tensor_at(place_of(context, k))


@scalar
def shares_of(context):
    """Return among how many threads a call is divided."""
    return context.threads if context.large and context.threads > 1 else 1


@scalar
def divide(context, phase, first, last, function):
    """Do all shares of a phase for the tensors from `first` to `last`, by calls of a function."""
    if shares_of(context) > 1:
        call(context.spread, context.self, phase, first, last, function)
    else:
        call(function, context.self, phase, first, last, 0)


@scalar
def items_of(context, sequence):
    """Return the address of the items of a list or tuple, else 0."""
    kind = header_at(sequence).type
    if kind == context.list:
        return header_at(sequence).items
    return sequence + FIRST if kind == context.tuple else 0


@scalar
def admit_list(context, index, grad, weight):
    """Check the lists of a call; return the number of its tensors to update, and a status."""
    indices, grads = items_of(context, index), items_of(context, grad)
    weights = items_of(context, weight)
    n = header_at(index).length
    if grads == 0 or weights == 0 or header_at(grad).length != n or header_at(weight).length != n:
        return 0, w.REFUSED
    if n > context.capacity:
        context.need = n
        return 0, w.NO_CAPACITY
    result, count = w.OK, 0
    for k in range(n):
        status = admit(context, count, words(indices)[k], words(grads)[k], words(weights)[k])
        if status < 0:
            return 0, status
        if status != w.LEFT_OUT:
            result, count = max(result, status), count + 1
    return count, w.REFUSED if count == 0 else result  # Python reports that nothing is updated
