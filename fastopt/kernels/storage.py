"""Numbers in memory: typed pointers, loads and stores for use inside kernels.

Each function has a body for plain Python (used when ``NUMBA_DISABLE_JIT=1``) and an overload that
compiles to bare loads and stores: pointers have no reference counts and no strides, which is what
lets the loops around them vectorize.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = [
    "LANES",
    "checked",
    "enter",
    "fits",
    "lane_sum",
    "load",
    "locate",
    "private",
    "put",
    "store",
]


def locate(table, row, column, start, memory):
    """Pointers to element `start` of the arrays with addresses at ``table[row, column:]``.

    `memory` is a tuple with the scalar type of each array.
    """
    pointers = []
    for k, real in enumerate(memory):
        address = int(table[row, column + k]) + int(start) * np.dtype(real).itemsize
        pointers.append(ctypes.cast(address, ctypes.POINTER(np.ctypeslib.as_ctypes_type(real))))
    return tuple(pointers)


@overload(locate)
def _locate(table, row, column, start, memory):
    return lambda table, row, column, start, memory: _locate_intrinsic(
        table, row, column, start, memory
    )


@intrinsic
def _locate_intrinsic(typingctx, table, row, column, start, memory):
    pointers = types.Tuple([types.CPointer(real.dtype) for real in memory])

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
        first = builder.add(builder.mul(args[1], columns), args[2])
        located = []
        for k, pointer in enumerate(pointers):
            entry = builder.add(first, context.get_constant(types.intp, k))
            address = builder.load(builder.gep(array.data, [entry]))
            base = builder.inttoptr(address, context.get_value_type(pointer))
            located.append(builder.gep(base, [args[3]]))
        return context.make_tuple(builder, pointers, located)

    return pointers(table, types.intp, types.intp, types.intp, memory), codegen


def private(records, i):
    """Record `i`, in registers: no store in a loop can be suspected of changing it."""
    return records[i]


@overload(private, inline="always")
def _private(records, i):
    return lambda records, i: _private_intrinsic(records, i)


@intrinsic
def _private_intrinsic(typingctx, records, i):
    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        copy = cgutils.alloca_once(builder, array.data.type.pointee)
        size = context.get_constant(types.intp, records.dtype.size)
        cgutils.raw_memcpy(builder, copy, builder.gep(array.data, [args[1]]), size, 1)
        return copy

    return records.dtype(records, types.intp), codegen


def load(pointers, i):
    """Element `i` behind each pointer, as a tuple."""
    return tuple(np.dtype(p._type_).type(p[i]) for p in pointers)


@overload(load)
def _load(pointers, i):
    return lambda pointers, i: _load_intrinsic(pointers, i)


@intrinsic
def _load_intrinsic(typingctx, pointers, i):
    values = types.Tuple([pointer.dtype for pointer in pointers])

    def codegen(context, builder, signature, args):
        loaded = [
            builder.load(builder.gep(pointer, [args[1]]))
            for pointer in cgutils.unpack_tuple(builder, args[0], len(pointers))
        ]
        return context.make_tuple(builder, values, loaded)

    return values(pointers, types.intp), codegen


def checked(result, slots):
    """Return what a rule returned, if it is a weight and a tuple of `slots` numbers."""
    return result


@overload(checked, prefer_literal=True)
def _checked(result, slots):
    good = isinstance(result, types.BaseTuple) and len(result) == 2
    good = good and isinstance(result[1], types.BaseTuple) and len(result[1]) == slots.literal_value
    numbers = (result[0], *result[1]) if good else ()
    if not good or not all(isinstance(n, (types.Number, types.Boolean)) for n in numbers):
        # Not numba's TypingError: that would end in a page of its attempts.
        raise TypeError(
            f"it must return (new_weight, new_state) in every branch, with {slots.literal_value} "
            f"numbers in the tuple new_state, but returns {result}"
        )
    return lambda result, slots: result


def store(pointers, i, values):
    """Write `values` to element `i` behind each pointer, rounded to its type."""
    for pointer, value in zip(pointers, values, strict=True):
        pointer[i] = value


@overload(store)
def _store(pointers, i, values):
    return lambda pointers, i, values: _store_intrinsic(pointers, i, values)


@intrinsic
def _store_intrinsic(typingctx, pointers, i, values):
    def codegen(context, builder, signature, args):
        _, _, value_types = signature.args
        for k, pointer in enumerate(pointers):
            value = builder.extract_value(args[2], k)
            value = context.cast(builder, value, value_types[k], pointer.dtype)
            target = builder.extract_value(args[0], k)
            builder.store(value, builder.gep(target, [args[1]]))
        return context.get_dummy_value()

    return types.none(pointers, types.intp, values), codegen


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


def enter(table, row, arrays):
    """Write the address of each array into row `row` of `table`."""
    for k, array in enumerate(arrays):
        table[row, k] = array.ctypes.data


@overload(enter)
def _enter(table, row, arrays):
    return lambda table, row, arrays: _enter_intrinsic(table, row, arrays)


@intrinsic
def _enter_intrinsic(typingctx, table, row, arrays):
    def codegen(context, builder, signature, args):
        out = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, out.shape, 2)[1]
        first = builder.mul(args[1], columns)
        for k, array_type in enumerate(arrays):
            value = builder.extract_value(args[2], k)
            array = context.make_array(array_type)(context, builder, value)
            address = builder.ptrtoint(array.data, context.get_value_type(types.uint64))
            entry = builder.add(first, context.get_constant(types.intp, k))
            builder.store(address, builder.gep(out.data, [entry]))
        return context.get_dummy_value()

    return types.none(table, types.intp, arrays), codegen


def fits(weight, grad, state, by_row):
    """Whether the arrays of a tensor can be worked on where they are.

    They must be contiguous, aligned, of one shape (`by_row`: a two-dimensional state with one
    number for each row), and but for the gradient not read-only.
    """
    arrays = (weight, grad, *state)
    shape = (len(weight), 1) if by_row else weight.shape
    return (
        all(array.flags.c_contiguous and array.flags.aligned for array in arrays)
        and all(array.flags.writeable for array in (weight, *state))
        and weight.shape == grad.shape
        and all(array.shape == shape for array in state)
    )


@overload(fits)
def _fits(weight, grad, state, by_row):
    arrays = (weight, grad, *state)
    if (
        any(array.layout != "C" or not array.aligned for array in arrays)
        or not all(array.mutable for array in (weight, *state))
        or any(array.ndim != weight.ndim for array in arrays)
    ):
        return lambda weight, grad, state, by_row: False
    if weight.ndim == 0:
        return lambda weight, grad, state, by_row: True
    if not len(state):
        return lambda weight, grad, state, by_row: weight.shape == grad.shape

    def compiled(weight, grad, state, by_row):
        if weight.shape != grad.shape:
            return False
        for array in state:
            if by_row:
                if len(array) != len(weight) or array.size != len(weight):
                    return False
            elif array.shape != weight.shape:
                return False
        return True

    return compiled
