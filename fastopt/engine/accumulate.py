"""Sums of gradients, made by the kernels that update."""

from typing import Any

from fastopt.engine.planner import table_of
from fastopt.kernels.devices import header
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.table import Table
from fastopt.sparse import RowSparse

__all__ = ["accumulate", "adding"]


@rule(hyper=("keep",))
def accumulate(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Add a gradient to a sum, or begin a new sum with it."""
    if h.keep:
        return weight + grad, ()
    return grad, ()


def adding(words: str, total: Any, grad: Any, keep: bool) -> Table:
    """Table whose launch adds `grad` to the array `total`; unless `keep`, it takes its place.

    Of a gradient that lists rows, only those are touched.
    """
    sparse = isinstance(grad, RowSparse)
    table = table_of(words, accumulate, (header(total),), grad, (), lazy=sparse)
    if isinstance(grad, RowSparse):
        table.list_rows(words, grad)
    table.fields[0] = float(keep)
    return table
