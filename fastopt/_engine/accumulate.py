"""Gradient accumulation with the update kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.device_tables import table_of
from fastopt._engine.validate import Array, Grad, check_like, listed, order_of
from fastopt._kernels.device_memory import empty, host, like, placed, zero
from fastopt._kernels.devices import Header, header
from fastopt._kernels.layout import real_of
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.sparse import RowSparse


@rule(hyper=("keep",))
def accumulate(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Add a gradient to a sum, or start a new sum with it."""
    if h.keep:
        return weight + grad, ()
    return grad, ()


def add(context: str, total: Any, grad: Grad, weight: Array, keep: bool) -> tuple[Any, list[Any]]:
    """Add a gradient to a sum; return the new sum, and tables of a device that must be launched.

    The sum of row-sparse gradients is a new row-sparse gradient. Adding a row-sparse gradient to
    a dense sum changes only the indexed rows. A dense gradient makes the sum dense.

    Parameters
    ----------
    context : str
        Label of the parameter.
    total : array, RowSparse or None
        The sum so far.
    grad : array or RowSparse
        The gradient.
    weight : array
        The weight. The sum has its shape and the dtype in which it is updated.
    keep : bool
        Whether to add to `total`. If False, the gradient replaces its contents.
    """
    rows = sum_of_rows(context, total, grad, weight, keep)
    if rows is not None:
        return rows, []
    if isinstance(header(weight), Header):
        total = room(context, total, weight, keep)
        return total, [adding(context, total, grad, keep)]
    real = real_of(weight.dtype)
    dense = grad.astype(real).to_dense() if isinstance(grad, RowSparse) else grad.astype(real)
    total = room(context, total, weight, keep) + dense if keep else dense
    return np.asarray(total), []  # NumPy adds arrays without dimensions to a scalar


def sum_of_rows(context: str, total: Any, grad: Any, weight: Array, keep: bool) -> RowSparse | None:
    """Return the new sum of row-sparse gradients alone; None if the sum is dense.

    See :func:`add`. On a device, the rows of repeated indices are summed by the update.
    """
    if not isinstance(grad, RowSparse) or (keep and not isinstance(total, RowSparse)):
        return None
    of = header(weight)
    real = np.dtype(real_of(of.dtype))
    if isinstance(of, Header):
        before = [placed_rows(total, of)] if keep else []
        return joined_rows(context, [*before, grad], real)
    copied = grad.values.astype(real), grad.indices.copy()
    rows: RowSparse = listed(context, copied, of.shape)
    return total + rows if keep else rows


def placed_rows(rows: RowSparse, of: Header) -> RowSparse:
    """Return row-sparse values on a device."""
    return RowSparse(placed(rows.values, of), rows.indices, rows.shape)


def joined_rows(context: str, grads: Sequence[RowSparse], dtype: np.dtype[Any]) -> RowSparse:
    """Concatenate row-sparse gradients on a device in new arrays; the indices are on the host."""
    counts = [len(header(grad.indices)) for grad in grads]
    shape = (sum(counts), *grads[0].shape[1:])
    values, first = _zeros(header(grads[-1].values), shape, dtype), 0
    for grad, count in zip(grads, counts, strict=True):
        if count:
            adding(context, values[first : first + count], grad.values, keep=False).run()
        first += count
    indices = np.concatenate([host(grad.indices) for grad in grads])
    return listed(context, (values, indices), grads[0].shape)


def _zeros(of: Header, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return zeros on a device, for work on their own stream."""
    array = empty(of, shape, dtype)
    zero(array, header(array).stream)
    return array


def room(context: str, total: Grad | None, weight: Array, keep: bool) -> Any:
    """Return a dense array for a sum; `total` is reused if it fits and preserved if `keep`."""
    of = header(weight)
    if isinstance(total, RowSparse):
        total = _dense(context, total, of) if keep else None
    real = np.dtype(real_of(of.dtype))
    now = header(total)
    if total is None or not (keep or (now.shape == of.shape and now.dtype == real)):
        return like(of, of.shape, real, order_of(of))
    cure = ": call finish() before another weight takes the index, or reset()"
    check_like(context, "the sum of gradients", now, (real.name,), of.shape, hint=cure)
    return placed(total, of)


def _dense(context: str, rows: RowSparse, of: Array) -> Any:
    """Return a sum of row-sparse gradients as a dense array, where the weight is."""
    if not isinstance(of, Header):
        return rows.to_dense()
    dense = _zeros(of, of.shape, rows.dtype)
    adding(context, dense, placed_rows(rows, of), keep=True).run()
    return dense


def adding(context: str, total: Array, grad: Grad, keep: bool) -> Any:
    """Return the table whose launch adds `grad` to `total` on a device.

    Unless `keep`, it overwrites `total`. A row-sparse gradient changes only the indexed rows.
    """
    sparse = isinstance(grad, RowSparse)
    table = table_of(context, accumulate, (header(total),), grad, (), lazy=sparse and keep)
    if isinstance(grad, RowSparse):
        table.list_rows(context, grad.values, grad.indices)
    table.fields[0] = float(keep)
    return table
