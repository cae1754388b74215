"""Update counts, bias corrections and random keys of one step, for all tensors of a launch.

Hyper-parameters are float64 until they are rounded to the dtype of the arithmetic. Tensors with
equal learning rate, weight decay and multipliers form a group, whose values are computed once.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numba import types

from fastopt._kernels.compiling import compiled
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.layout import DONE, KEY
from fastopt._kernels.noise import stream_key
from fastopt.kernels.rule import scalar

COUNT, GROUP, CARRIED, NUMBER, SEED, SLOTS = range(6)
"""Columns of ``slots``, which has a row for each tensor: position of its update count (-1 if it is
not counted), its group, position of the number that it carries from step to step, and the index
number and seed of its random numbers."""


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
def advance(
    table: Any,
    arrays: Any,
    correct: Any,
    dtype: Any,
    carries: Any,
    keyed: Any,
    rescale: Any,
) -> Any:
    """Count one update of every tensor and write the hyper-parameters of the step.

    Parameters
    ----------
    table : numpy.ndarray
        Arguments of the kernels, see :mod:`fastopt._kernels.layout`.
    arrays : tuple of numpy.ndarray
        In order: the hyper-parameters of each tensor, written in the dtype of the arithmetic; the
        ``slots``, a row for each tensor; the update counts, the first of which is the largest of
        all; the hyper-parameters of each group in two tables, uncorrected with the factor of the
        gradients in the last column, and corrected with their step in the last column; and the
        numbers that tensors carry from step to step.
    correct : callable or None
        ``correct(t, h, carried)`` writes the fields of `h` that depend on the step.
    dtype : numpy.dtype
        Dtype of `h`, in float64.
    carries : bool
        Whether `correct` depends on a number that a tensor carries.
    keyed : bool
        Whether random numbers are drawn.
    rescale : int
        Position of ``rescale_grad`` in the fields; -1 without it.
    """
    fields, slots, counts, groups, carried = arrays
    table[0, DONE] = 0
    for k in range(len(slots)):
        t = count(slots, counts, k)
        if correct is not None and renewed(groups, slots[k, GROUP], t, carries):
            h = record_of(groups, slots[k, GROUP], dtype)
            correct(np.float64(t), h, carried_by(carried, slots, k))
        group, source = slots[k, GROUP], np.int64(correct is not None)
        factor = groups[0, group, groups.shape[2] - 1]
        hand_over(fields, k, groups, source, group, factor, rescale)
        if keyed:
            table[k, KEY] = stream_key(slots[k, SEED], slots[k, NUMBER], t)


@cache
def advance_kernel(rescale: int, keyed: bool, correct: Any, dtype: Any, carries: bool) -> Callable:
    """CPU kernel of :func:`advance`: ``(table, fields, slots, counts, groups, carried)``."""

    def begin(table, fields, slots, counts, groups, carried):
        arrays = fields, slots, counts, groups, carried
        advance(table, arrays, correct, dtype, carries, keyed, rescale)

    return compiled(begin, None, parallel=False, nogil=False, also=(correct,))


@scalar
def advance_one(
    table: Any,
    arrays: Any,
    k: Any,
    factor: Any,
    correct: Any,
    dtype: Any,
    keyed: Any,
    rescale: Any,
) -> Any:
    """Like :func:`advance` for tensor `k` alone, with arrays of which each tensor has its own row.

    Its update count and the number that it carries are in row `k`, and so are its corrected
    hyper-parameters: threads that advance other tensors do not meet this one.
    """
    fields, slots, counts, groups, carried = arrays
    group, source = slots[k, GROUP], np.int64(correct is not None)
    t = counts[k] + 1
    counts[k] = t
    row = group
    if correct is not None:
        row = k
        for f in range(groups.shape[2]):
            groups[1, k, f] = groups[0, group, f]
        correct(np.float64(t), record_of(groups, k, dtype), carried[k : k + 1])
    hand_over(fields, k, groups, source, row, factor, rescale)
    if keyed:
        table[k, KEY] = stream_key(slots[k, SEED], slots[k, NUMBER], t)


# The following functions do not depend on the rule, so they are compiled once for all rules.


@scalar
def count(slots: Any, counts: Any, k: Any) -> Any:
    """Count an update of tensor `k`; return its count, or 0 if it is not counted."""
    slot = slots[k, COUNT]
    if slot < 0:
        return np.int64(0)
    t = counts[slot] + 1
    counts[slot] = t
    counts[0] = max(counts[0], t)
    return t


@scalar
def renewed(groups: Any, group: Any, t: Any, carries: Any) -> Any:
    """Whether a group must be corrected for count `t`; if so, reset its uncorrected fields."""
    stamp = groups.shape[2] - 1
    if groups[1, group, stamp] == t and not carries:
        return False
    for f in range(stamp):
        groups[1, group, f] = groups[0, group, f]
    groups[1, group, stamp] = t
    return True


@scalar
def carried_by(carried: Any, slots: Any, k: Any) -> Any:
    """Return an array of the one number that tensor `k` carries."""
    place = slots[k, CARRIED]
    return carried[place : place + 1]


@scalar
def hand_over(
    fields: Any, k: Any, groups: Any, source: Any, row: Any, factor: Any, rescale: Any
) -> Any:
    """Write the fields of tensor `k`, uncorrected or corrected, with the factor of its gradient."""
    for f in range(fields.shape[1]):
        fields[k, f] = groups[source, row, f]
    if rescale >= 0:
        fields[k, rescale] = groups[source, row, rescale] * factor


def step(
    t: float, fields: Mapping[str, float], correct: Callable[..., None], carried: Any
) -> dict[str, float]:
    """Return the corrected fields of one step, in plain Python; see :func:`advance`."""
    values = Fields()
    vars(values).update(fields)
    correct(float(t), values, carried)
    return vars(values)


class Fields:
    """Hyper-parameters as attributes."""
