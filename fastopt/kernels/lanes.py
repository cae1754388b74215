"""Sums in an order that does not depend on the number of threads or the width of vectors."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fastopt.kernels.rule import scalar

__all__ = ["BLOCK", "LANES", "lane_sum", "padded", "put"]

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


def put(buffer, i, values):
    """Write `values` to column `i` of `buffer`, one row for each value."""
    for k, value in enumerate(values):
        buffer[k, i] = value


@overload(put)
def _put(buffer, i, values):
    return lambda buffer, i, values: _put_intrinsic(buffer, i, values)


@intrinsic
def _put_intrinsic(typingctx, buffer, i, values):
    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
        for k, value_type in enumerate(values):
            value = builder.extract_value(args[2], k)
            value = context.cast(builder, value, value_type, buffer.dtype)
            offset = builder.mul(columns, context.get_constant(types.intp, k))
            builder.store(value, builder.gep(array.data, [builder.add(offset, args[1])]))
        return context.get_dummy_value()

    return types.none(buffer, types.intp, values), codegen


LANES = 32
"""Partial sums of :func:`lane_sum`, whatever the width of the machine's vectors."""


def lane_sum(buffer, row, count):
    """Float64 sum of ``buffer[row, :count]``; `count` is a multiple of LANES.

    Element i is added to lane i modulo LANES, then the lanes are added up in halves. Vectors spell
    out that order: a loop with one running sum would not vectorize, and the compiler may not
    change its order.
    """
    lanes = np.zeros(LANES)
    for first in range(0, count, LANES):
        lanes += buffer[row, first : first + LANES]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


@overload(lane_sum)
def _lane_sum(buffer, row, count):
    return lambda buffer, row, count: _lane_sum_intrinsic(buffer, row, count)


@intrinsic
def _lane_sum_intrinsic(typingctx, buffer, row, count):
    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
        first = builder.gep(array.data, [builder.mul(args[1], columns)])
        real = ir.VectorType(context.get_value_type(buffer.dtype), LANES)
        wide = ir.VectorType(ir.DoubleType(), LANES)
        total = cgutils.alloca_once_value(builder, wide(None))
        step = context.get_constant(types.intp, LANES)
        zero = context.get_constant(types.intp, 0)
        with cgutils.for_range_slice(builder, zero, args[2], step, inc=True) as (i, _):
            place = builder.bitcast(builder.gep(first, [i]), real.as_pointer())
            values = builder.load(place, align=buffer.dtype.bitwidth // 8)
            if buffer.dtype == types.float32:
                values = builder.fpext(values, wide)
            builder.store(builder.fadd(builder.load(total), values), total)
        lanes, width = builder.load(total), LANES
        while width > 1:
            width //= 2
            mask = ir.VectorType(ir.IntType(32), width)
            low, high = (
                builder.shuffle_vector(lanes, lanes, ir.Constant(mask, list(half)))
                for half in (range(width), range(width, 2 * width))
            )
            lanes = builder.fadd(low, high)
        return builder.extract_element(lanes, ir.IntType(32)(0))

    return types.float64(buffer, types.intp, types.intp), codegen
