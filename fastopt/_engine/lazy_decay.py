"""Deferred weight decay of rows that recent row-sparse gradients have not indexed."""

import math
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array, label
from fastopt._kernels.device_memory import like, placed


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
