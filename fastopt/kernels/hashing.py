"""A hash table from 64-bit ids to row numbers, by open addressing with linear probing.

A slot has 32 bits: the number of a row plus one in the lower bits, as many as any row needs, and
bits of the id's hash in the others, so that the id of a row is read for a hit almost alone. An
empty slot is 0, and one whose row is gone has row 0. The ids themselves lie with what else a row
has. Slots are not a power of two: a multiplication maps a hash to a slot.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from fastopt.kernels.compiling import compiled
from fastopt.kernels.noise import dither_bits, dither_key, mix, normal, run, stream_key
from fastopt.kernels.rule import scalar

__all__ = ["FREE", "draw", "find", "insert", "place", "remove", "touch"]
__all__ += ["BITS", "DEAD", "HIGH", "HINT", "LIVE", "NUMBERS"]

FREE = np.uint32(0xFFFFFFFF)
"""Last use of a row that has no id."""

BITS, LIVE, HIGH, HINT, DEAD, NUMBERS = 0, 1, 2, 3, 4, 5
"""Positions of numbers in an array: bits of a slot for the row, rows with an id, first row that
never had one, row before which no row is free, slots of rows that are gone; and their count."""

_GONE = np.uint32(0x80000000)
_EMPTY = np.uint32(0)
_WORD, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_UNIT, _MOST = np.float32(2.0**-23), 4294967040.0
"""Step of uniform numbers; where counts stop, the largest float32 below 2**32."""


@scalar
def _home(hashed, size):
    """Slot from which on an id is looked for."""
    return np.int64((hashed >> _WORD) * np.uint64(size) >> _WORD)


@scalar
def _row(id, hashed, slots, ids, bits):
    """Row of an id, or -1."""
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
        at += 1
        if at == len(slots):
            at = 0
    return row


@scalar
def _slot(hashed, row, bits):
    """Contents of the slot of a row."""
    tag = np.int64(hashed & _LOW) >> bits
    return np.uint32((tag << bits) | (row + 1))


@cache
def find() -> Callable:
    """Kernel ``(wanted, slots, ids, numbers, rows)`` that writes the row of each id, or -1.

    It returns how many ids have none.
    """

    def find(wanted, slots, ids, numbers, rows):
        bits, missing = numbers[BITS], 0
        for k in range(len(wanted)):
            rows[k] = _row(wanted[k], mix(np.uint64(wanted[k])), slots, ids, bits)
            missing += rows[k] < 0
        return missing

    return compiled(find, None, parallel=False)


@cache
def insert() -> Callable:
    """Kernel ``(wanted, slots, ids, last, numbers, rows, new)`` that gives ids without a row one.

    These are the ids whose entry in `rows` is -1. A new id takes the free row with the lowest
    number, else the next one. It returns the number of new rows, which are in `new`.
    """

    def insert(wanted, slots, ids, last, numbers, rows, new):
        bits, count = numbers[BITS], 0
        high, hint = numbers[HIGH], numbers[HINT]
        mask = np.int64((1 << bits) - 1)
        for k in range(len(wanted)):
            if rows[k] >= 0:
                continue
            hashed = mix(np.uint64(wanted[k]))
            row = _row(wanted[k], hashed, slots, ids, bits)
            if row < 0:
                while hint < high and last[hint] != FREE:
                    hint += 1
                row = hint
                hint += 1
                if row == high:
                    high += 1
                at = _home(hashed, len(slots))
                while np.int64(slots[at]) & mask:
                    at += 1
                    if at == len(slots):
                        at = 0
                if slots[at] != _EMPTY:
                    numbers[DEAD] -= 1
                slots[at] = _slot(hashed, row, bits)
                ids[row] = wanted[k]
                last[row] = 0
                new[count] = row
                count += 1
            rows[k] = row
        numbers[HIGH], numbers[HINT] = high, hint
        numbers[LIVE] += count
        return count

    return compiled(insert, None, parallel=False)


@cache
def place() -> Callable:
    """Kernel ``(slots, ids, last, numbers)`` that fills empty slots with all rows."""

    def place(slots, ids, last, numbers):
        bits = numbers[BITS]
        for row in range(numbers[HIGH]):
            if last[row] != FREE:
                hashed = mix(np.uint64(ids[row]))
                at = _home(hashed, len(slots))
                while slots[at] != _EMPTY:
                    at += 1
                    if at == len(slots):
                        at = 0
                slots[at] = _slot(hashed, row, bits)
        numbers[DEAD] = 0

    return compiled(place, None, parallel=False)


@cache
def remove() -> Callable:
    """Kernel ``(gone, slots, ids, last, numbers)`` that frees different rows that have an id."""

    def remove(gone, slots, ids, last, numbers):
        mask = np.int64((1 << numbers[BITS]) - 1)
        for k in range(len(gone)):
            row = gone[k]
            at = _home(mix(np.uint64(ids[row])), len(slots))
            while np.int64(slots[at]) & mask != row + 1:
                at += 1
                if at == len(slots):
                    at = 0
            slots[at] = _GONE
            last[row] = FREE
            numbers[HINT] = min(numbers[HINT], row)
        numbers[DEAD] += len(gone)
        numbers[LIVE] -= len(gone)

    return compiled(remove, None, parallel=False)


@cache
def touch() -> Callable:
    """Kernel ``(rows, counts, last, now, rate)`` that counts a use at `now` of each row.

    Negative rows are left out. A count loses a share of ``1 - exp(-rate)`` with each step.
    """

    def touch(rows, counts, last, now, rate):
        for k in range(len(rows)):
            row = rows[k]
            if row < 0:
                continue
            count = np.float64(counts[row])
            if rate > 0 and last[row] < now:
                count *= math.exp(rate * (np.int64(last[row]) - now))
            counts[row] = min(count + 1, _MOST)
            last[row] = now

    return compiled(touch, None, parallel=False)


@cache
def draw(gaussian: bool) -> Callable:
    """Kernel ``(ids, seed, scale, values)`` that draws a row of numbers for each id.

    They are a function of seed and id alone: standard normal numbers or uniform ones from -1 to 1,
    in float32, times `scale`.
    """

    def draw(ids, seed, scale, values):
        for k in range(len(ids)):
            key = stream_key(seed, ids[k], 0)
            if gaussian:
                start = run(key, 0)
                for i in range(values.shape[1]):
                    values[k, i] = scale * normal(start, i)
            else:
                start = dither_key(key, 0)
                for i in range(values.shape[1]):
                    bits = np.int64(dither_bits(start, i, 0) >> np.uint32(8))
                    values[k, i] = scale * (np.float32(bits - 8388608) * _UNIT)

    return compiled(draw, None, parallel=False)
