"""Tables of tensors: what a kernel launch is told about the arrays that it works on."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import cpu
from fastopt.kernels.rule import Rule

__all__ = ["CHUNK", "PARALLEL_FROM", "chunks", "launch"]

CHUNK = 32_768
"""Elements in one piece of work: 128 KB of float32, so that four arrays stay in a core's cache."""

PARALLEL_FROM = 16_384
"""Elements from which starting threads costs less than it saves."""


@lru_cache(maxsize=1024)
def chunks(size: int, width: int) -> NDArray[np.int64]:
    """Rows ``(tensor, start, size)`` that cut tensor 0 into whole rows of `width` elements."""
    step = max(CHUNK // width, 1) * width
    start = np.arange(0, size, step)
    return np.stack([np.zeros_like(start), start, np.minimum(step, size - start)], axis=1)


Flat = tuple[np.ndarray, ...]
Copies = Sequence[tuple[np.ndarray, np.ndarray]]


def flatten(arrays: Sequence[np.ndarray]) -> tuple[Flat, Copies]:
    """One-dimensional views of `arrays`: the weight, its gradient, and the state.

    An array that is not contiguous and aligned is worked on as a copy; pairs of such an array
    and its copy come second.
    """
    flat, copies = [], []
    for array in arrays:
        if not (array.flags.c_contiguous and array.flags.aligned):
            original, array = array, np.array(array, order="C", subok=False)
            if original is not arrays[1]:
                copies.append((original, array))
        flat.append(np.asarray(array).reshape(-1))
    return tuple(flat), copies


def launch(rule: Rule, flat: Flat, copies: Copies, hyper: tuple[float, ...], key: int = 0) -> None:
    """Apply `rule` in place to what :func:`flatten` returned.

    `hyper` holds the values of ``rule.hyper`` in order; `key` selects the stream of noise.
    """
    size = flat[0].size
    real: Any = flat[0].dtype.type
    if size == 0:
        return
    width = size // flat[2].size if rule.row else 1
    table = np.empty((1, len(flat) + 2), np.uint64)
    cpu.address_table()(table, flat)
    if rule.noise or rule.row:
        table[0, -2:] = key, width
    record = np.empty(1, rule.record(real))
    record[0] = hyper
    pieces = chunks(size, width)
    parallel = size >= PARALLEL_FROM

    for step, count in enumerate(rule.sums):
        partial = np.zeros((len(pieces), count))
        cpu.sums(rule, step, real, parallel)(pieces, table, record, partial)
        cpu.finish(rule, step, real)(pieces, record, partial)
    kernel = cpu.rows if rule.row else cpu.dense
    kernel(rule, real, parallel)(pieces, table, record)

    for original, copy in copies:
        original[...] = copy
