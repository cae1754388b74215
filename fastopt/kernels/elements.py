"""What kernels do with one element, or with one row's decay."""

import math

import numpy as np

from fastopt.kernels.layout import DECAY, PAID, PITCH
from fastopt.kernels.rule import scalar
from fastopt.kernels.storage import load, locate, locate_bytes, store, store_dithered
from fastopt.kernels.weights import write_weight

__all__ = ["gradient", "keep", "keep_state", "missed", "owed", "pay", "row_locator"]

FLOAT64 = (np.float64,)


def row_locator(pitched):
    """Function ``(table, tensor, column, row, width, kinds)`` that returns pointers to a row."""
    return _pitched_row if pitched else _row


@scalar
def _row(table, tensor, column, row, width, kinds):
    return locate(table, tensor, column, row * width, kinds)


@scalar
def _pitched_row(table, tensor, column, row, width, kinds):
    return locate_bytes(table, tensor, column, row * np.int64(table[tensor, PITCH]), kinds)


@scalar
def gradient(grads, i, buffer, k):
    """Gradient of an element: `k` of the buffer, or `i` behind the pointer if there is none."""
    if buffer is None:
        return load(grads, i)[0]
    return buffer[0, k]


@scalar
def keep(weights, i, weight, key, place, dither):
    """Write element `i` of a weight, which is element `place` of the tensor."""
    if dither is None:
        write_weight(weights, i, weight)
    else:
        store_dithered(weights, i, (weight,), ~key, place)


@scalar
def keep_state(states, i, state, key, place, draws):
    """Write element `i` of every state slot, which is element `place` of the tensor."""
    if draws is None:
        store(states, i, state)
    else:
        store_dithered(states, i, state, key, place)


@scalar
def missed(table, tensor, row):
    """Factor of the decay that a row has missed; it counts as made up for."""
    factor = owed(table, tensor, row)
    pay(table, tensor, row)
    return factor


@scalar
def owed(table, tensor, row):
    """Factor of the decay that a row has missed."""
    paid = locate(table, tensor, PAID, row, FLOAT64)
    totals = locate(table, tensor, DECAY, 0, FLOAT64)
    return math.exp(load(totals, 0)[0] - load(paid, 0)[0])


@scalar
def pay(table, tensor, row):
    """Count the decay that a row has missed as made up for."""
    paid = locate(table, tensor, PAID, row, FLOAT64)
    store(paid, 0, load(locate(table, tensor, DECAY, 0, FLOAT64), 1))
