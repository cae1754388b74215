"""A hash table from 64-bit ids to row numbers, by open addressing with linear probing.

A slot has 32 bits: the row number plus one in the lower bits, as many as the largest row needs, and
bits of the id's hash (the tag) in the others, so that the id of a row is rarely read except for a
hit. An empty slot is 0; a slot whose row was removed has row 0. The ids are stored with the other
data of a row. The number of slots need not be a power of two: a multiplication maps a hash to a
slot.

Tests: ``tests/table/test_index.py``.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import prange, types

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.noise import dither_bits, dither_run, mix, normal, run, stream_key
from fastopt._kernels.objects import BYTES
from fastopt._kernels.storage import LINE, prefetch_line
from fastopt.kernels.rule import scalar

BLOCK = 32
"""Ids that are looked up together, to overlap their memory latencies."""

PART = 1024
"""Ids that a thread looks up at once."""

FREE = np.uint32(0xFFFFFFFF)
"""Value of the last use of a row without an id."""

BITS, LIVE, HIGH, HINT, DEAD, NUMBERS = 0, 1, 2, 3, 4, 5
"""Positions in the array ``numbers``: bits of a slot for the row, rows with an id, first row that
never had an id, row before which no row is free, slots of removed rows; and the array's length."""

_GONE = np.uint32(0x80000000)
_EMPTY = np.uint32(0)
_WORD, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_UNIT, _MOST = np.float32(2.0**-23), 4294967040.0
"""Step of uniform numbers; upper limit of counts, the largest float32 below 2**32."""


@intrinsic
def fetch(typingctx, address):
    """Prefetch the cache line at an address, to be written to."""

    def codegen(context, builder, signature, args):
        prefetch_line(builder, builder.inttoptr(args[0], BYTES), 1)
        return context.get_dummy_value()

    return types.none(types.intp), codegen


@scalar
def _home(hashed, size):
    """Return the slot where the search for an id starts."""
    return np.int64((hashed >> _WORD) * np.uint64(size) >> _WORD)


@scalar
def _next(at, size):
    """Return the slot after another one, the first one after the last."""
    return at + 1 if at + 1 < size else np.int64(0)


@scalar
def _row(id, hashed, slots, ids, bits):
    """Return the row of an id, or -1."""
    at = _home(hashed, len(slots))
    mask = np.int64((1 << bits) - 1)
    tag = np.int64(hashed & _LOW) >> bits
    row = np.int64(-1)
    while True:
        slot = np.int64(slots[at])
        if slot == 0:
            break
        number = slot & mask
        if slot >> bits == tag and number > 0 and ids[number - 1] == id:
            row = number - 1
            break
        at = _next(at, len(slots))
    return row


@scalar
def _counted(count, age, rate, more):
    """Return ``count * exp(-rate * age) + more``, limited to the largest count.

    It takes numbers, since passing arrays in a loop costs time for reference counting.
    """
    count = np.float64(count)
    if rate > 0 and age > 0:
        count *= math.exp(-rate * age)
    return min(count + more, _MOST)


@cache
def find(parallel: bool) -> Callable:
    """Kernel ``(wanted, slots, ids, numbers, rows)`` that finds the rows of ids.

    It writes the row of each id, or -1, to `rows`, and returns the number of ids without a row.
    """

    def find(wanted, slots, ids, numbers, rows):
        bits, missing, size = numbers[BITS], 0, len(slots)
        mask = np.int64((1 << bits) - 1)
        slot_at, id_at, step = slots.ctypes.data, ids.ctypes.data, ids.strides[0]
        for part in prange(-(-len(wanted) // PART)):
            hashes = np.empty(BLOCK, np.uint64)
            end = min((part + 1) * PART, len(wanted))
            for first in range(part * PART, end, BLOCK):
                count = min(BLOCK, end - first)
                for k in range(count):
                    hashed = mix(np.uint64(wanted[first + k]))
                    hashes[k] = hashed
                    fetch(slot_at + 4 * _home(hashed, size))
                for k in range(count):
                    at = _home(hashes[k], size)
                    tag = np.int64(hashes[k] & _LOW) >> bits
                    slot = np.int64(slots[at])
                    while slot != 0 and (slot >> bits != tag or slot & mask == 0):
                        at = _next(at, size)
                        slot = np.int64(slots[at])
                    rows[first + k] = (slot & mask) - 1
                    fetch(id_at + step * max((slot & mask) - 1, 0))
                for k in range(first, first + count):
                    row = rows[k]
                    if row >= 0 and ids[row] != wanted[k]:  # equal tags, which is rare
                        row = _row(wanted[k], hashes[k - first], slots, ids, bits)
                        rows[k] = row
                    missing += row < 0
        return missing

    return compiled(find, None, parallel)


@cache
def gather() -> Callable:
    """Kernel ``(source, rows, target)`` that copies rows with all threads."""

    def gather(source, rows, target):
        base, width = source.ctypes.data, source.shape[1]
        step, size = source.strides[0], width * source.itemsize
        for part in prange(-(-len(rows) // BLOCK)):
            first = part * BLOCK
            for k in range(first, min(first + BLOCK, len(rows))):
                for at in range(0, size, LINE):
                    fetch(base + step * max(rows[k], 0) + at)
            for k in range(first, min(first + BLOCK, len(rows))):
                row = max(rows[k], 0)
                for i in range(width):
                    target[k, i] = source[row, i]

    return compiled(gather, None, parallel=True)


@cache
def insert() -> Callable:
    """Kernel ``(wanted, slots, ids, last, numbers, rows, new, limit, first)`` that adds rows.

    Ids from position `first` on that have no row get the lowest free row, else the next new one,
    until `limit` slots are used. The rows of all ids are written to `rows`, new rows also to `new`.
    It returns the number of new rows and the position of the first id that was not processed.
    """

    def insert(wanted, slots, ids, last, numbers, rows, new, limit, first):
        bits, count, size = numbers[BITS], 0, len(slots)
        high, hint = numbers[HIGH], numbers[HINT]
        mask = np.int64((1 << bits) - 1)
        room = limit - numbers[LIVE] - numbers[DEAD]
        k = first
        while k < len(wanted):
            hashed = mix(np.uint64(wanted[k]))
            tag = np.int64(hashed & _LOW) >> bits
            at, free, row = _home(hashed, size), np.int64(-1), np.int64(-1)
            slot = np.int64(slots[at])
            while slot != 0:
                number = slot & mask
                if number == 0:
                    if free < 0:
                        free = at
                elif slot >> bits == tag and ids[number - 1] == wanted[k]:
                    row = number - 1
                    break
                at = _next(at, size)
                slot = np.int64(slots[at])
            if row < 0:
                if count >= room:
                    break
                while hint < high and last[hint] != FREE:
                    hint += 1
                row = hint
                hint += 1
                if row == high:
                    high += 1
                if free >= 0:
                    numbers[DEAD] -= 1
                    at = free
                slots[at] = np.uint32((tag << bits) | (row + 1))
                ids[row] = wanted[k]
                last[row] = 0
                new[count] = row
                count += 1
            rows[k] = row
            k += 1
        numbers[HIGH], numbers[HINT] = high, hint
        numbers[LIVE] += count
        return count, k

    return compiled(insert, None, parallel=False)


@cache
def place() -> Callable:
    """Kernel ``(slots, ids, last, numbers)`` that inserts all rows into empty slots."""

    def place(slots, ids, last, numbers):
        bits = numbers[BITS]
        for row in range(numbers[HIGH]):
            if last[row] != FREE:
                hashed = mix(np.uint64(ids[row]))
                at = _home(hashed, len(slots))
                while slots[at] != _EMPTY:
                    at = _next(at, len(slots))
                tag = np.int64(hashed & _LOW) >> bits
                slots[at] = np.uint32((tag << bits) | (row + 1))
        numbers[DEAD] = 0

    return compiled(place, None, parallel=False)


@cache
def remove() -> Callable:
    """Kernel ``(gone, slots, ids, last, numbers)`` that removes rows; free rows are ignored."""

    def remove(gone, slots, ids, last, numbers):
        mask = np.int64((1 << numbers[BITS]) - 1)
        for k in range(len(gone)):
            row = gone[k]
            at = _home(mix(np.uint64(ids[row])), len(slots))
            slot = np.int64(slots[at])
            while slot != 0 and slot & mask != row + 1:
                at = _next(at, len(slots))
                slot = np.int64(slots[at])
            if slot != 0:
                slots[at] = _GONE
                last[row] = FREE
                numbers[HINT] = min(numbers[HINT], row)
                numbers[DEAD] += 1
                numbers[LIVE] -= 1

    return compiled(remove, None, parallel=False)


@cache
def touch() -> Callable:
    """Kernel ``(rows, counts, last, use)`` that records the use of rows.

    `use` is an array ``(now, counted, rate)``: `now` becomes the last use of the rows, and if
    `counted`, 1 is added to their counts, which decay at `rate`. Negative rows are ignored.
    """

    def touch(rows, counts, last, use):
        now, counted, rate = np.int64(use[0]), use[1] > 0, use[2]
        at, step = last.ctypes.data, last.strides[0]
        for k in range(len(rows)):
            if k + BLOCK < len(rows):
                fetch(at + step * max(rows[k + BLOCK], 0))
            row = rows[k]
            if row >= 0:
                if counted or rate > 0:
                    age = now - np.int64(last[row])
                    counts[row] = _counted(counts[row], age, rate, counted)
                last[row] = now

    return compiled(touch, None, parallel=False)


@cache
def draw(gaussian: bool) -> Callable:
    """Kernel ``(ids, seed, scale, values)`` that draws a row of random numbers for each id.

    They depend only on seed and id: standard normal numbers, or uniform numbers from -1 to 1, in
    float32, times `scale`.
    """

    def draw(ids, seed, scale, values):
        for k in range(len(ids)):
            key = stream_key(seed, ids[k], 0)
            if gaussian:
                start = run(key, 0)
                for i in range(values.shape[1]):
                    values[k, i] = scale * normal(start, i)
            else:
                start = dither_run(key, 0)
                for i in range(values.shape[1]):
                    bits = np.int64(dither_bits(start, i, 0) >> np.uint32(8))
                    values[k, i] = scale * (np.float32(bits - 8388608) * _UNIT)

    return compiled(draw, None, parallel=False)
