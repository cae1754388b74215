"""Indexed rows of a row-sparse gradient: sorting, and summation of repeated rows.

Tests: ``tests/engine/test_rows.py``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fastopt._kernels.blocks import blocks_of
from fastopt._kernels.elements import row_locator
from fastopt._kernels.layout import ADDRESS, FOLDED, ORDER, ROWS, SEGMENTS, STARTS, WIDTH, Layout
from fastopt._kernels.storage import inside, load, locate, prefetch, store
from fastopt._kernels.vectors import inlined
from fastopt.kernels.rule import scalar

INDEX = (np.int64,)
DIGIT, FEW_DIGIT, FEW = 11, 8, 1024
"""Bits of a radix sort digit; the counts of all digits stay in cache. Fewer than FEW rows are
sorted by FEW_DIGIT bits, as the counts would take longer than the rows."""

AHEAD = 4
"""Prefetch distance in indexed rows."""

FOLD = 64
"""Positions of a row-sparse gradient, of one row, that a CUDA kernel sums before others."""

PLACES = 4
"""Rows of the array `places` of :func:`sort_rows`."""


@scalar
def sort_rows(rows, height, step, places, chunks):
    """Sort row indices with a stable least-significant-digit radix sort.

    Parameters
    ----------
    rows : numpy.ndarray
        At least one row index from 0 to ``height - 1``.
    height, step : int
        Height of the table, and the approximate number of positions in a chunk.
    places : numpy.ndarray
        Output array with PLACES rows, longer than `rows`: the unique rows in ascending order, the
        start of each one in the order (and the end), the order, which has the sorted positions in
        `rows`, and memory to work with.
    chunks : numpy.ndarray
        Output array of at least ``len(rows) // step + 1`` chunks.

    Returns
    -------
    tuple of int
        The numbers of unique rows and of chunks.
    """
    size = len(rows)
    unique, starts, order, other = places[0], places[1], places[2], places[3]
    for i in range(size):
        order[i] = i
    digit_bits = DIGIT if size >= FEW else FEW_DIGIT
    counts = np.empty(1 << digit_bits, np.int64)
    shift = 0
    while shift == 0 or (shift < 63 and (height - 1) >> shift):
        counts[:] = 0
        for i in range(size):
            counts[(rows[i] >> shift) & (len(counts) - 1)] += 1
        place = 0
        for digit in range(len(counts)):
            place, counts[digit] = place + counts[digit], place
        for i in range(size):
            digit = (rows[order[i]] >> shift) & (len(counts) - 1)
            other[counts[digit]] = order[i]
            counts[digit] += 1
        order, other = other, order
        shift += digit_bits
    if (shift // digit_bits) % 2:
        for i in range(size):
            other[i] = order[i]
        order = other
    distinct, cuts = 0, 0
    for i in range(size):
        row = rows[order[i]]
        if distinct and row == unique[distinct - 1]:
            continue
        if cuts == 0 or i - starts[chunks[cuts - 1, 1]] >= step:
            chunks[cuts, 0], chunks[cuts, 1] = 0, distinct
            cuts += 1
        unique[distinct], starts[distinct] = row, i
        distinct += 1
    starts[distinct] = size
    for chunk in range(cuts):
        end = chunks[chunk + 1, 1] if chunk + 1 < cuts else distinct
        chunks[chunk, 2] = end - chunks[chunk, 1]
    return distinct, cuts


@scalar
def listed(table, tensor, column, k):
    """Return item `k` of the int64 array whose address is in `column`."""
    return load(locate(table, tensor, column, k, INDEX), 0)[0]


@scalar
def collect(table, tensor, values, k, column, count, target, at):
    """Write the gradient of the `k`-th unique row, from `column` on, to element `at` of `target`.

    Repeated rows are summed in the order of the list.
    """
    width = np.int64(table[tensor, WIDTH])
    begin = listed(table, tensor, STARTS, k)
    for entry in range(begin, listed(table, tensor, STARTS, k + 1)):
        place = listed(table, tensor, ORDER, entry) * width + column
        if entry == begin:
            for i in range(count):
                store(target, at + i, load(values, place + i))
        else:
            for i in range(count):
                total = load(target, at + i)[0] + load(values, place + i)[0]
                store(target, at + i, (total,))


def row_gradient(layout: Layout) -> Callable[..., Any]:
    """Return ``(table, tensor, k, width, buffer)``, which points to the gradient of a unique row.

    It points into the values of the gradient if the row is indexed once and they have the type of
    the arithmetic. Otherwise they are converted, and summed, in `buffer`.
    """
    first_grad, kinds, reals = layout.first_grad, (layout.grad,), (layout.real,)
    direct = layout.grad == layout.real

    def row_gradient(table, tensor, k, width, buffer):
        begin = listed(table, tensor, STARTS, k)
        if direct and listed(table, tensor, STARTS, k + 1) == begin + 1:
            place = listed(table, tensor, ORDER, begin) * width
            return locate(table, tensor, first_grad, place, reals)
        values, grads = locate(table, tensor, first_grad, 0, kinds), inside(buffer)
        collect(table, tensor, values, k, 0, width, grads, 0)
        return grads

    return inlined(row_gradient)


def row_fetcher(layout: Layout) -> Callable[..., Any]:
    """Return ``(table, tensor, k, width)``, which prefetches the row AHEAD of the `k`-th one.

    That is its weight, its state, and the state's numbers of rows and scales.
    """
    locate_row, kinds, scale_kinds = row_locator(layout.pitched), layout.weight, layout.scales
    (cell_kinds, row_kinds), of_rows = layout.split_state, layout.first_row_state
    first_state, first_scale = layout.first_state, layout.first_scale

    def fetch_row(table, tensor, k, width):
        if k + AHEAD < table[tensor, SEGMENTS]:
            row, in_row = listed(table, tensor, ROWS, k + AHEAD), blocks_of(width)
            prefetch(locate_row(table, tensor, ADDRESS, row, width, kinds), width, True)
            prefetch(locate_row(table, tensor, first_state, row, width, cell_kinds), width, True)
            prefetch(locate_row(table, tensor, of_rows, row, 1, row_kinds), 1, True)
            scales = locate_row(table, tensor, first_scale, row, in_row, scale_kinds)
            prefetch(scales, in_row, True)

    return scalar(fetch_row)


@scalar
def summed(table, tensor, values, k, column, wide):
    """Return one element of the gradient of the `k`-th unique row, in a CUDA kernel.

    Rows with fewer than ``2 * FOLD`` positions are summed like in :func:`collect`. Of others, whole
    groups of FOLD positions have been summed, in the type `wide`, by
    :func:`fastopt._kernels.cuda_order.fold`; the positions before the first group, the groups, and
    the positions after the last one are added in this order, which depends on the list alone.
    """
    width = np.int64(table[tensor, WIDTH])
    begin, end = listed(table, tensor, STARTS, k), listed(table, tensor, STARTS, k + 1)
    first, last = (begin + FOLD - 1) // FOLD, end // FOLD
    if end - begin < 2 * FOLD:
        first, last = begin, begin
        head = end
    else:
        head = first * FOLD
    total = load(values, listed(table, tensor, ORDER, begin) * width + column)[0]
    for entry in range(begin + 1, head):
        total = total + load(values, listed(table, tensor, ORDER, entry) * width + column)[0]
    if first < last:
        folded = locate(table, tensor, FOLDED, column, wide)
        for group in range(first, last):
            part = load(folded, group * width)[0]
            total = part if group * FOLD == begin else total + part
        for entry in range(last * FOLD, end):
            total = total + load(values, listed(table, tensor, ORDER, entry) * width + column)[0]
    return total


@scalar
def scattered(table, tensor, values, element, zero, wide):
    """Return one element of the dense gradient: `zero` if its row is not indexed."""
    width, segments = np.int64(table[tensor, WIDTH]), np.int64(table[tensor, SEGMENTS])
    row = element // width
    k = _first_from(table, tensor, row, segments)
    if k < segments and listed(table, tensor, ROWS, k) == row:
        return summed(table, tensor, values, k, element - row * width, wide)
    return zero


@scalar
def gather(table, tensor, values, first, count, target):
    """Write `count` elements of the dense gradient from element `first` on to `target`.

    Rows that are not indexed are zero.
    """
    for i in range(count):
        store(target, i, (0,))
    width, segments = np.int64(table[tensor, WIDTH]), np.int64(table[tensor, SEGMENTS])
    k = _first_from(table, tensor, first // width, segments)
    while k < segments:
        start = listed(table, tensor, ROWS, k) * width
        begin, end = max(start, first), min(start + width, first + count)
        if begin >= end:
            break
        collect(table, tensor, values, k, begin - start, end - begin, target, begin - first)
        k += 1


@scalar
def _first_from(table, tensor, row, segments):
    """Return the position of the first unique row that is at least `row`."""
    low, high = 0, segments
    while low < high:
        middle = (low + high) // 2
        if listed(table, tensor, ROWS, middle) < row:
            low = middle + 1
        else:
            high = middle
    return low
