"""Row-sparse gradients in compiled calls: checks, copies of their indices, and their order.

:mod:`fastopt._kernels.front` calls :func:`admit_rows` for a gradient that is no array, then
:func:`list_rows` while it holds the GIL, and :func:`order_rows`. They are compiled with the first
row-sparse gradient, apart from the front. Kernels read the copy of the indices, as another thread
may change the array once the GIL is released.

Tests: ``tests/engine/test_records_rows.py``.
"""

from functools import cache

from numba import carray

from fastopt._kernels import record_words as w
from fastopt._kernels import segments
from fastopt._kernels.admission import code_of_array, items_of, meets, tensor_of
from fastopt._kernels.chunks import CHUNK, ROW_COST
from fastopt._kernels.compiling import address_of
from fastopt._kernels.cpu_addresses import ON_CHUNKS
from fastopt._kernels.layout import ORDER, ROWS, SEGMENTS, STARTS, WIDTH
from fastopt._kernels.numpy_abi import ALIGNED, C_ORDER
from fastopt._kernels.objects import (
    attribute,
    bytes_,
    clear_error,
    half_words,
    halves,
    long_value,
    release,
    signed_bytes,
    small_words,
    unsigned_words,
    words,
)
from fastopt._kernels.strided import proportion, rounded, size_of
from fastopt.kernels.rule import scalar

# What the front needs of a tensor with a row-sparse gradient


@scalar
def work_of(tensor, record):
    """Return the cost of the update of a tensor, in elements of a dense one.

    A weight that is not in C order is copied as a whole.
    """
    by_row = tensor[w.T_LISTED] and words(tensor[w.T_KERNELS])[w.BY_ROW]
    if by_row and not tensor[w.T_COPIED]:
        return tensor[w.T_LENGTH] * words(record[w.ROW])[WIDTH] * ROW_COST
    return record[w.SIZE]


@scalar
def step_of(record):
    """Return the number of indices in a chunk."""
    return max(CHUNK // max(words(record[w.ROW])[WIDTH], 1), 1)


@scalar
def row_room(tensor, record):
    """Return the bytes for the rows of a gradient: indices, their order, chunks and their sums."""
    return rounded(8 * (own_room(tensor) + 4 * (tensor[w.T_LENGTH] // step_of(record) + 1)))


@scalar
def own_room(tensor):
    """Return the words for indices and their order; all rows need none."""
    count = tensor[w.T_LENGTH]
    return count + segments.PLACES * (count + 1) if tensor[w.T_INDICES] else 0


@scalar
def enter_rows(tensor, row):
    """Enter the rows of a gradient for the kernels."""
    row[ROWS], row[STARTS], row[ORDER] = tensor[w.T_ROWS], tensor[w.T_STARTS], tensor[w.T_ORDER]
    row[SEGMENTS] = tensor[w.T_SEGMENTS]


@scalar
def rows_before(place, tensor, work):
    """Return how many unique rows are before `place` of `work`; rows and indices cost the same."""
    rows, starts = tensor[w.T_SEGMENTS], words(tensor[w.T_STARTS])
    if place <= 0 or place >= work:
        return 0 if place <= 0 else rows
    target = proportion(place, work, rows + tensor[w.T_LENGTH])
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if middle + starts[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low


# Checks


@scalar
def has_shape(x, value, record):
    """Whether an object is a tuple with the shape of a record."""
    shape = words(value)
    if shape[w.TYPE] != x[w.TUPLE] or shape[w.LENGTH] != record[w.NDIMS]:
        return False
    items = words(items_of(x, value))
    for axis in range(record[w.NDIMS]):
        if words(items[axis])[w.TYPE] != x[w.INT]:
            return False
        if long_value(items[axis]) != record[w.LENGTHS + axis]:
            return False
    return True


@scalar
def part(grad, name):
    """Return the address of an attribute of a RowSparse, which keeps it alive; 0 without it."""
    found = attribute(grad, name)
    if found == 0:
        clear_error()
    else:
        release(found)
    return found


@scalar
def parts(x, record, grad):
    """Return the addresses of the values and indices of a gradient, zeros for another object."""
    if words(grad)[w.TYPE] == x[w.ROW_SPARSE]:
        shape = part(grad, x[w.SHAPE_NAME])
        if shape == 0 or not has_shape(x, shape, record):
            return 0, 0
        return part(grad, x[w.VALUES_NAME]), part(grad, x[w.INDICES_NAME])
    items = items_of(x, grad)
    if items == 0 or words(grad)[w.LENGTH] != 2:
        return 0, 0
    return words(items)[0], words(items)[1]


@scalar
def integer_size(x, array):
    """Return the size of an integer dtype in bytes, negative if it is signed; 0 for others."""
    kind = words(words(array)[w.DTYPE])[w.KIND]
    for k in range(w.INTEGER_KINDS):
        if x[w.INTEGERS + 2 * k] == kind:
            return x[w.INTEGERS + 2 * k + 1]
    return 0


@scalar
def admit_indices(x, tensor, indices):
    """Return the number of dimensions of row indices, and enter their number; -1 if refused."""
    array, count = words(indices), 1
    if array[w.TYPE] == x[w.LIST]:
        tensor[w.T_LENGTH] = array[w.LENGTH]
        return 1
    if array[w.TYPE] == x[w.INT] or array[w.TYPE] == x[w.INT64]:
        tensor[w.T_LENGTH] = 1
        return 0
    if array[w.TYPE] != x[w.NDARRAY] or array[w.FLAGS] & ALIGNED == 0:
        return -1
    ndim = array[w.NDIM] & w.LOW_HALF
    if integer_size(x, indices) == 0:
        return -1
    for axis in range(ndim):
        count *= words(array[w.SHAPE])[axis]
    tensor[w.T_LENGTH] = count
    return ndim


@scalar
def admit_values(x, tensor, record, values, indices, before):
    """Check the shape of values for indices with `before` axes, and enter where they lie."""
    array, wanted = words(values), record[w.GRAD_CODE]
    code = code_of_array(x, array)
    if code == 0 or (code != wanted and size_of(wanted) == 2):
        return w.REFUSED
    axes = before + record[w.NDIMS] - 1
    if array[w.NDIM] & w.LOW_HALF != axes:
        return w.REFUSED
    shape, strides, low, high = words(array[w.SHAPE]), words(array[w.STRIDES]), 0, size_of(code)
    for axis in range(axes):
        length = record[w.LENGTHS + 1 + axis - before]
        if axis < before:
            is_array = indices != 0 and words(indices)[w.TYPE] == x[w.NDARRAY]
            length = words(words(indices)[w.SHAPE])[axis] if is_array else tensor[w.T_LENGTH]
        if shape[axis] != length:
            return w.REFUSED
        stride = strides[axis]
        tensor[w.T_GRAD_LENGTHS + axis], tensor[w.T_GRAD_STRIDES + axis] = length, stride
        low, high = low + min((length - 1) * stride, 0), high + max((length - 1) * stride, 0)
    first = tensor[w.T_GRAD] = array[w.DATA]
    empty = tensor[w.T_LENGTH] == 0 or record[w.SIZE] == 0
    tensor[w.T_GRAD_LOW], tensor[w.T_GRAD_HIGH] = first + low, first + high
    if empty:
        tensor[w.T_GRAD_LOW] = tensor[w.T_GRAD_HIGH] = first
    tensor[w.T_GRAD_AXES], tensor[w.T_GRAD_CODE] = axes, code
    order = C_ORDER | ALIGNED
    copied = code != wanted or array[w.FLAGS] & order != order or record[w.SCALED] != 0
    tensor[w.T_GRAD_COPIED] = copied and not empty
    low, high = tensor[w.T_GRAD_LOW], tensor[w.T_GRAD_HIGH]
    if (low < tensor[w.T_HIGH] and high > tensor[w.T_LOW]) or meets(record, low, high):
        if not (empty or x[w.APART]):
            return w.REFUSED
        tensor[w.T_GRAD_COPIED] = not empty
    return w.OK


@scalar
def check_rows(x, tensor, record, grad):
    """Check a row-sparse gradient, and enter its arrays."""
    kernels, ordered = record[w.ROW_KERNELS], record[w.ORDER] == C_ORDER
    if kernels == 0 or not ordered:
        return w.REFUSED
    every = words(grad)[w.TYPE] == x[w.NDARRAY] and words(kernels)[w.BY_ROW] == w.EVERY_ROW
    values, indices = grad, 0
    if not every:
        values, indices = parts(x, record, grad)
        if values == 0 or indices == 0:
            return w.REFUSED
    if words(values)[w.TYPE] != x[w.NDARRAY]:
        return w.REFUSED
    before, tensor[w.T_LENGTH] = 1, record[w.LENGTHS]
    if not every:
        before = admit_indices(x, tensor, indices)
    if before < 0:
        return w.REFUSED
    tensor[w.T_LISTED], tensor[w.T_KERNELS] = 1, kernels
    tensor[w.T_GRAD_ID], tensor[w.T_INDICES] = values, indices
    tensor[w.T_CHUNKS] = record[w.CHUNKS]
    return admit_values(x, tensor, record, values, indices, before)


def admit_rows(context, k, grad, _, __):
    """Check the row-sparse gradient of tensor `k`, all but the values of its indices."""
    x = words(context)
    tensor = tensor_of(x, k)
    tensor[w.T_STATUS] = check_rows(x, tensor, words(tensor[w.T_RECORD]), grad)


# Indices


@scalar
def integer_at(place, size):
    """Return the integer at an address; `size` is negative if it is signed."""
    if size == -8 or size == 8:  # larger ones than any row become negative
        return words(place)[0]
    if size == -4:
        return int(small_words(place)[0])
    if size == 4:
        return int(unsigned_words(place)[0])
    if size == -2:
        return int(half_words(place)[0])
    if size == 2:
        return int(halves(place)[0])
    return int(signed_bytes(place)[0]) if size == -1 else int(bytes_(place)[0])


@scalar
def integer_of(x, value):
    """Return the value of an integer object, -1 for others and for large ones."""
    kind = words(value)[w.TYPE]
    if kind == x[w.INT64]:
        return words(value)[w.DATA]
    if kind != x[w.INT]:
        return -1
    number = long_value(value)
    if number == -1:
        clear_error()
    return number


@scalar
def copy_indices(x, tensor, rows):
    """Copy row indices of any integer dtype and memory order to `rows`."""
    indices = tensor[w.T_INDICES]
    count, array = tensor[w.T_LENGTH], words(indices)
    if array[w.TYPE] == x[w.LIST]:
        for i in range(count):
            rows[i] = integer_of(x, words(array[w.ITEMS])[i])
        return
    if array[w.TYPE] != x[w.NDARRAY]:
        rows[0] = integer_of(x, indices)
        return
    size, place = integer_size(x, indices), array[w.DATA]
    if array[w.FLAGS] & C_ORDER:
        for i in range(count):
            rows[i] = integer_at(place + abs(size) * i, size)
        return
    ndim, shape, strides = (
        array[w.NDIM] & w.LOW_HALF,
        words(array[w.SHAPE]),
        words(array[w.STRIDES]),
    )
    for i in range(count):
        offset, rest = 0, i
        for axis in range(ndim - 1, -1, -1):
            offset += rest % shape[axis] * strides[axis]
            rest //= shape[axis]
        rows[i] = integer_at(place + offset, size)


def list_rows(context, k, _, __, ___):
    """Copy the indices of tensor `k`, and refuse those out of range."""
    x = words(context)
    tensor = tensor_of(x, k)
    rows, count = words(tensor[w.T_REGION]), tensor[w.T_LENGTH]
    height, last, ascends = words(tensor[w.T_RECORD])[w.LENGTHS], -1, True
    tensor[w.T_STATUS], tensor[w.T_ASCENDS] = w.OK, 1
    if tensor[w.T_INDICES] == 0:
        return
    copy_indices(x, tensor, rows)
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= height:
            tensor[w.T_STATUS] = w.REFUSED
        ascends = ascends and row > last
        last = row
    tensor[w.T_ASCENDS] = ascends


@scalar
def are_unique(rows, count, height, bits):
    """Whether no row is repeated, if that is found sooner than the rows are sorted; else False.

    `bits` is memory of ``4 * (count + 1)`` words, more than a bit for each row of the table.
    """
    if height > 256 * count:
        return False
    for word in range(height // 64 + 1):
        bits[word] = 0
    for i in range(count):
        row = rows[i]
        bit = 1 << (row & 63)
        if bits[row >> 6] & bit:
            return False
        bits[row >> 6] |= bit
    return True


@scalar
def cut_rows(tensor, record):
    """Divide rows, each of which is indexed once, into chunks."""
    count, step, cuts = tensor[w.T_SEGMENTS], step_of(record), words(tensor[w.T_CUTS])
    found = tensor[w.T_CUT_COUNT] = (count + step - 1) // step
    for c in range(found):
        cuts[3 * c], cuts[3 * c + 1] = 0, c * step
        cuts[3 * c + 2] = min(step, count - c * step)


def order_rows(context, k, _, __, ___):
    """Order the rows of tensor `k`, and divide them into chunks.

    Rows that are updated one by one need no order, unless their squares are summed or the rule
    sums over the tensor.
    """
    x = words(context)
    tensor = tensor_of(x, k)
    record = words(tensor[w.T_RECORD])
    region, count, step = tensor[w.T_REGION], tensor[w.T_LENGTH], step_of(record)
    places = region + 8 * count
    cuts = tensor[w.T_CUTS] = region + 8 * own_room(tensor)
    tensor[w.T_CUT_SUMS] = cuts + 24 * (count // step + 1)
    kernels, height = words(tensor[w.T_KERNELS]), record[w.LENGTHS]
    by_row = kernels[w.BY_ROW] != 0
    any_order = by_row and x[w.MEASURE] == 0 and kernels[w.PASSES] == 0
    if tensor[w.T_ASCENDS] or (
        any_order and are_unique(words(region), count, height, words(places))
    ):
        tensor[w.T_ROWS] = region if tensor[w.T_INDICES] else x[w.COUNTING]
        tensor[w.T_SEGMENTS] = count
        tensor[w.T_STARTS] = tensor[w.T_ORDER] = x[w.COUNTING]
        cut_rows(tensor, record)
    else:
        tensor[w.T_ROWS], tensor[w.T_STARTS] = places, places + 8 * (count + 1)
        tensor[w.T_ORDER] = places + 16 * (count + 1)
        tensor[w.T_SEGMENTS], tensor[w.T_CUT_COUNT] = segments.sort_rows(
            carray(words(region), (count,)),
            height,
            step,
            carray(words(places), (segments.PLACES, count + 1)),
            carray(words(cuts), (count // step + 1, 3)),
        )
    if by_row:
        tensor[w.T_CHUNK] = tensor[w.T_CHUNK + 1] = 0  # one chunk of all rows
        place = x[w.TENSORS] + 8 * (w.TENSOR * k + w.T_CHUNK)
        tensor[w.T_CHUNKS] = place


@cache
def addresses() -> tuple[int, int, int]:
    """Return the addresses of :func:`admit_rows`, :func:`list_rows` and :func:`order_rows`."""
    functions = admit_rows, list_rows, order_rows
    first, second, third = (address_of(each, ON_CHUNKS, None) for each in functions)
    return first, second, third
