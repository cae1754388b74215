"""Tables of tensors: what a kernel launch is told about the arrays that it works on."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import cpu
from fastopt.kernels.rule import Rule

__all__ = ["CHUNK", "PARALLEL_FROM", "Row", "chunks", "enter", "launch"]

CHUNK = 32_768
"""Elements in one piece of work: 128 KB of float32, so that four arrays stay in a core's cache."""

PARALLEL_FROM = 16_384
"""Elements from which starting threads costs less than it saves."""


class Row(NamedTuple):
    """One tensor to update.

    `arrays` are the weight, its gradient and the state, `entry` their row of a table, or None if
    they are not contiguous and aligned and must be worked on as copies. `hyper` holds the values
    of ``rule.hyper`` in order, and `key` selects the stream of noise.
    """

    rule: Rule
    arrays: Sequence[np.ndarray]
    entry: NDArray[np.uint64] | None
    hyper: tuple[float, ...]
    key: int = 0


def enter(rule: Rule, arrays: Sequence[np.ndarray]) -> NDArray[np.uint64] | None:
    """Entry of one tensor, or None if its arrays need a closer look.

    `arrays` are the weight, its gradient and the state, all of the weight's dtype.
    """
    entry = np.empty((1, len(arrays) + 2), np.uint64)
    fits = cpu.admit()(entry, arrays[0], arrays[1], arrays[2:], rule.row is not None)
    return entry if fits else None


def launch(rows: Sequence[Row]) -> None:
    """Update the tensors of `rows` in place, with the result of one after the other.

    Tensors with equal rule and dtype share a kernel launch, unless tensors share memory.
    """
    if len(rows) > 1 and _disjoint(rows):
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            groups.setdefault((row.rule, row.arrays[0].dtype), []).append(row)
        for group in groups.values():
            _run(group, np.concatenate([row.entry for row in group]))
        return
    for row in rows:
        if row.entry is None:
            _run_on_copies(row)
        else:
            _run([row], row.entry)


def _run(rows: Sequence[Row], table: NDArray[np.uint64]) -> None:
    """Launch the kernels on rows with equal rule and dtype."""
    rule, arrays = rows[0][:2]
    real: Any = arrays[0].dtype.type
    records = np.empty(len(rows), rule.record(real))
    shapes = []
    for i, (_, arrays, _, hyper, key) in enumerate(rows):
        records[i] = hyper
        size, width = arrays[0].size, 1
        if rule.row:
            width = size // max(arrays[2].size, 1)
        if rule.row or rule.noise:
            table[i, -2:] = key, width
        shapes.append((size, width))
    pieces, total = chunks(tuple(shapes))
    if not total:
        return
    parallel = total >= PARALLEL_FROM
    for step, count in enumerate(rule.sums):
        partial = np.zeros((len(pieces), count))
        cpu.sums(rule, step, real, parallel)(pieces, table, records, partial)
        cpu.finish(rule, step, real)(pieces, records, partial)
    kernel = cpu.rows if rule.row else cpu.dense
    kernel(rule, real, parallel)(pieces, table, records)


def _run_on_copies(row: Row) -> None:
    """Update copies of a row's arrays, then the arrays."""
    copies = tuple([np.array(array, order="C", subok=False) for array in row.arrays])
    entry = enter(row.rule, copies)
    assert entry is not None
    _run([row._replace(arrays=copies)], entry)
    for k, (array, copy) in enumerate(zip(row.arrays, copies, strict=True)):
        if k != 1:  # the gradient
            array[...] = copy


@lru_cache(maxsize=1024)
def chunks(shapes: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.int64], int]:
    """Cut tensors of ``(size, width)`` between their rows into pieces of work.

    Returns an array with a row ``(tensor, start, size)`` for each piece, and the sum of the sizes.
    """
    pieces = [np.empty((0, 3), np.int64)]
    for tensor, (size, width) in enumerate(shapes):
        step = max(CHUNK // width, 1) * width if width else 1
        start = np.arange(0, size, step)
        sizes = np.minimum(step, size - start)
        pieces.append(np.stack([np.full_like(start, tensor), start, sizes], axis=1))
    return np.concatenate(pieces), sum(size for size, _ in shapes)


def _disjoint(rows: Sequence[Row]) -> bool:
    """Whether all rows have entries and no two of their arrays share memory."""
    entries = [row.entry[0, :-2] for row in rows if row.entry is not None]
    if len(entries) < len(rows):
        return False
    start = np.concatenate(entries)
    sizes = [array.nbytes for row in rows for array in row.arrays]
    end = start + np.array(sizes, np.uint64)
    order = np.argsort(start)
    return bool((end[order][:-1] <= start[order][1:]).all())
