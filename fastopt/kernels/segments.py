"""Listed rows of a sparse gradient: their order, and sums of what is listed more than once."""

from typing import Any

import numpy as np

from fastopt.kernels.layout import ORDER, ROWS, SEGMENTS, STARTS, WIDTH
from fastopt.kernels.rule import scalar
from fastopt.kernels.storage import load, locate, store

__all__ = [
    "ASCENDING",
    "MIXED",
    "collect",
    "gather",
    "listed",
    "order_rows",
    "scattered",
    "summed",
    "survey",
]

INDEX = (np.int64,)
DIGIT, FEW_DIGIT, FEW = 11, 8, 1024
"""Bits of a row number that are sorted by at a time; counts of all digits stay in cache. Fewer than
FEW rows are sorted by FEW_DIGIT bits, since the counts take longer than the rows."""

ASCENDING, MIXED, OUTSIDE = 0, 1, 2
"""Answers of :func:`survey`: rows ascend without repeats; they do not; one is not in the table."""


def survey(rows: Any, height: int, checked: Any) -> Any:
    """Copy `rows`, indices into a table of `height` rows, to `checked`, which kernels read.

    Another thread may change `rows` after they have been checked. Returns how they are ordered,
    and the row that is outside of the table, else -1.
    """
    answer = ASCENDING
    last = np.int64(-1)
    for i in range(len(checked)):
        row = rows[i]
        checked[i] = row
        if row < 0 or row >= height:
            return OUTSIDE, row
        if row <= last:
            answer = MIXED
        last = row
    return answer, np.int64(-1)


def order_rows(rows: Any, height: int, step: int) -> Any:
    """Sort numbers of rows, stably, by their digits from the last to the first.

    Returns each different row in ascending order, the place in `order` where each begins (and the
    end), `order`, the places in `rows` in order, and pieces of work of about `step` places.
    """
    size = len(rows)
    order, other = np.arange(size), np.empty(size, np.int64)
    digit_bits = DIGIT if size >= FEW else FEW_DIGIT
    counts = np.empty(1 << digit_bits, np.int64)
    shift = 0
    while shift == 0 or (height - 1) >> shift:
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
    unique, starts = np.empty(size, np.int64), np.empty(size + 1, np.int64)
    pieces = np.zeros((size // step + 1, 3), np.int64)
    found, cuts = 0, 0
    for i in range(size):
        row = rows[order[i]]
        if found and row == unique[found - 1]:
            continue
        if cuts == 0 or i - starts[pieces[cuts - 1, 1]] >= step:
            pieces[cuts, 1] = found
            cuts += 1
        unique[found], starts[found] = row, i
        found += 1
    starts[found] = size
    for piece in range(cuts):
        end = pieces[piece + 1, 1] if piece + 1 < cuts else found
        pieces[piece, 2] = end - pieces[piece, 1]
    return unique[:found], starts[: found + 1], order, pieces[:cuts]


@scalar
def listed(table: Any, tensor: Any, column: Any, k: Any) -> Any:
    """Integer number `k` of the array of integers whose address is in `column`."""
    return load(locate(table, tensor, column, k, INDEX), 0)[0]


@scalar
def collect(
    table: Any, tensor: Any, values: Any, k: Any, column: Any, count: Any, target: Any, at: Any
) -> None:
    """Write the gradient of the `k`-th listed row, from `column` on, to element `at` of `target`.

    What is listed more than once is added up in the order of the list.
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


@scalar
def summed(table: Any, tensor: Any, values: Any, k: Any, column: Any) -> Any:
    """One element of the gradient of the `k`-th listed row, as :func:`collect` would write it."""
    width = np.int64(table[tensor, WIDTH])
    begin = listed(table, tensor, STARTS, k)
    total = load(values, listed(table, tensor, ORDER, begin) * width + column)[0]
    for entry in range(begin + 1, listed(table, tensor, STARTS, k + 1)):
        total = total + load(values, listed(table, tensor, ORDER, entry) * width + column)[0]
    return total


@scalar
def scattered(table: Any, tensor: Any, values: Any, element: Any, zero: Any) -> Any:
    """One element of the gradient of the whole table: `zero` where its row is not listed."""
    width, segments = np.int64(table[tensor, WIDTH]), np.int64(table[tensor, SEGMENTS])
    row = element // width
    k = _first_from(table, tensor, row, segments)
    if k < segments and listed(table, tensor, ROWS, k) == row:
        return summed(table, tensor, values, k, element - row * width)
    return zero


@scalar
def gather(table: Any, tensor: Any, values: Any, first: Any, count: Any, target: Any) -> None:
    """Write the gradient of `count` elements of the whole table from `first` on to `target`.

    Rows that are not listed have none.
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
def _first_from(table: Any, tensor: Any, row: Any, segments: Any) -> Any:
    """Place of the first listed row that is not before `row`."""
    low, high = 0, segments
    while low < high:
        middle = (low + high) // 2
        if listed(table, tensor, ROWS, middle) < row:
            low = middle + 1
        else:
            high = middle
    return low
