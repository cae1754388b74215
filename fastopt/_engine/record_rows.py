"""Row-sparse gradients of parameters with records: loops, forms, and deferred weight decay.

Tests: ``tests/engine/test_records.py``.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array, label
from fastopt._kernels import record_words as w
from fastopt._kernels.device_memory import like, placed
from fastopt._kernels.devices import header
from fastopt._kernels.layout import APPLIED, DECAY, Layout
from fastopt._kernels.numpy_abi import C_ORDER, kind_word

ATTRIBUTES = "values", "indices", "shape"
"""Attributes of a RowSparse that compiled code reads."""


def integer_words() -> list[int]:
    """Return dtype and size of each kind of row indices; the sizes of signed ones are negative."""
    dtypes = map(np.dtype, "bhilqBHILQ")
    return [n for d in dtypes for n in (kind_word(d), -d.itemsize if d.kind == "i" else d.itemsize)]


def updates_rows(optimizer: OptimizerLike, layout: Layout) -> bool:
    """Whether row-sparse gradients update the indexed rows alone."""
    return bool(optimizer.lazy_update and layout.rule.row is None)


def row_layout(
    context: str, optimizer: OptimizerLike, layout: Layout, record: Array
) -> Layout | None:
    """Return the layout of row-sparse gradients of a record; None if it has another order.

    `layout` is that of dense gradients.
    """
    lazy = updates_rows(optimizer, layout)
    if record[w.ORDER] != C_ORDER or record[w.NDIMS] == 0:
        return None
    if layout.coded and record[w.NDIMS] < 2:
        raise TypeError(
            f"{context}: state in 8 bits of a weight of one dimension needs a dense gradient, as "
            "its blocks are not those of rows"
        )
    deferred = lazy and optimizer.sparse_decay != "touched"
    return replace(layout, sparse=True, lazy=lazy, catch_up=deferred)


def decayed(
    optimizer: OptimizerLike, index: Index, before: float, t: int, lr: float, wd: float
) -> float:
    """Return the accumulated decay after step `t`.

    Raises
    ------
    ValueError
        Learning rate times weight decay is 1 or more.
    """
    amount = optimizer.decay(t, lr, wd)
    if not amount < 1:
        raise ValueError(
            f"{label(index, optimizer.idx2name)}: sparse_decay={optimizer.sparse_decay!r} needs "
            f"rate times decay below 1, got {amount}"
        )
    return before + math.log1p(-amount)


def decay_of(optimizer: OptimizerLike, index: Index, weight: Array) -> tuple[Any, float]:
    """Return the decay applied to each row and the accumulated decay, as sums of logarithms.

    Raises
    ------
    ValueError, TypeError
        The stored decay does not belong to a weight with that many rows.
    """
    count = len(weight)
    rows, total = optimizer.row_decay.get(index) or (like(weight, (count,), np.float64), 0.0)
    if rows.shape != (count,) or rows.dtype != np.float64:
        raise ValueError(
            f"{label(index, optimizer.idx2name)}: decay is kept for rows of shape {rows.shape} and "
            f"dtype {rows.dtype}, the weight has {count} rows"
        )
    return placed(rows, weight) if isinstance(rows, np.ndarray) else rows, total


class Deferred:
    """Deferred decay of a parameter with a record.

    Parameters
    ----------
    record : numpy.ndarray
        The record.
    """

    def __init__(self, record: Array) -> None:
        self.totals, self.rows = np.zeros(2), None
        first = (int(record[w.ROW]) - record.ctypes.data) // 8
        self.row = record[first:]
        self.row[DECAY] = self.totals.ctypes.data

    def begin(
        self, optimizer: OptimizerLike, index: Index, weight: Array, t: int, lr: float, wd: float
    ) -> tuple[Any, float]:
        """Enter the decay of step `t`; return the optimizer's ``row_decay`` after it."""
        rows, before = decay_of(optimizer, index, weight)
        after = decayed(optimizer, index, before, t, lr, wd)
        self.enter(rows, before, after)
        return rows, after

    def enter(self, rows: Any, before: float, after: float) -> Any:
        """Enter the decay of each row, and that of all rows before and after a step."""
        if rows is not self.rows:
            self.rows = rows
            self.row[APPLIED] = rows.ctypes.data
        self.totals[:] = before, after
        return self.row


class DeferredDecay:
    """Deferred decay of a parameter on a device."""

    def __init__(self) -> None:
        self.now: tuple[Any, float, float, bool] = None, 0.0, 0.0, False
        """Decay applied to each row, that of all before and after the step, and whether at once."""

    def begin(
        self, optimizer: OptimizerLike, index: Index, weight: Any, t: int, lr: float, wd: float
    ) -> tuple[Any, float]:
        """Note the decay of step `t`; return the optimizer's ``row_decay`` after it."""
        rows, before = decay_of(optimizer, index, header(weight))
        after = decayed(optimizer, index, before, t, lr, wd)
        self.now = rows, before, after, optimizer.sparse_decay == "dense"
        return rows, after
