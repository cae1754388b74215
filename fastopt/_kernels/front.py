"""One call, compiled once for all rules: from Python objects to updated weights.

:func:`enter` takes the three arguments of a call as they are. It finds the record of each index,
checks the headers of all arrays against it, counts the update, and calls the loops of the record's
layout by address. A negative status means that nothing has changed; Python then does what the
status asks for, or reports the error in words.

A *record* describes the form of one parameter (see the columns below) and never an object: any
weight and gradient of that form fit, at any address and in any memory order. Arrays in another
order or dtype are copied block by block to scratch memory, and weights back.

Tests: ``tests/kernels/test_front.py``, ``tests/engine/test_records.py``.
"""

from functools import cache

import numpy as np
from numba import prange, types

from fastopt._kernels import numpy_abi
from fastopt._kernels.chunks import LINE
from fastopt._kernels.compiling import address_of, bind_to, compiled
from fastopt._kernels.half import widen_bfloat16, widen_float16
from fastopt._kernels.layout import ADDRESS, KEY
from fastopt._kernels.noise import stream_key
from fastopt._kernels.numpy_abi import ALIGNED, FIRST, WRITEABLE
from fastopt._kernels.objects import (
    Object,
    address,
    after,
    call,
    dictionary_item,
    doubles,
    halves,
    keep_alive,
    long_value,
    new_int,
    prepare_step,
    release,
    release_gil,
    restore_gil,
    singles,
    unsigned,
    words,
)
from fastopt.kernels.rule import scalar

__all__ = ["enter", "run"]

AXES = 6
"""Maximum number of dimensions."""

# Words of the headers of arrays, dtypes, lists and numbers.
TYPE, DATA, NDIM, SHAPE = (
    offset // 8 for offset in (numpy_abi.TYPE, numpy_abi.DATA, numpy_abi.NDIM, numpy_abi.SHAPE)
)
STRIDES, DTYPE, FLAGS, KIND = SHAPE + 1, numpy_abi.DTYPE // 8, numpy_abi.FLAGS // 8, DATA + 1
LENGTH, ITEMS, LOW_HALF = numpy_abi.LENGTH // 8, numpy_abi.ITEMS // 8, 0xFFFFFFFF

# Words of a record. Addresses are those of arrays that the owner of the records keeps alive.
(KERNELS, COUNT, CARRIED, HYPER, FIELDS, SUMS, ROW, GUARDS, GUARDED, GUARD_WIDTH, WEIGHT_COLUMN,
 GRAD_COLUMN, WEIGHT_DTYPE, WEIGHT_CODE, GRAD_CODE, ORDER, NDIMS, SIZE, BYTES, ITEM_COUNT, CHUNKS,
 FLAT, FLAT_COUNT, KEYED, NUMBER, SEED, MARK, INDEX_ID, WEIGHT_ID, CLEAR_WEIGHT, CLEAR_GRAD,
 LENGTHS) = range(32)  # fmt: skip
RECORD = LENGTHS + AXES

# Words of the loops of a layout: addresses, and for each reduction two of them and its sums.
UPDATE, PASSES, PASS, PASS_WORDS = 0, 1, 2, 3

# Words of hyper-parameters, which tensors with equal multipliers share. VALUES is the address of
# the step that they are corrected for, the values before the correction, and those after it.
PREPARE, CARRIES, NAMES, OWN, RESCALE, WIDE, VALUES, VALID, HYPER_WORDS = range(9)

# Words of a tensor of a call.
(T_RECORD, T_WEIGHT, T_COPIED, T_LOW, T_HIGH, T_GRAD, T_GRAD_CODE, T_GRAD_COPIED, T_GRAD_LOW,
 T_GRAD_HIGH, T_SCRATCH, T_GRAD_ID, T_WEIGHT_ID, T_STRIDES) = range(14)  # fmt: skip
T_GRAD_STRIDES = T_STRIDES + AXES
TENSOR = T_GRAD_STRIDES + AXES

# Words of the context. DTYPES are those of float32, float64, float16 and bfloat16, NUMBERS the
# types of NumPy's scalars of the first three.
(SLOTS, TENSORS, CAPACITY, COUNTS, CARRIED_NUMBERS, FACTOR, SCRATCH, ROOM, NEED, SCHEDULED,
 UPDATE_NUMBER, ASKED, LARGE_FROM, RUN, THREADS, CALL_NUMBER, REPEATS, SPANS, NDARRAY, LIST, TUPLE,
 INT, INT64, STR, FLOAT) = range(25)  # fmt: skip
DTYPES = FLOAT + 1
NUMBERS = DTYPES + 4
CONTEXT = NUMBERS + 3

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(1, 5)
"""Codes of dtypes."""

OK, MOVED = 0, 1
REFUSED, UNKNOWN, NO_ROOM, NO_CAPACITY, IS_LARGE, ASKS, UNEVEN = range(-1, -8, -1)
"""Statuses of :func:`enter`.

MOVED: done, and some weight is another object than in the last call. Nothing has changed if the
status is negative: the arguments do not fit (REFUSED), an index has no record (UNKNOWN), scratch
memory of NEED bytes is missing (NO_ROOM) or rows for NEED tensors (NO_CAPACITY), the call should
run without the GIL (IS_LARGE), the learning rate of an update must be computed (ASKS), or tensors
have different update counts under a schedule (UNEVEN).
"""

ON_CALL = types.void(*[types.int64] * 5)


@scalar
def size_of(code):
    """Return the bytes of a number."""
    if code == FLOAT64:
        return 8
    return 4 if code == FLOAT32 else 2


# Checks


@scalar
def has_shape(array, record):
    """Whether an array has the shape of a record."""
    ndim, shape = record[NDIMS], words(array[SHAPE])
    if array[NDIM] & LOW_HALF != ndim:
        return False
    same = True
    for axis in range(ndim):
        same = same and shape[axis] == record[LENGTHS + axis]
    return same


@scalar
def column_of(record, k):
    """Return the column in the table of array `k` besides the weight and the gradient."""
    column = ADDRESS + k
    return column + 1 if column >= record[WEIGHT_COLUMN] else column


@scalar
def holds_arrays(record):
    """Whether all arrays besides the weight and the gradient are as they were."""
    row, guard, width = words(record[ROW]), words(record[GUARDS]), record[GUARD_WIDTH]
    for k in range(record[GUARDED]):
        at = k * width
        array = words(guard[at + numpy_abi.ID])
        if array[TYPE] != guard[at + numpy_abi.WANTED_TYPE]:
            return False
        if words(array[DTYPE])[KIND] != guard[at + numpy_abi.WANTED_DTYPE]:
            return False
        flags = guard[at + numpy_abi.WANTED_FLAGS]
        if array[FLAGS] & flags != flags or array[DATA] != row[column_of(record, k)]:
            return False
        ndim, shape = guard[at + numpy_abi.WANTED_NDIM], words(array[SHAPE])
        if array[NDIM] & LOW_HALF != ndim:
            return False
        for axis in range(ndim):
            if shape[axis] != guard[at + numpy_abi.WANTED_SHAPE + axis]:
                return False
    return True


@scalar
def meets(record, low, high):
    """Whether a range of addresses overlaps an array of the parameter besides its weight."""
    row, guard, width = words(record[ROW]), words(record[GUARDS]), record[GUARD_WIDTH]
    for k in range(record[GUARDED]):
        first = row[column_of(record, k)]
        if low < first + guard[k * width + numpy_abi.NBYTES] and high > first:
            return True
    return False


@scalar
def enter_strides(array, record, target, low, high):
    """Write strides to `target`, and the bounds of an array of numbers to `low` and `high`.

    Returns whether elements share an address.
    """
    strides, shared = words(array[STRIDES]), False
    for axis in range(record[NDIMS]):
        stride, length = strides[axis], record[LENGTHS + axis]
        target[axis] = stride
        shared = shared or (stride == 0 and length > 1)
        if stride < 0:
            low[0] += (length - 1) * stride
        else:
            high[0] += (length - 1) * stride
    return shared


@scalar
def admit_weight(x, tensor, record, weight):
    """Check a weight, and enter where it lies."""
    array = words(weight)
    if array[TYPE] != x[NDARRAY] or words(array[DTYPE])[KIND] != record[WEIGHT_DTYPE]:
        return REFUSED
    flags = array[FLAGS]
    if flags & (WRITEABLE | ALIGNED) != WRITEABLE | ALIGNED or not has_shape(array, record):
        return REFUSED
    first = array[DATA]
    tensor[T_WEIGHT] = tensor[T_LOW] = first
    tensor[T_HIGH] = first + record[BYTES]
    tensor[T_COPIED] = 0 if flags & record[ORDER] else 1
    if tensor[T_COPIED]:
        tensor[T_HIGH] = first + size_of(record[WEIGHT_CODE])
        low, high = after(tensor, T_LOW), after(tensor, T_HIGH)
        if enter_strides(array, record, after(tensor, T_STRIDES), low, high):
            return REFUSED
    if tensor[T_COPIED] or first != record[CLEAR_WEIGHT]:
        record[CLEAR_WEIGHT] = record[CLEAR_GRAD] = 0
        if meets(record, tensor[T_LOW], tensor[T_HIGH]):
            return REFUSED
        if not tensor[T_COPIED]:
            record[CLEAR_WEIGHT] = first
    return OK


@scalar
def code_of_number(x, kind):
    """Return the code of the type of a number, 0 for other objects."""
    if kind == x[FLOAT]:
        return FLOAT64
    for code in range(1, 4):
        if kind == x[NUMBERS + code - 1]:
            return code
    return 0


@scalar
def code_of_array(x, array):
    """Return the code of the dtype of an array, 0 if gradients cannot have it."""
    kind = words(array[DTYPE])[KIND]
    for code in range(1, 5):
        if kind == x[DTYPES + code - 1]:
            return code
    return 0


@scalar
def admit_grad(x, tensor, record, grad):
    """Check a gradient, and enter where it lies."""
    array, wanted, strides = words(grad), record[GRAD_CODE], after(tensor, T_GRAD_STRIDES)
    is_array = array[TYPE] == x[NDARRAY]
    code = code_of_array(x, array) if is_array else code_of_number(x, array[TYPE])
    if code == 0 or (code != wanted and size_of(wanted) == 2):
        return REFUSED
    copied, size = code != wanted, size_of(code)
    if is_array:
        if not has_shape(array, record) or array[FLAGS] & ALIGNED == 0:
            return REFUSED
        first = array[DATA]
        copied = copied or array[FLAGS] & record[ORDER] == 0
    else:
        if record[SIZE] != 1:
            return REFUSED
        first = grad + 8 * DATA
        for axis in range(record[NDIMS]):
            strides[axis] = 0
    tensor[T_GRAD] = tensor[T_GRAD_LOW] = first
    tensor[T_GRAD_HIGH] = first + size
    tensor[T_GRAD_CODE], tensor[T_GRAD_COPIED] = code, copied
    if record[SIZE] == 0:
        tensor[T_GRAD_HIGH] = first
        return OK
    if not copied:
        tensor[T_GRAD_HIGH] = first + size * record[SIZE]
        if first == record[CLEAR_GRAD]:
            return OK
    elif is_array:
        bounds = after(tensor, T_GRAD_LOW), after(tensor, T_GRAD_HIGH)
        enter_strides(array, record, strides, bounds[0], bounds[1])
    low, high = tensor[T_GRAD_LOW], tensor[T_GRAD_HIGH]
    if (low < tensor[T_HIGH] and high > tensor[T_LOW]) or meets(record, low, high):
        return REFUSED
    if not (copied or tensor[T_COPIED]):
        record[CLEAR_GRAD] = first
    return OK


@scalar
def record_of(x, index, guess):
    """Return the address of an index's record, or a status.

    `guess` is the record at this position of the last call: comparing costs less than looking up.
    """
    if guess != 0 and words(guess)[INDEX_ID] == index:
        return guess
    kind = words(index)[TYPE]
    if kind == x[INT64]:
        key = new_int(words(index)[DATA])
        found = dictionary_item(x[SLOTS], key)
        release(key)
    elif kind == x[INT] or kind == x[STR]:
        found = dictionary_item(x[SLOTS], index)
    else:
        return REFUSED
    return long_value(found) if found else UNKNOWN


@scalar
def rounded(size):
    """Return a size in bytes, rounded up to whole cache lines."""
    return (size + 63) & -64


@scalar
def scratch_of(tensor):
    """Return the bytes of scratch memory that a tensor needs."""
    record, size = words(tensor[T_RECORD]), 0
    if tensor[T_GRAD_COPIED]:
        size = rounded(record[SIZE] * size_of(record[GRAD_CODE]))
    return size + rounded(record[BYTES]) if tensor[T_COPIED] else size


@scalar
def admit(x, k, index, grad, weight):
    """Check one tensor of a call, and enter it as tensor `k`."""
    tensor = tensor_of(x, k)
    found = record_of(x, index, tensor[T_RECORD])
    if found <= 0:
        tensor[T_RECORD] = 0
        return found
    record = words(found)
    tensor[T_RECORD] = found
    status = admit_weight(x, tensor, record, weight)
    if status == OK:
        status = admit_grad(x, tensor, record, grad)
    if status == OK and not holds_arrays(record):
        status = REFUSED
    if status == OK and x[SCHEDULED]:
        counts = words(x[COUNTS])
        update = max(counts[0], counts[record[COUNT]] + 1)
        if k > 0 and (update != x[UPDATE_NUMBER] or record[MARK] == x[CALL_NUMBER]):
            return UNEVEN
        x[UPDATE_NUMBER] = update
    if record[MARK] == x[CALL_NUMBER]:
        x[REPEATS] = 1
    record[MARK] = x[CALL_NUMBER]
    if status == OK and weight != record[WEIGHT_ID]:
        return MOVED
    return status


@scalar
def tensor_of(x, k):
    """Return the words of tensor `k` of the call."""
    return words(x[TENSORS] + 8 * TENSOR * k)


@scalar
def items_of(x, sequence):
    """Return the address of the items of a list or tuple, else 0."""
    kind = words(sequence)[TYPE]
    if kind == x[LIST]:
        return words(sequence)[ITEMS]
    return sequence + FIRST if kind == x[TUPLE] else 0


@scalar
def admit_list(x, index, grad, weight):
    """Check the lists of a call."""
    own, grads, weights = items_of(x, index), items_of(x, grad), items_of(x, weight)
    n = words(index)[LENGTH]
    if grads == 0 or weights == 0 or words(grad)[LENGTH] != n or words(weight)[LENGTH] != n:
        return REFUSED
    if n > x[CAPACITY]:
        x[NEED] = n
        return NO_CAPACITY
    result = OK
    for k in range(n):
        status = admit(x, k, words(own)[k], words(grads)[k], words(weights)[k])
        if status < 0:
            return status
        result = max(result, status)
    return result


# Copies of arrays in another order or dtype


@scalar
def copy_run(code, wanted, source, stride, target, step, count):
    """Copy `count` numbers with strides in elements, converting their dtype."""
    if code == FLOAT32:
        if wanted == FLOAT32:
            for j in range(count):
                singles(target)[j * step] = singles(source)[j * stride]
        else:
            for j in range(count):
                doubles(target)[j * step] = np.float64(singles(source)[j * stride])
    elif code == FLOAT64:
        if wanted == FLOAT64:
            for j in range(count):
                doubles(target)[j * step] = doubles(source)[j * stride]
        else:
            for j in range(count):
                singles(target)[j * step] = np.float32(doubles(source)[j * stride])
    elif wanted == code:
        for j in range(count):
            halves(target)[j * step] = halves(source)[j * stride]
    else:
        for j in range(count):
            bits = halves(source)[j * stride]
            value = widen_float16(bits) if code == FLOAT16 else widen_bfloat16(bits)
            if wanted == FLOAT32:
                singles(target)[j * step] = value
            else:
                doubles(target)[j * step] = np.float64(value)


TILE = 64
"""Rows that are copied together, so that columns of one array and rows of the other are cached."""


@scalar
def copy_strided(record, strides, array, code, scratch, wanted, back):
    """Copy a strided array to contiguous scratch memory, or `back`.

    Elements in scratch memory have the order of the record's weight and the dtype `wanted`.
    """
    ndim, backward = record[NDIMS], record[ORDER] == numpy_abi.F_ORDER
    size, own = size_of(code), size_of(wanted)
    inner = 0 if backward else ndim - 1  # the fastest axis in scratch memory
    outward = 1 if backward else -1
    length = record[LENGTHS + inner] if ndim > 0 else 1
    stride = strides[inner] // size if ndim > 0 else 0
    height = record[LENGTHS + inner + outward] if ndim > 1 else 1
    pitch = strides[inner + outward] if ndim > 1 else 0
    across = height > 1 and abs(pitch) < abs(stride) * size
    for plane in range(record[SIZE] // max(length * height, 1)):
        place, rest = array, plane
        for step in range(2, ndim):
            axis = inner + outward * step
            place += rest % record[LENGTHS + axis] * strides[axis]
            rest //= record[LENGTHS + axis]
        for first in range(0, height, TILE):
            rows = min(TILE, height - first)
            target = scratch + (plane * height + first) * length * own
            source = place + first * pitch
            for j in range(length if across else rows):
                far, near = source + j * pitch, target + j * length * own
                count, step_far, step_near = length, stride, 1
                if across:
                    far, near = source + j * stride * size, target + j * own
                    count, step_far, step_near = rows, pitch // size, length
                if back:
                    copy_run(wanted, code, near, step_near, far, step_far, count)
                else:
                    copy_run(code, wanted, far, step_far, near, step_near, count)


# The update


@scalar
def advance(x, record):
    """Count an update of a tensor, and write the hyper-parameters of the step."""
    counts = words(x[COUNTS])
    t = counts[record[COUNT]] + 1
    counts[record[COUNT]] = t
    counts[0] = max(counts[0], t)
    hyper = words(record[HYPER])
    values, names, rescale = doubles(hyper[VALUES]), hyper[NAMES], hyper[RESCALE]
    source = 1
    if hyper[PREPARE]:
        source = 1 + names
        if values[0] != t or hyper[CARRIES]:
            for f in range(names):
                values[source + f] = values[1 + f]
            values[0] = t
            carried = x[CARRIED_NUMBERS] + 8 * record[CARRIED]
            prepare_step(hyper[PREPARE], np.float64(t), hyper[VALUES] + 8 * source, carried)
    for f in range(hyper[OWN]):
        value = values[source + f]
        if f == rescale:
            value = value * doubles(x[FACTOR])[0]
        if hyper[WIDE]:
            doubles(record[FIELDS])[f] = value
        else:
            singles(record[FIELDS])[f] = np.float32(value)
    if record[KEYED]:
        unsigned(record[ROW])[KEY] = stream_key(record[SEED], record[NUMBER], t)


@scalar
def begin(tensor):
    """Copy the arrays that are not in the record's order, and enter all addresses."""
    record = words(tensor[T_RECORD])
    row, grad, weight = words(record[ROW]), tensor[T_GRAD], tensor[T_WEIGHT]
    own = scratch = tensor[T_SCRATCH]
    if tensor[T_GRAD_COPIED]:
        strides, code = after(tensor, T_GRAD_STRIDES), tensor[T_GRAD_CODE]
        copy_strided(record, strides, grad, code, scratch, record[GRAD_CODE], False)
        grad, own = scratch, scratch + rounded(record[SIZE] * size_of(record[GRAD_CODE]))
    if tensor[T_COPIED]:
        strides, code = after(tensor, T_STRIDES), record[WEIGHT_CODE]
        copy_strided(record, strides, weight, code, own, code, False)
        weight = own
    row[record[WEIGHT_COLUMN]], row[record[GRAD_COLUMN]] = weight, grad


@scalar
def end(tensor):
    """Copy a weight back."""
    record = words(tensor[T_RECORD])
    if tensor[T_COPIED]:
        own, code = words(record[ROW])[record[WEIGHT_COLUMN]], record[WEIGHT_CODE]
        strides = after(tensor, T_STRIDES)
        copy_strided(record, strides, tensor[T_WEIGHT], code, own, code, True)


@scalar
def reduce(record, step, first, count):
    """Compute the sums of chunks of a reduction."""
    kernels, place = words(record[KERNELS]), PASS + PASS_WORDS * step
    each = kernels[place + 2]
    partial = record[SUMS] + 8 * each * first
    for k in range(each * count):
        doubles(partial)[k] = 0.0
    chunks = record[FLAT] + 24 * first
    call(kernels[place], chunks, count, record[ROW], record[FIELDS], partial)


@scalar
def finalize(record, step):
    """Compute the hyper-parameters that follow from the sums of a reduction."""
    finish = words(record[KERNELS])[PASS + PASS_WORDS * step + 1]
    call(finish, record[FLAT], record[FLAT_COUNT], record[ROW], record[FIELDS], record[SUMS])


@scalar
def update(x, k):
    """Count and update one tensor."""
    tensor = tensor_of(x, k)
    record = words(tensor[T_RECORD])
    advance(x, record)
    begin(tensor)
    kernels = words(record[KERNELS])
    for step in range(kernels[PASSES]):
        reduce(record, step, 0, record[FLAT_COUNT])
        finalize(record, step)
    call(kernels[UPDATE], record[CHUNKS], 1, record[ROW], record[FIELDS], 0)
    end(tensor)


def enter_call(context, index, grad, weight):
    """Update the tensors of a call; return a status."""
    x, index, grad, weight = words(context), address(index), address(grad), address(weight)
    n, own = 1, items_of(x, index)
    x[CALL_NUMBER] += 1
    x[REPEATS] = 0
    if own == 0:
        status = admit(x, 0, index, grad, weight)
    else:
        n, status = words(index)[LENGTH], admit_list(x, index, grad, weight)
    if status < 0:
        return status
    if x[SCHEDULED] and n > 0 and x[UPDATE_NUMBER] != x[ASKED]:
        return ASKS
    total, need, largest = 0, 0, 0
    for k in range(n):
        tensor = tensor_of(x, k)
        record = words(tensor[T_RECORD])
        if words(record[HYPER])[VALID] == 0:
            return REFUSED
        total += record[SIZE]
        if tensor[T_COPIED] or tensor[T_GRAD_COPIED]:
            size = scratch_of(tensor)
            tensor[T_SCRATCH] = x[SCRATCH] + need
            need, largest = need + size, max(largest, size)
    large = total >= x[LARGE_FROM]
    x[NEED] = need if large else largest
    if x[NEED] > x[ROOM]:
        return NO_ROOM
    if large and x[THREADS] == 0:
        return IS_LARGE
    if not large:
        for k in range(n):
            tensor_of(x, k)[T_SCRATCH] = x[SCRATCH]
            update(x, k)
        return status
    grads, weights = items_of(x, grad), items_of(x, weight)
    for k in range(n):
        tensor = tensor_of(x, k)
        tensor[T_GRAD_ID] = grad if own == 0 else words(grads)[k]
        tensor[T_WEIGHT_ID] = weight if own == 0 else words(weights)[k]
        keep_alive(tensor[T_GRAD_ID])
        keep_alive(tensor[T_WEIGHT_ID])
    thread = release_gil()
    if x[RUN]:
        call(x[RUN], context, n, x[THREADS], 0, 0)
    else:
        for k in range(n):
            update(x, k)
    restore_gil(thread)
    for k in range(n):
        release(tensor_of(x, k)[T_GRAD_ID])
        release(tensor_of(x, k)[T_WEIGHT_ID])
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
    spans, count = words(x[SPANS]), 0
    for k in range(n):
        tensor = tensor_of(x, k)
        record = words(tensor[T_RECORD])
        row, guard, width = words(record[ROW]), words(record[GUARDS]), record[GUARD_WIDTH]
        if record[SIZE] > 0:
            spans[2 * count], spans[2 * count + 1] = tensor[T_LOW], tensor[T_HIGH]
            count += 1
        for g in range(record[GUARDED]):
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
            if spans[2 * middle + 1] <= tensor[T_GRAD_LOW]:
                low = middle + 1
            else:
                high = middle
        if low < count and spans[2 * low] < tensor[T_GRAD_HIGH]:
            return False
    return True


@scalar
def cut(place, record):
    """Return the number of items before an element, in whole cache lines."""
    size, items = record[SIZE], record[ITEM_COUNT]
    if place <= 0 or place >= size:
        return 0 if place <= 0 else items
    line = LINE if items == size else 1
    return place * items // size // line * line


COPY, FINISH_COPY, UPDATES, REDUCTIONS = range(4)
"""Phases of a large call; reductions are numbered from REDUCTIONS on."""


@scalar
def share_of(x, phase, first, last, share, shares):
    """Do one share of a phase for the tensors from `first` to `last`."""
    if phase in (COPY, FINISH_COPY):
        for k in range(first + share, last, shares):
            if phase == COPY:
                begin(tensor_of(x, k))
            else:
                end(tensor_of(x, k))
        return
    total, before = 0, 0
    for k in range(first, last):
        record = words(tensor_of(x, k)[T_RECORD])
        total += record[SIZE] if phase == UPDATES else record[FLAT_COUNT]
    low, high = total * share // shares, total * (share + 1) // shares
    chunk = np.empty(3, np.int64)
    chunk[0] = 0
    for k in range(first, last):
        record = words(tensor_of(x, k)[T_RECORD])
        kernels = words(record[KERNELS])
        if phase == UPDATES:
            chunk[1] = cut(low - before, record)
            chunk[2] = cut(high - before, record) - chunk[1]
            if chunk[2] > 0:
                place = np.int64(chunk.ctypes.data)
                call(kernels[UPDATE], place, 1, record[ROW], record[FIELDS], 0)
            before += record[SIZE]
        else:
            count, step = record[FLAT_COUNT], phase - REDUCTIONS
            start, stop = max(low - before, 0), min(high - before, count)
            if start < stop and step < kernels[PASSES]:
                reduce(record, step, start, stop - start)
            before += count


def run_call(context, n, threads, _, __):
    """Update the admitted tensors of a large call on several threads."""
    x = words(context)
    group = 1 if x[REPEATS] or (n > 1 and not are_apart(x, n)) else n
    for first in range(0, n, max(group, 1)):
        last, passes, copies = first + group, 0, False
        for k in range(first, last):
            tensor = tensor_of(x, k)
            record = words(tensor[T_RECORD])
            advance(x, record)
            passes = max(passes, words(record[KERNELS])[PASSES])
            copies = copies or tensor[T_COPIED] != 0 or tensor[T_GRAD_COPIED] != 0
            if not (tensor[T_COPIED] or tensor[T_GRAD_COPIED]):
                begin(tensor)
        for number in range(passes + 3):
            # In order: copies, reductions, updates, copies back.
            phase = COPY if number == 0 else REDUCTIONS + number - 1
            if number > passes:
                phase = UPDATES if number == passes + 1 else FINISH_COPY
            if phase >= UPDATES or copies:
                for share in prange(threads):
                    share_of(x, phase, first, last, share, threads)
            if phase >= REDUCTIONS:
                for k in range(first, last):
                    record = words(tensor_of(x, k)[T_RECORD])
                    if phase - REDUCTIONS < words(record[KERNELS])[PASSES]:
                        finalize(record, phase - REDUCTIONS)


@cache
def enter():
    """Return the compiled ``(context, index, grad, weight)``, see :func:`enter_call`."""
    kernel = compiled(enter_call, None, parallel=False, nogil=False)
    return bind_to(kernel, types.int64, Object, Object, Object)


@cache
def run():
    """Return the address of :func:`run_call`."""
    return address_of(run_call, ON_CALL, None, parallel=True)
