"""Update counts, bias corrections and random keys of a step that a device counts.

Hyper-parameters are float64 until they are rounded to the dtype of the arithmetic. Tensors with
equal learning rate, weight decay and multipliers form a group.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import types

from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.layout import KEY
from fastopt._kernels.noise import stream_key
from fastopt.kernels.rule import scalar

GROUP, NUMBER, SEED, SLOTS = range(4)
"""Columns of ``slots``, which has a row for each tensor: its group, and the index number and seed
of its random numbers."""


@intrinsic
def record_of(typingctx: Any, groups: Any, group: Any, dtype: Any) -> Any:
    """Return the corrected hyper-parameters of a group as a writeable record."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        shape = [builder.extract_value(array.shape, k) for k in range(3)]
        row = builder.add(shape[1], args[1])  # in the second table, of corrected values
        first = builder.gep(array.data, [builder.mul(row, shape[2])])
        return builder.bitcast(first, context.get_value_type(signature.return_type))

    return dtype.dtype(groups, types.intp, dtype), codegen


@scalar
def advance_one(table, arrays, k, factor, correct, dtype, keyed, rescale):
    """Count an update of tensor `k` on a device, and write the hyper-parameters of the step.

    Each tensor has its own rows, so that threads that advance other tensors do not meet this one.

    Parameters
    ----------
    table : array
        Arguments of the kernels, see :mod:`fastopt._kernels.layout`.
    arrays : tuple of array
        In order: the hyper-parameters of each tensor, written in the dtype of the arithmetic; the
        ``slots``, a row for each tensor; their update counts; the hyper-parameters of each group
        before the correction, and of each tensor after it; and the numbers that tensors carry from
        step to step.
    k : int
        The tensor.
    factor : float
        Factor of its gradient.
    correct : callable or None
        ``correct(t, h, carried)`` writes the fields of `h` that depend on the step.
    dtype : numpy.dtype
        Dtype of `h`, in float64.
    keyed : bool
        Whether random numbers are drawn.
    rescale : int
        Position of ``rescale_grad`` in the fields; -1 without it.
    """
    fields, slots, counts, groups, carried = arrays
    row, source = slots[k, GROUP], np.int64(correct is not None)
    t = counts[k] + 1
    counts[k] = t
    if correct is not None:
        for f in range(groups.shape[2]):
            groups[1, k, f] = groups[0, row, f]
        row = k
        correct(np.float64(t), record_of(groups, k, dtype), carried[k : k + 1])
    for f in range(fields.shape[1]):
        fields[k, f] = groups[source, row, f]
    if rescale >= 0:
        fields[k, rescale] = groups[source, row, rescale] * factor
    if keyed:
        table[k, KEY] = stream_key(slots[k, SEED], slots[k, NUMBER], t)


def step(
    t: float, fields: Mapping[str, float], correct: Callable[..., None], carried: Any
) -> dict[str, float]:
    """Return the corrected fields of one step, in plain Python."""
    values = SimpleNamespace(**fields)
    correct(float(t), values, carried)
    return vars(values)
