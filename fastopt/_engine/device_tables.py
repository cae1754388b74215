"""Tables of tensors on CUDA devices, from arrays that have been checked.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from typing import Any

import numpy as np

from fastopt._engine.averaging import Averages
from fastopt._engine.mixed_precision import arrays_of, layout_of
from fastopt._engine.parameters import Parameter
from fastopt._engine.validate import check_apart, check_together, roles_of
from fastopt._kernels.cuda_arrays import TensorArrays
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.device_memory import arranged, contiguous, lie_alike, like
from fastopt._kernels.devices import header
from fastopt._kernels.layout import OFFSET, state_kind
from fastopt.kernels.rule import Rule
from fastopt.sparse import RowSparse


def table_of_parameter(
    of: Parameter, weight: Any, grad: Any, state: Any, averages: Averages | None = None
) -> CudaTable:
    """Check the arrays of one tensor, whose gradient has been checked, and create its table."""
    optimizer, copy = of.optimizer, of.copy
    context, rule = of.context, of.rule
    lead = header(weight)
    exact, arrays = arrays_of(optimizer, context, rule, lead, state, copy, of.masters)
    lazy = isinstance(grad, RowSparse) and optimizer.lazy_update and rule.row is None
    after = None
    if averages is not None:
        if lazy and averages.average.alternates:
            after = _whole(averages, of, exact, lead)
        else:
            rule, arrays = averages.derived(context, of.index, rule, exact, arrays)
    table = table_of(
        context,
        rule,
        exact,
        grad,
        arrays,
        lead,
        lazy=lazy,
        catch_up=lazy and optimizer.sparse_decay != "touched",
        rounding=optimizer.rounding,
        copy=copy,
    )
    table.after, table.table[0, OFFSET] = after, of.offset
    if isinstance(grad, RowSparse):
        table.list_rows(context, grad.values, grad.indices)
    return table


def _whole(averages: Averages, of: Parameter, exact: tuple[Any, ...], lead: Any) -> CudaTable:
    """Return a table that averages all rows of a weight after the indexed rows' update."""
    nothing, state = no_rows(lead), (header(averages.array(of.context, of.index, exact)),)
    table = table_of(of.context, averages.average.alone, exact, nothing, state, lead)
    table.list_rows(of.context, nothing.values, nothing.indices)
    table.average_rate = averages.average.rate
    return table


def no_rows(weight: Any) -> RowSparse:
    """Return a row-sparse gradient without rows."""
    empty = like(weight, (0, *weight.shape[1:]), weight.dtype)
    return RowSparse(empty, np.empty(0, np.int64), weight.shape)


def table_of(
    context: str,
    rule: Rule,
    weight: tuple[Any, ...],
    grad: Any,
    state: tuple[Any, ...],
    lead: Any = None,
    **options: Any,
) -> CudaTable:
    """Create the table of one tensor.

    Weight and state whose elements lie in memory in one order are updated as they are, whatever the
    order, if no position matters to the rule; other arrays are copied where they are not
    contiguous.

    Parameters
    ----------
    context : str
        Label of the parameter.
    rule : Rule
        The update rule.
    weight : tuple of Header
        The exact weight, and its half-precision copy or low 16 bits if it has one.
    grad : array or RowSparse
        The gradient.
    state : tuple of Header
        One array for each slot of the rule, each number that the rule keeps for a tensor, and the
        scales of each slot with 8-bit codes.
    lead : Header, optional
        The array whose stream is used. Default: the exact weight.
    **options
        Further arguments of :func:`~fastopt._engine.mixed_precision.layout_of`.

    Raises
    ------
    ValueError
        Arrays share memory, or are on several devices.
    """
    from fastopt._kernels.cuda_driver import entered

    sparse, lead = isinstance(grad, RowSparse), weight[0] if lead is None else lead
    values = header(grad.values if isinstance(grad, RowSparse) else grad)
    arrays, parts = (*weight, *state, values), len(weight)
    named = {"weight": weight[0], "gradient": values, **dict(roles_of(rule, weight, state))}
    check_together(context, named)
    if sparse:
        del named["gradient"]  # list_rows() copies values that lie in a state
    check_apart(context, named)
    layout = layout_of(rule, weight, state, state_kind(values.dtype), sparse=sparse, **options)
    streams = [lead.stream] * (len(arrays) - 1) + [arrays[-1].stream]
    by_position = layout.sparse or layout.keyed or not layout.rule.elementwise
    if not by_position and lie_alike(arrays[:-1]):
        copies = (*arrays[:-1], arranged(arrays[-1], arrays[0], streams[-1]))
    else:
        copies = tuple(map(contiguous, arrays, streams))
    operands = layout, copies[:parts], copies[parts:-1]
    with entered(weight[0].place.device_id):
        part = TensorArrays(*operands, arrays[:-1], lead, arrays[-1], copies[-1])
    return CudaTable([part])
