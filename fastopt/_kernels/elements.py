"""Kernel operations on one element, and on the deferred weight decay of one row."""

import math

import numpy as np

from fastopt._kernels.layout import DECAY, PAID, PITCH
from fastopt._kernels.storage import load, locate, locate_bytes, store, store_dithered
from fastopt._kernels.weights import write_weight
from fastopt.kernels.rule import scalar

__all__ = ["gradient", "keep", "keep_state", "missed", "owed", "pay", "row_locator"]

FLOAT64 = (np.float64,)


def row_locator(pitched):
    """Return ``(table, tensor, column, row, width, kinds)``, which returns pointers to a row."""
    return _pitched_row if pitched else _row


@scalar
def _row(table, tensor, column, row, width, kinds):
    return locate(table, tensor, column, row * width, kinds)


@scalar
def _pitched_row(table, tensor, column, row, width, kinds):
    return locate_bytes(table, tensor, column, row * np.int64(table[tensor, PITCH]), kinds)


@scalar
def gradient(grads, i, buffer, k):
    """Return the gradient of an element: `buffer[0, k]`, or element `i` of `grads` if None."""
    if buffer is None:
        return load(grads, i)[0]
    return buffer[0, k]


@scalar
def keep(weights, i, weight, rounding, dither):
    """Write element `i` of a weight, rounded with the random bits of the run `rounding`."""
    if dither is None:
        write_weight(weights, i, weight)
    else:
        first, key = rounding
        store_dithered(weights, i, (weight,), (first, ~key))


@scalar
def keep_state(states, i, state, rounding, draws):
    """Write element `i` of every state slot, rounded with the random bits of the run `rounding`."""
    if draws is None:
        store(states, i, state)
    else:
        store_dithered(states, i, state, rounding)


@scalar
def missed(table, tensor, row):
    """Return the factor of a row's deferred decay, and mark the decay as applied."""
    factor = owed(table, tensor, row)
    pay(table, tensor, row)
    return factor


@scalar
def owed(table, tensor, row):
    """Return the factor of a row's deferred decay."""
    paid = locate(table, tensor, PAID, row, FLOAT64)
    totals = locate(table, tensor, DECAY, 0, FLOAT64)
    return math.exp(load(totals, 0)[0] - load(paid, 0)[0])


@scalar
def pay(table, tensor, row):
    """Mark the deferred decay of a row as applied."""
    paid = locate(table, tensor, PAID, row, FLOAT64)
    store(paid, 0, load(locate(table, tensor, DECAY, 0, FLOAT64), 1))
