"""Kernel operations on one element, and on the deferred weight decay of one row.

Tests: ``tests/kernels/test_cpu.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fastopt._kernels.layout import APPLIED, DECAY, PITCH, Layout
from fastopt._kernels.noise import normal
from fastopt._kernels.storage import checked, load, locate, locate_bytes, store, store_dithered
from fastopt._kernels.weights import write_weight
from fastopt.kernels.rule import scalar

FLOAT64 = (np.float64,)


def element_step(layout: Layout) -> Callable[..., Any]:
    """Return ``(weight, grad, state, h, factor, beside, i)``, which applies a rule to an element.

    It returns the new weight and state. `factor` is that of the row's deferred decay. `beside` is
    the rule's argument after the hyper-parameters: the run whose normal number `i` is the noise, or
    the mean of a row's terms.
    """
    update: Any = layout.rule.fn
    noise, by_row, slots = layout.rule.noise, bool(layout.rule.row), len(layout.rule.state)
    catch_up = layout.catch_up

    def step(weight, grad, state, h, factor, beside, i):
        if catch_up:
            weight = weight * factor
        if noise:
            return checked(update(weight, grad, state, h, normal(beside, i)), slots)
        if by_row:
            return checked(update(weight, grad, state, h, beside), slots)
        return checked(update(weight, grad, state, h), slots)

    return scalar(step)


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


def row_split(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that join and split the state of an element under a rule with `row`.

    ``join(cells, i, state)`` returns the numbers of element `i` followed by those of its row;
    ``split(cells, i, new, rounding, draws)`` stores the former and returns the latter.
    """
    count = len(layout.split_state[0])
    if not count:
        return scalar(_of_row), scalar(_kept_of_row)

    def join(cells, i, state):
        return load(cells, i) + state

    def split(cells, i, new, rounding, draws):
        keep_state(cells, i, new[:count], rounding, draws)
        return new[count:]

    return scalar(join), scalar(split)


def _of_row(cells, i, state):
    return state


def _kept_of_row(cells, i, new, rounding, draws):
    return new


@scalar
def take_decay(table, tensor, row):
    """Return the factor of a row's deferred decay, and mark the decay as applied."""
    factor = pending_decay(table, tensor, row)
    mark_applied(table, tensor, row)
    return factor


@scalar
def pending_decay(table, tensor, row):
    """Return the factor of a row's deferred decay."""
    applied = locate(table, tensor, APPLIED, row, FLOAT64)
    totals = locate(table, tensor, DECAY, 0, FLOAT64)
    return math.exp(load(totals, 0)[0] - load(applied, 0)[0])


@scalar
def mark_applied(table, tensor, row):
    """Mark the deferred decay of a row as applied."""
    applied = locate(table, tensor, APPLIED, row, FLOAT64)
    store(applied, 0, load(locate(table, tensor, DECAY, 0, FLOAT64), 1))
