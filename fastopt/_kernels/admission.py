"""Checks of the arguments of a call, in compiled code.

Nothing is written but the description of the call and caches of what was checked.

Tests: ``tests/engine/test_records.py``.
"""

from fastopt._kernels import numpy_abi
from fastopt._kernels import record_words as w
from fastopt._kernels.layout import ADDRESS, PITCH
from fastopt._kernels.numpy_abi import ALIGNED, F_ORDER, FIRST, WRITEABLE
from fastopt._kernels.objects import (
    after,
    call,
    dictionary_item,
    long_value,
    new_int,
    release,
    words,
)
from fastopt._kernels.strided import grad_bytes, rounded, size_of
from fastopt.kernels.rule import scalar


@scalar
def has_shape(array, record):
    """Whether an array has the shape of a record."""
    ndim, shape = record[w.NDIMS], words(array[w.SHAPE])
    if array[w.NDIM] & w.LOW_HALF != ndim:
        return False
    same = True
    for axis in range(ndim):
        same = same and shape[axis] == record[w.LENGTHS + axis]
    return same


@scalar
def column_of(record, k):
    """Return the column in the table of array `k` besides the weight and the gradient."""
    column = ADDRESS + k
    return column + 1 if column >= record[w.WEIGHT_COLUMN] else column


@scalar
def has_form(array, wanted):
    """Whether an array has the properties in a guard, see :func:`numpy_abi.guard`."""
    if array[w.TYPE] != wanted[numpy_abi.WANTED_TYPE]:
        return False
    if words(array[w.DTYPE])[w.KIND] != wanted[numpy_abi.WANTED_DTYPE]:
        return False
    flags = wanted[numpy_abi.WANTED_FLAGS]
    ndim, shape = wanted[numpy_abi.WANTED_NDIM], words(array[w.SHAPE])
    if array[w.FLAGS] & flags != flags or array[w.NDIM] & w.LOW_HALF != ndim:
        return False
    same = True
    for axis in range(ndim):
        same = same and shape[axis] == wanted[numpy_abi.WANTED_SHAPE + axis]
    return same


@scalar
def holds_arrays(record):
    """Whether all arrays besides the weight and the gradient are as they were."""
    row, guard, width = words(record[w.ROW]), words(record[w.GUARDS]), record[w.GUARD_WIDTH]
    for k in range(record[w.GUARDED]):
        wanted = after(guard, k * width)
        array = words(wanted[numpy_abi.ID])
        if not has_form(array, wanted) or array[w.DATA] != row[column_of(record, k)]:
            return False
    return True


@scalar
def meets(record, low, high):
    """Whether a range of addresses overlaps an array of the parameter besides its weight."""
    row, guard, width = words(record[w.ROW]), words(record[w.GUARDS]), record[w.GUARD_WIDTH]
    for k in range(record[w.GUARDED]):
        first = row[column_of(record, k)]
        if low < first + guard[k * width + numpy_abi.NBYTES] and high > first:
            return True
    return False


@scalar
def enter_strides(array, record, target, low, high):
    """Write strides to `target`, and the bounds of an array of numbers to `low` and `high`.

    Returns whether elements share an address.
    """
    strides, shared = words(array[w.STRIDES]), False
    for axis in range(record[w.NDIMS]):
        stride, length = strides[axis], record[w.LENGTHS + axis]
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
    first, height, size = tensor[w.T_LOW], record[w.LENGTHS], size_of(record[w.WEIGHT_CODE])
    if first != record[w.CLEAR_WEIGHT] or strides[0] != pitch or strides[1] != size:
        return w.REFUSED
    tensor[w.T_COPIED], tensor[w.T_HIGH] = 0, first + (height - 1) * pitch
    tensor[w.T_HIGH] += record[w.LENGTHS + 1] * size
    return w.OK


@scalar
def admit_weight(x, tensor, record, weight):
    """Check a weight, and enter where it lies."""
    array = words(weight)
    if array[w.TYPE] != x[w.NDARRAY] or words(array[w.DTYPE])[w.KIND] != record[w.WEIGHT_DTYPE]:
        return w.REFUSED
    flags, order = array[w.FLAGS], record[w.ORDER] | ALIGNED
    if flags & WRITEABLE == 0 or not has_shape(array, record):
        return w.REFUSED
    first, pitch = array[w.DATA], words(record[w.ROW])[PITCH]
    tensor[w.T_WEIGHT] = tensor[w.T_LOW] = first
    tensor[w.T_HIGH] = first + record[w.BYTES]
    if pitch:
        return admit_pitched(tensor, record, words(array[w.STRIDES]), pitch)
    tensor[w.T_COPIED] = 0 if flags & order == order else 1
    if tensor[w.T_COPIED]:
        tensor[w.T_HIGH] = first + size_of(record[w.WEIGHT_CODE])
        low, high = after(tensor, w.T_LOW), after(tensor, w.T_HIGH)
        if enter_strides(array, record, after(tensor, w.T_STRIDES), low, high):
            return w.REFUSED
    if tensor[w.T_COPIED] or first != record[w.CLEAR_WEIGHT]:
        record[w.CLEAR_WEIGHT] = record[w.CLEAR_GRAD] = 0
        overlaps = meets(record, tensor[w.T_LOW], tensor[w.T_HIGH])
        if overlaps and not (x[w.APART] and tensor[w.T_COPIED]):
            return w.REFUSED
        if not tensor[w.T_COPIED]:
            record[w.CLEAR_WEIGHT] = first
    return w.OK


@scalar
def code_of_number(x, kind):
    """Return the code of the type of a number, 0 for other objects."""
    if kind == x[w.FLOAT]:
        return w.FLOAT64
    for code in range(1, 4):
        if kind == x[w.NUMBERS + code - 1]:
            return code
    return 0


@scalar
def code_of_array(x, array):
    """Return the code of the dtype of an array, 0 if gradients cannot have it."""
    kind = words(array[w.DTYPE])[w.KIND]
    for code in range(1, 5):
        if kind == x[w.DTYPES + code - 1]:
            return code
    return 0


@scalar
def admit_grad(x, k, tensor, record, grad):
    """Check the gradient of tensor `k`, and enter where it lies."""
    array, wanted, strides = words(grad), record[w.GRAD_CODE], after(tensor, w.T_GRAD_STRIDES)
    is_array = array[w.TYPE] == x[w.NDARRAY]
    code = code_of_array(x, array) if is_array else code_of_number(x, array[w.TYPE])
    by_row = record[w.ROW_KERNELS] != 0 and record[w.KERNELS] == 0
    if x[w.ADMIT_ROWS] and (by_row or (code == 0 and not is_array)):
        call(x[w.ADMIT_ROWS], x[w.SELF], k, grad, 0, 0)
        return tensor[w.T_STATUS]
    if code == 0 or (code != wanted and size_of(wanted) == 2) or record[w.KERNELS] == 0:
        return w.REFUSED
    tensor[w.T_LISTED], tensor[w.T_KERNELS] = 0, record[w.KERNELS]
    tensor[w.T_CHUNKS] = record[w.CHUNKS]
    copied, size = code != wanted or record[w.SCALED] != 0, size_of(code)
    if is_array:
        order = record[w.ORDER] | ALIGNED
        if not has_shape(array, record):
            return w.REFUSED
        first = array[w.DATA]
        copied = copied or array[w.FLAGS] & order != order
    else:
        if record[w.SIZE] != 1:
            return w.REFUSED
        first = grad + 8 * w.DATA
        for axis in range(record[w.NDIMS]):
            strides[axis] = 0
    tensor[w.T_GRAD] = tensor[w.T_GRAD_LOW] = first
    tensor[w.T_GRAD_HIGH] = first + size
    tensor[w.T_GRAD_CODE], tensor[w.T_GRAD_COPIED] = code, copied
    if record[w.SIZE] == 0:
        tensor[w.T_GRAD_HIGH], tensor[w.T_GRAD_COPIED] = first, 0
        return w.OK
    if not copied:
        tensor[w.T_GRAD_HIGH] = first + size * record[w.SIZE]
        if first == record[w.CLEAR_GRAD]:
            return w.OK
    elif is_array:
        bounds = after(tensor, w.T_GRAD_LOW), after(tensor, w.T_GRAD_HIGH)
        enter_strides(array, record, strides, bounds[0], bounds[1])
    low, high = tensor[w.T_GRAD_LOW], tensor[w.T_GRAD_HIGH]
    if (low < tensor[w.T_HIGH] and high > tensor[w.T_LOW]) or meets(record, low, high):
        if not (x[w.APART] and is_array):
            return w.REFUSED
        if not copied:
            tensor[w.T_GRAD_COPIED], tensor[w.T_GRAD_HIGH] = 1, first + size
            bounds = after(tensor, w.T_GRAD_LOW), after(tensor, w.T_GRAD_HIGH)
            enter_strides(array, record, strides, bounds[0], bounds[1])
        return w.OK
    if not (copied or tensor[w.T_COPIED]):
        record[w.CLEAR_GRAD] = first
    return w.OK


@scalar
def record_of(x, index, guess):
    """Return the address of an index's record, or a status.

    `guess` is the record at this position of the last call: comparing costs less than looking up.
    """
    if guess != 0 and words(guess)[w.INDEX_ID] == index:
        return guess
    if x[w.WRITTEN]:
        return index
    kind = words(index)[w.TYPE]
    if kind == x[w.INT64]:
        key = new_int(words(index)[w.DATA])
        found = dictionary_item(x[w.SLOTS], key)
        release(key)
    elif kind == x[w.INT] or kind == x[w.STR]:
        found = dictionary_item(x[w.SLOTS], index)
    else:
        return w.REFUSED
    return long_value(found) if found else w.UNKNOWN


@scalar
def units_scratch_of(tensor, record):
    """Return the bytes of scratch memory in which the units of a gradient are clipped."""
    if tensor[w.T_LISTED]:  # the values, their sums, and the dense gradient of a vector
        whole = rounded(record[w.SIZE] * size_of(record[w.GRAD_CODE]))
        return (
            2 * grad_bytes(tensor, record)
            + rounded(record[w.BYTES])
            + (whole if record[w.NDIMS] == 1 else 0)
        )
    size = rounded(record[w.SIZE] * size_of(record[w.GRAD_CODE]))
    if record[w.ORDER] == F_ORDER:
        size += size + rounded(8 * (w.LENGTHS + record[w.NDIMS]))
    return size + rounded(record[w.BYTES])


@scalar
def scratch_of(x, tensor):
    """Return the bytes of scratch memory that a tensor needs."""
    record, size = words(tensor[w.T_RECORD]), 0
    if x[w.CLIP]:
        size = units_scratch_of(tensor, record)
    elif tensor[w.T_GRAD_COPIED]:
        size = grad_bytes(tensor, record)
    return size + rounded(record[w.BYTES]) if tensor[w.T_COPIED] else size


@scalar
def enter_count(x, k, record):
    """Enter the number of the update and the count, or that those of the tensors differ."""
    counts, ahead = words(x[w.COUNTS]), words(record[w.HYPER])[w.AHEAD]
    t = counts[record[w.COUNT]] + 1
    update, time = max(counts[0], t - 1 + ahead), t if x[w.TIMED] else 0
    even = ahead and update == x[w.UPDATE_NUMBER] and time == x[w.TIME]
    if k > 0 and (not even or record[w.MARK] == x[w.CALL_NUMBER]):
        x[w.UNEVEN] = 1
    x[w.UPDATE_NUMBER], x[w.TIME] = update, time


@scalar
def admit(x, k, index, grad, weight):
    """Check one tensor of a call, and enter it as tensor `k`."""
    tensor = tensor_of(x, k)
    found = record_of(x, index, tensor[w.T_RECORD])
    if found <= 0:
        tensor[w.T_RECORD] = 0
        return found
    record = words(found)
    if record[w.FROZEN]:
        return w.LEFT_OUT
    tensor[w.T_RECORD], tensor[w.T_GRAD_ID], tensor[w.T_WEIGHT_ID] = found, grad, weight
    status = admit_weight(x, tensor, record, weight)
    if status == w.OK:
        status = admit_grad(x, k, tensor, record, grad)
    if status == w.OK and not holds_arrays(record):
        status = w.REFUSED
    if x[w.EACH] == 0:
        tensor[w.T_HYPER] = record[w.HYPER]
    if status == w.OK and (x[w.SCHEDULED] or x[w.TIMED]):
        enter_count(x, k, record)
    if record[w.MARK] == x[w.CALL_NUMBER]:
        x[w.REPEATS] = 1
    record[w.MARK] = x[w.CALL_NUMBER]
    if status == w.OK and weight != record[w.WEIGHT_ID]:
        return w.MOVED
    return status


@scalar
def place_of(x, k):
    """Return the address of the words of tensor `k` of the call."""
    return x[w.TENSORS] + 8 * w.TENSOR * k


@scalar
def copy(x, k, what, target):
    """Copy an array of tensor `k`, see :func:`fastopt._kernels.strided.copy_call`."""
    if x[w.COPY]:  # there is no scratch memory before, so arrays without elements alone
        call(x[w.COPY], place_of(x, k), what, target, 0, 0)


@scalar
def tensor_of(x, k):
    """Return the words of tensor `k` of the call."""
    return words(place_of(x, k))


@scalar
def items_of(x, sequence):
    """Return the address of the items of a list or tuple, else 0."""
    kind = words(sequence)[w.TYPE]
    if kind == x[w.LIST]:
        return words(sequence)[w.ITEMS]
    return sequence + FIRST if kind == x[w.TUPLE] else 0


@scalar
def admit_list(x, index, grad, weight):
    """Check the lists of a call; return the number of its tensors to update, and a status."""
    own, grads, weights = items_of(x, index), items_of(x, grad), items_of(x, weight)
    n = words(index)[w.LENGTH]
    if grads == 0 or weights == 0 or words(grad)[w.LENGTH] != n or words(weight)[w.LENGTH] != n:
        return 0, w.REFUSED
    if n > x[w.CAPACITY]:
        x[w.NEED] = n
        return 0, w.NO_CAPACITY
    result, count = w.OK, 0
    for k in range(n):
        status = admit(x, count, words(own)[k], words(grads)[k], words(weights)[k])
        if status < 0:
            return 0, status
        if status != w.LEFT_OUT:
            result, count = max(result, status), count + 1
    return count, w.REFUSED if count == 0 else result  # Python reports that nothing is updated
