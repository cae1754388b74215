"""Row-sparse gradients in compiled calls: checks, copies of their indices, and their order.

:mod:`fastopt._kernels.front` calls :func:`admit_rows` for a gradient that is no array, then
:func:`list_rows` while it holds the GIL, and :func:`order_rows`. They are compiled with the first
row-sparse gradient, apart from the front.

*Indices are copied* while the GIL is held, and the copy is what is checked and what kernels read:
another thread may change the array once the GIL is released, and an index out of range would write
anywhere. ``test_what_does_not_fit_is_refused_by_name_and_changes_nothing``,
``test_indices_that_a_schedule_spoils_are_checked_again``.

*Parts of a gradient* are in the dictionary of a ``RowSparse``, whose class has no properties of
these names, so that reading them runs no Python; the reference is dropped at once, as the gradient
keeps its parts (:func:`part`). Large calls hold the values.

*Sizes* are products of up to 2**63 elements: what exceeds MOST is refused before memory is divided.
``test_rows_whose_bytes_would_overflow_do_not_fit_into_memory``.

Tests: ``tests/engine/test_records.py``, ``tests/engine/test_rows.py``.
"""

from numba import carray

from fastopt._kernels import record_words as w
from fastopt._kernels import segments
from fastopt._kernels.admission import code_of_array, items_of, meets, parts_of, tensor_of
from fastopt._kernels.chunks import CHUNK, ROW_COST
from fastopt._kernels.layout import ORDER, ROWS, SEGMENTS, STARTS, WIDTH
from fastopt._kernels.numpy_abi import ALIGNED, C_ORDER
from fastopt._kernels.objects import (
    after,
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
from fastopt._kernels.record_words import context_at, header_at, loops_at, record_at
from fastopt._kernels.strided import lengths_of, proportion, rounded, size_of
from fastopt.kernels.rule import scalar

# What the front needs of a tensor with a row-sparse gradient


@scalar
def work_of(tensor, record):
    """Return the cost of the update of a tensor, in elements of a dense one.

    A weight that is not in C order is copied as a whole.
    """
    by_row = tensor.listed and loops_at(tensor.kernels).by_row
    if by_row and not tensor.copied:
        return tensor.length * words(record.row)[WIDTH] * ROW_COST
    return record.size


@scalar
def step_of(record):
    """Return the number of indices in a chunk."""
    return max(CHUNK // max(words(record.row)[WIDTH], 1), 1)


@scalar
def row_room(tensor, record):
    """Return the bytes for the rows of a gradient: indices, their order, chunks and their sums."""
    return rounded(8 * (own_room(tensor) + 4 * (tensor.length // step_of(record) + 1)))


@scalar
def own_room(tensor):
    """Return the words for indices and their order; all rows need none."""
    count = tensor.length
    return count + segments.PLACES * (count + 1) if tensor.indices else 0


@scalar
def enter_rows(tensor, row):
    """Enter the rows of a gradient for the kernels."""
    row[ROWS], row[STARTS], row[ORDER] = tensor.rows, tensor.starts, tensor.order
    row[SEGMENTS] = tensor.segments


@scalar
def rows_before(place, tensor, work):
    """Return how many unique rows are before `place` of `work`; rows and indices cost the same."""
    rows, starts = tensor.segments, words(tensor.starts)
    if place <= 0 or place >= work:
        return 0 if place <= 0 else rows
    target = proportion(place, work, rows + tensor.length)
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
def has_shape(context, value, record):
    """Whether an object is a tuple with the shape of a record, or of one of complex numbers."""
    shape = header_at(value)
    if shape.type != context.tuple:
        return False
    short = record.ndims - shape.length
    if short != 0 and (short != 1 or record.pair_dtype == 0):
        return False
    items = words(items_of(context, value))
    for axis in range(shape.length):
        if header_at(items[axis]).type != context.int:
            return False
        if long_value(items[axis]) != lengths_of(record)[axis]:
            return False
    return True


@scalar
def part(grad, name):
    """Return the address of an attribute of a RowSparse, which keeps it alive; 0 without it."""
    value = attribute(grad, name)
    if value == 0:
        clear_error()
    else:
        release(value)
    return value


@scalar
def parts(context, record, grad):
    """Return the addresses of the values and indices of a gradient, zeros for another object."""
    if header_at(grad).type == context.row_sparse:
        shape = part(grad, context.shape_name)
        if shape == 0 or not has_shape(context, shape, record):
            return 0, 0
        return part(grad, context.values_name), part(grad, context.indices_name)
    items = items_of(context, grad)
    if items == 0 or header_at(grad).length != 2:
        return 0, 0
    return words(items)[0], words(items)[1]


@scalar
def integer_size(context, array):
    """Return the size of an integer dtype in bytes, negative if it is signed; 0 for others."""
    kind = header_at(header_at(array).dtype).kind
    known = after(context, w.INTEGERS)
    for k in range(w.INTEGER_KINDS):
        if known[2 * k] == kind:
            return known[2 * k + 1]
    return 0


@scalar
def admit_indices(context, tensor, indices):
    """Return the number of dimensions of row indices, and enter their number; -1 if refused."""
    array, count = header_at(indices), 1
    if array.type == context.list:
        tensor.length = array.length
        return 1
    if array.type == context.int or array.type == context.int64:
        tensor.length = 1
        return 0
    if array.type != context.ndarray or array.flags & ALIGNED == 0:
        return -1
    ndim = array.ndim
    if integer_size(context, indices) == 0:
        return -1
    for axis in range(ndim):
        count *= words(array.shape)[axis]
    tensor.length = count
    return ndim


@scalar
def admit_values(context, tensor, record, values, indices, before):
    """Check the shape of values for indices with `before` axes, and enter where they lie."""
    array, wanted = header_at(values), record.grad_code
    code, pairs = parts_of(code_of_array(context, array), record)
    if code == 0 or (code != wanted and size_of(wanted) == 2):
        return w.REFUSED
    axes, size = before + record.ndims - 1, size_of(code)
    if array.ndim != axes - pairs:
        return w.REFUSED
    shape, strides, low, high = words(array.shape), words(array.strides), 0, size
    own_lengths = after(tensor, w.T_GRAD_LENGTHS)
    own_strides = after(tensor, w.T_GRAD_STRIDES)
    for axis in range(axes):
        length = lengths_of(record)[1 + axis - before]
        if axis < before:
            is_array = indices != 0 and header_at(indices).type == context.ndarray
            length = words(header_at(indices).shape)[axis] if is_array else tensor.length
        if axis < array.ndim and shape[axis] != length:
            return w.REFUSED
        stride = strides[axis] if axis < array.ndim else size
        own_lengths[axis], own_strides[axis] = length, stride
        low, high = low + min((length - 1) * stride, 0), high + max((length - 1) * stride, 0)
    first = tensor.grad = array.data
    empty = tensor.length == 0 or record.size == 0
    tensor.grad_low, tensor.grad_high = first + low, first + high
    if empty:
        tensor.grad_low = tensor.grad_high = first
    tensor.grad_axes, tensor.grad_code = axes, code
    order = C_ORDER | ALIGNED
    copied = code != wanted or array.flags & order != order or record.scaled != 0
    tensor.grad_copied = copied and not empty
    low, high = tensor.grad_low, tensor.grad_high
    if (low < tensor.high and high > tensor.low) or meets(record, low, high):
        if not (empty or context.apart):
            return w.REFUSED
        tensor.grad_copied = not empty
    return w.OK


@scalar
def check_rows(context, tensor, record, grad):
    """Check a row-sparse gradient, and enter its arrays."""
    kernels, ordered = record.row_kernels, record.order == C_ORDER
    if kernels == 0 or not ordered:
        return w.REFUSED
    every = header_at(grad).type == context.ndarray and loops_at(kernels).by_row == w.EVERY_ROW
    values, indices = grad, 0
    if not every:
        values, indices = parts(context, record, grad)
        if values == 0 or indices == 0:
            return w.REFUSED
    if header_at(values).type != context.ndarray:
        return w.REFUSED
    before, tensor.length = 1, lengths_of(record)[0]
    if not every:
        before = admit_indices(context, tensor, indices)
    if before < 0:
        return w.REFUSED
    tensor.listed, tensor.kernels = 1, kernels
    tensor.grad_id, tensor.indices = values, indices
    tensor.chunks = record.chunks
    return admit_values(context, tensor, record, values, indices, before)


def admit_rows(at, k, grad, _, __):
    """Check the row-sparse gradient of tensor `k`, all but the values of its indices."""
    context = context_at(at)
    tensor = tensor_of(context, k)
    tensor.status = check_rows(context, tensor, record_at(tensor.record), grad)


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
def integer_of(context, value):
    """Return the value of an integer object, -1 for others and for large ones."""
    kind = header_at(value).type
    if kind == context.int64:
        return header_at(value).data
    if kind != context.int:
        return -1
    number = long_value(value)
    if number == -1:
        clear_error()
    return number


@scalar
def copy_indices(context, tensor, rows):
    """Copy row indices of any integer dtype and memory order to `rows`."""
    indices = tensor.indices
    count, array = tensor.length, header_at(indices)
    if array.type == context.list:
        for i in range(count):
            rows[i] = integer_of(context, words(array.items)[i])
        return
    if array.type != context.ndarray:
        rows[0] = integer_of(context, indices)
        return
    size, place = integer_size(context, indices), array.data
    if array.flags & C_ORDER:
        for i in range(count):
            rows[i] = integer_at(place + abs(size) * i, size)
        return
    ndim, shape, strides = array.ndim, words(array.shape), words(array.strides)
    for i in range(count):
        offset, rest = 0, i
        for axis in range(ndim - 1, -1, -1):
            offset += rest % shape[axis] * strides[axis]
            rest //= shape[axis]
        rows[i] = integer_at(place + offset, size)


def list_rows(at, k, _, __, ___):
    """Copy the indices of tensor `k`, and refuse those out of range."""
    context = context_at(at)
    tensor = tensor_of(context, k)
    rows, count = words(tensor.region), tensor.length
    height, last, ascends = lengths_of(record_at(tensor.record))[0], -1, True
    tensor.status, tensor.ascends = w.OK, 1
    if tensor.indices == 0:
        return
    copy_indices(context, tensor, rows)
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= height:
            tensor.status = w.REFUSED
        ascends = ascends and row > last
        last = row
    tensor.ascends = ascends


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
    count, step, cuts = tensor.segments, step_of(record), words(tensor.cuts)
    chunks = tensor.cut_count = (count + step - 1) // step
    for c in range(chunks):
        cuts[3 * c], cuts[3 * c + 1] = 0, c * step
        cuts[3 * c + 2] = min(step, count - c * step)


def order_rows(at, k, _, __, ___):
    """Order the rows of tensor `k`, and divide them into chunks.

    Rows that are updated one by one need no order, unless their squares are summed or the rule
    sums over the tensor.
    """
    context = context_at(at)
    tensor = tensor_of(context, k)
    record = record_at(tensor.record)
    region, count, step = tensor.region, tensor.length, step_of(record)
    places = region + 8 * count
    cuts = tensor.cuts = region + 8 * own_room(tensor)
    tensor.cut_sums = cuts + 24 * (count // step + 1)
    kernels, height = loops_at(tensor.kernels), lengths_of(record)[0]
    by_row = kernels.by_row != 0
    any_order = by_row and context.measure == 0 and kernels.passes == 0
    if tensor.ascends or (any_order and are_unique(words(region), count, height, words(places))):
        tensor.rows = region if tensor.indices else context.counting
        tensor.segments = count
        tensor.starts = tensor.order = context.counting
        cut_rows(tensor, record)
    else:
        tensor.rows, tensor.starts = places, places + 8 * (count + 1)
        tensor.order = places + 16 * (count + 1)
        tensor.segments, tensor.cut_count = segments.sort_rows(
            carray(words(region), (count,)),
            height,
            step,
            carray(words(places), (segments.PLACES, count + 1)),
            carray(words(cuts), (count // step + 1, 3)),
        )
    if by_row:
        tensor.chunk = tensor.chunk_first = 0  # one chunk of all rows
        place = context.tensors + 8 * (w.TENSOR * k + w.T_CHUNK)
        tensor.chunks = place


ENTRIES = admit_rows, list_rows, order_rows
"""What the front calls, in the order of the words with their addresses."""
