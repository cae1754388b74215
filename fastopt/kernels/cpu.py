"""CPU kernels: factories that turn a rule into compiled loops over a table of tensors.

Every kernel takes the same three arrays (see :mod:`fastopt.kernels.table`): ``chunks`` with a row
``(tensor, start, size)`` for each piece of work, ``table`` with a row of addresses for each tensor,
and ``hyper`` with a record for each tensor.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, prange

from fastopt.kernels.noise import normal
from fastopt.kernels.rule import Rule, scalar
from fastopt.kernels.storage import (
    LANES,
    checked,
    enter,
    fits,
    lane_sum,
    load,
    locate,
    private,
    put,
    store,
)
from fastopt.kernels.threads import prefer_tbb

__all__ = ["admit", "dense", "finish", "rows", "sums"]

log = logging.getLogger("fastopt")

BLOCK = 1024
"""Terms of a sum that are computed before they are added up; a multiple of LANES."""


@scalar
def padded(buffer, count):
    """Fill the rows of `buffer` with zeros from `count` to a multiple of LANES, and return that."""
    whole = (count + LANES - 1) // LANES * LANES
    for k in range(len(buffer)):
        for i in range(count, whole):
            buffer[k, i] = 0
    return whole


@cache
def dense(rule: Rule, real: Any, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` that applies `rule` to every element in place."""
    update, noise = rule.fn, rule.noise
    slots = len(rule.state)
    memory = (real,) * (2 + slots)
    key = len(memory)

    def dense(chunks, table, hyper):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            pointers = locate(table, tensor, 0, start, memory)
            h = private(hyper, tensor)
            for i in range(size):
                weight, grad = load(pointers[:2], i)
                state = load(pointers[2:], i)
                if noise:
                    drawn = normal(table[tensor, key], start + i)
                    weight, state = checked(update(weight, grad, state, h, drawn), slots)
                else:
                    weight, state = checked(update(weight, grad, state, h), slots)
                store(pointers[:1], i, (weight,))
                store(pointers[2:], i, state)

    return _compile(dense, rule, parallel)


@cache
def sums(rule: Rule, step: int, real: Any, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper, partial)`` that adds up pass `step` of `rule` per chunk."""
    terms, count = rule.passes[step][0], rule.sums[step]
    memory = (real,) * (2 + len(rule.state))

    def sums(chunks, table, hyper, partial):
        for c in prange(len(chunks)):
            tensor, start, size = chunks[c, 0], chunks[c, 1], chunks[c, 2]
            pointers = locate(table, tensor, 0, start, memory)
            h = private(hyper, tensor)
            buffer = np.empty((count, BLOCK), real)
            for first in range(0, size, BLOCK):
                n = min(BLOCK, size - first)
                for i in range(n):
                    weight, grad = load(pointers[:2], first + i)
                    state = load(pointers[2:], first + i)
                    put(buffer, i, terms(weight, grad, state, h))
                n = padded(buffer, n)
                for k in range(count):
                    partial[c, k] += lane_sum(buffer, k, n)

    return _compile(sums, rule, parallel)


@cache
def finish(rule: Rule, step: int, real: Any) -> Callable:
    """Kernel ``(chunks, hyper, partial)`` that ends pass `step`: totals in order of the chunks."""
    fill, count = rule.passes[step][1], rule.sums[step]

    def finish(chunks, hyper, partial):
        first = 0
        for tensor in range(len(hyper)):
            total = np.zeros(count)
            while first < len(chunks) and chunks[first, 0] == tensor:
                total += partial[first]
                first += 1
            fill(total, hyper[tensor])

    return _compile(finish, rule, parallel=False)


@cache
def rows(rule: Rule, real: Any, parallel: bool) -> Callable:
    """Kernel ``(chunks, table, hyper)`` for rules with one state number for each row."""
    update: Any = rule.fn
    row: Any = rule.row
    slots = len(rule.state)
    memory, by_row = (real, real), (real,) * slots
    width_column = len(memory) + slots + 1

    def rows(chunks, table, hyper):
        for k in prange(len(chunks)):
            tensor, start, size = chunks[k, 0], chunks[k, 1], chunks[k, 2]
            width: Any = np.int64(table[tensor, width_column])
            h = private(hyper, tensor)
            buffer = np.empty((1, BLOCK), real)
            for first in range(start, start + size, width):
                elements = locate(table, tensor, 0, first, memory)
                states = locate(table, tensor, 2, first // width, by_row)
                total = 0.0
                for begin in range(0, width, BLOCK):
                    n = min(BLOCK, width - begin)
                    for i in range(n):
                        put(buffer, i, (row(load(elements, begin + i)[1], h),))
                    total += lane_sum(buffer, 0, padded(buffer, n))
                mean = real(total / width)
                state = new = load(states, 0)
                for i in range(width):
                    weight, grad = load(elements, i)
                    weight, new = checked(update(weight, grad, state, h, mean), slots)
                    store(elements[:1], i, (weight,))
                store(states, 0, new)

    return _compile(rows, rule, parallel)


@cache
def admit() -> Callable:
    """Kernel ``(table, weight, grad, state, by_row)`` that enters a tensor into row 0 of `table`.

    Returns the weight's size if the arrays, all of the weight's dtype, can be worked on where they
    are and none overlaps another; if not, -1.
    """

    def admit(table, weight, grad, state, by_row):
        enter(table, 0, (weight, grad, *state))
        # The last column of a table holds the number of elements in a row.
        size = np.uint64(weight.nbytes)
        state_size = size // max(table[0, table.shape[1] - 1], np.uint64(1))
        for k in range(2 + len(state)):
            end = table[0, k] + (size if k < 2 else state_size)
            for other in range(k):
                begin = table[0, other]
                if begin < end and table[0, k] < begin + (size if other < 2 else state_size):
                    return -1
        return weight.size if fits(weight, grad, state, by_row) else -1

    return _compile(admit, None, parallel=False)


def _compile(kernel: Callable, rule: Rule | None, parallel: bool) -> Callable:
    """Compile `kernel` on first use, from numba's disk cache where possible.

    Numba's cache notices a change of the file that holds the kernel, but not of the files that hold
    the rule and the functions that it calls. Their digest becomes part of the name of the cache
    entry.
    """
    threads = "parallel" if parallel else "serial"
    name, digest = (rule.name, rule.digest) if rule else ("any", "")
    kernel.__qualname__ = f"{kernel.__name__}.{name}.{threads}.{digest}{_engine_digest()}"
    if parallel:
        prefer_tbb()
    options = {"parallel": parallel, "error_model": "numpy", "nogil": True}
    try:
        return njit(cache=True, **options)(kernel)
    except RuntimeError:
        _log_uncached()
        return njit(**options)(kernel)


@cache
def _engine_digest() -> str:
    text = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(text)).hexdigest()[:16]


@cache
def _log_uncached() -> None:
    log.info(
        "kernels are compiled anew in every process: no cache directory can be written; "
        "set NUMBA_CACHE_DIR to one that can"
    )
