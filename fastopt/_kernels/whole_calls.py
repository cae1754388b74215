"""Whole updates of one tensor as functions of arrays, for callers that are compiled themselves.

They enter the addresses of arrays in a table on the stack, and call the loops of the rule, which
become a part of the caller.

Tests: ``tests/test_in_numba.py``.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import _empty_nd_impl, populate_array

from fastopt._kernels.chunks import CHUNK
from fastopt._kernels.compiling import engine_digest
from fastopt._kernels.cpu import update_loop
from fastopt._kernels.cpu_sums import finish_loop, sum_loop
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.layout import ADDRESS, ORDER, ROWS, SEGMENTS, STARTS, WIDTH, Layout
from fastopt._kernels.rates import Program, filler
from fastopt._kernels.segments import PLACES, sort_rows
from fastopt.kernels.rule import Rule, digest_of, scalar


@dataclass(frozen=True)
class Spec:
    """What the code of an optimizer's functions depends on.

    Parameters
    ----------
    rule : Rule
        The update rule.
    names : tuple of str
        Hyper-parameters, those of the rule first.
    correct : callable, optional
        ``correct(t, h, carried)`` writes the fields that depend on the step.
    copies : tuple of bool
        Whether each array of a new state is a copy of the weight; others have a number everywhere.
    lazy : bool
        Row-sparse gradients update the indexed rows alone.
    rated : tuple of int
        Positions of the hyper-parameters that depend on the learning rate.
    programs : tuple of Program, optional
        How they depend on it; None if it cannot be given.
    constants : int
        Number of constants of the programs.
    """

    rule: Rule
    names: tuple[str, ...]
    correct: Callable[..., None] | None
    copies: tuple[bool, ...]
    lazy: bool
    rated: tuple[int, ...]
    programs: tuple[Program, ...] | None
    constants: int

    @cached_property
    def digest(self) -> str:
        """Hash of all that the code depends on."""
        rule, correct = self.rule, self.correct
        parts = (
            *(engine_digest(), rule.digest, digest_of([correct]) if correct else ""),
            *(rule.name, rule.slots, rule.hyper, rule.row_state, rule.rounded, self.names),
            *(self.copies, self.lazy, self.rated, self.programs, self.constants),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Length of the numbers of a state, the first of which it carries from step to step."""
        return 1 + len(self.names) + len(self.rated) + self.constants

    def layout(self, real: Any, sparse: bool = False) -> Layout:
        """Return the layout of weights, gradients and states of one type."""
        states = (real,) * len(self.rule.state)
        lazy = sparse and self.lazy
        return Layout(self.rule, real, (real,), real, states, sparse=sparse, lazy=lazy)


BAD_RATE = "lr must be a finite number, at least 0"


def init_of(spec: Spec, state_class: Any, weight: types.Array) -> Callable:
    """Return ``(function, weight)``, which returns a new state.

    The numbers of the function are those of the state, an element of each array, and the count.
    """
    order = weight.layout if spec.rule.elementwise else "C"
    converts, weight_of = weight.layout != order, _converted(weight, weight.dtype, order)
    new_state = _new_state(spec)

    def init(function, weight):
        weights = weight
        if converts:
            weights = weight_of(weight)
        arrays, numbers, count = new_state(function, weights)
        return state_class(arrays, numbers, count)

    return init


def _new_state(spec: Spec) -> Callable:
    """Return ``(function, weight)``, which returns the arrays, numbers and count of a new state."""
    rule, size, slots = spec.rule, spec.size, len(spec.copies)
    cells, rows = len(rule.state) - len(rule.row_state), len(rule.row_state)

    @intrinsic
    def new_state(typingctx, function, weight):
        of_row, of_tensor = (types.Array(weight.dtype, ndim, "C") for ndim in (2, 0))
        kinds = [weight] * cells + [of_row] * rows + [of_tensor] * (slots - cells - rows)
        numbers, count = types.Array(types.float64, 1, "C"), types.Array(types.int64, 1, "C")
        result = types.Tuple([types.Tuple(kinds), numbers, count])

        def codegen(context, builder, signature, args):
            array, one = context.make_array(weight)(context, builder, args[1]), _word(1)
            shape = cgutils.unpack_tuple(builder, array.shape, weight.ndim)

            def number(k):
                return builder.load(builder.gep(args[0], [k]))

            def filled(kind, shape, element):
                new = _empty_nd_impl(context, builder, kind, shape)
                with cgutils.for_range(builder, new.nitems) as loop:
                    builder.store(element(loop.index), builder.gep(new.data, [loop.index]))
                return new._getvalue()

            def first(k, copies, kind):
                if copies:
                    return lambda i: builder.load(builder.gep(array.data, [i]))
                value = number(_word(size + k))
                value = context.cast(builder, value, types.float64, kind.dtype)
                return lambda i: value

            shapes = [shape] * cells + [[*shape[:1], one]] * rows + [[]] * (slots - cells - rows)
            arrays = [
                filled(kind, lengths, first(k, spec.copies[k], kind))
                for k, (kind, lengths) in enumerate(zip(kinds, shapes, strict=True))
            ]
            begin = builder.fptosi(number(_word(size + slots)), _word(0).type)
            parts = [
                context.make_tuple(builder, types.Tuple(kinds), arrays),
                filled(numbers, [_word(size)], number),
                filled(count, [one], lambda i: begin),
            ]
            return context.make_tuple(builder, result, parts)

        return result(function, weight), codegen

    return new_state


def _word(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


def update_of(spec: Spec, weight: types.Array, grad: types.Array) -> Callable:
    """Return ``(function, grad, weight, state, lr)``, which updates weight and state in place."""
    layout = spec.layout(getattr(np, weight.dtype.name))
    order = weight.layout if spec.rule.elementwise else "C"
    copies, converts = weight.layout != order, grad.layout != order or grad.dtype != weight.dtype
    weight_of, grad_of = (_converted(array, weight.dtype, order) for array in (weight, grad))
    enter, apply = _entering(layout), _application(spec, layout)
    columns, by_row = layout.first_grad + 1, layout.by_row

    def update(function, grad, weight, state, lr=None):
        arrays, numbers, count = state
        weights, grads = weight, grad
        if copies:
            weights = weight_of(weight)
        if converts:
            grads = grad_of(grad)
        table = on_stack(columns, np.uint64)
        grad_fits, state_fits = enter(table, weights, grads, arrays)
        if not grad_fits:
            raise ValueError("update: grad and weight differ in shape", grad.shape, weight.shape)
        if not state_fits:
            raise ValueError("update: state must be that of a weight of shape", weight.shape)
        if lr is not None and not (lr >= 0 and lr < inf):
            raise ValueError(BAD_RATE)
        items = len(weight) if by_row else weight.size
        apply(table, numbers, count, lr, weight.size, items, grads)
        if copies:
            weight[...] = weights

    return update


def update_rows_of(spec: Spec, weight: types.Array, values: types.Array) -> Callable:
    """Return ``(function, values, indices, table, state, lr)``, which updates indexed rows."""
    layout = spec.layout(getattr(np, weight.dtype.name), sparse=True)
    copies, converts = weight.layout != "C", values.layout != "C" or values.dtype != weight.dtype
    table_of, values_of = (_converted(array, weight.dtype, "C") for array in (weight, values))
    enter, apply = _entering(layout), _application(spec, layout)
    columns, by_row = layout.first_grad + 1, layout.by_row

    def update_rows(function, values, indices, table, state, lr=None):
        arrays, numbers, count = state
        listed, height = len(indices), len(table)
        rows, places = np.empty(listed, np.int64), np.empty((PLACES, listed + 1), np.int64)
        for k in range(listed):
            row = rows[k] = indices[k]
            if row < 0 or row >= height:
                raise IndexError("update_rows: an index is not that of a row of the table")
        weights, grads = table, values
        if copies:
            weights = table_of(table)
        if converts:
            grads = values_of(values)
        entries = on_stack(columns, np.uint64)
        values_fit, state_fits = enter(entries, weights, grads, arrays)
        if len(values) != listed or not values_fit:
            raise ValueError(
                "update_rows: values must have the shape of table[indices]; the three have",
                values.shape,
                indices.shape,
                table.shape,
            )
        if not state_fits:
            raise ValueError("update_rows: state must be that of a table of shape", table.shape)
        if lr is not None and not (lr >= 0 and lr < inf):
            raise ValueError(BAD_RATE)
        chunks = np.empty((2, 3), np.int64)
        segments, _ = sort_rows(rows, height, listed + 1, places, chunks)
        first = np.int64(places.ctypes.data)
        for k, column in enumerate((ROWS, STARTS, ORDER)):
            entries[0, column] = first + 8 * k * (listed + 1)
        entries[0, SEGMENTS] = segments
        items = segments if by_row else table.size
        apply(entries, numbers, count, lr, table.size, items, (grads, places))
        if copies:
            table[...] = weights

    return update_rows


def _converted(array: types.Array, kind: types.Type, order: str) -> Callable:
    """Return a function that returns an array in another dtype and order."""
    real = getattr(np, kind.name)
    if array.layout == order or array.ndim == 0:
        return scalar(lambda array: array.astype(real))
    ordered = np.ascontiguousarray if order == "C" else np.asfortranarray
    if array.dtype == kind:
        return scalar(lambda array: ordered(array))
    return scalar(lambda array: ordered(array).astype(real))


@intrinsic(prefer_literal=True)
def on_stack(typingctx, count, kind):
    """Return an array of one row of `count` numbers, on the stack of the caller."""
    array = types.Array(kind.dtype, 2, "C")

    def codegen(context, builder, signature, args):
        memory = ir.ArrayType(context.get_value_type(kind.dtype), count.literal_value)
        space = cgutils.alloca_once(builder, memory)
        return _array_at(context, builder, array, space, [1, count.literal_value])

    return array(count, kind), codegen


def _array_at(context, builder, kind, place, shape):
    """Generate an array of memory that belongs to nobody."""
    made, size = context.make_array(kind)(context, builder), context.get_abi_sizeof
    made.data = builder.bitcast(place, made.data.type)
    width = size(context.get_value_type(kind.dtype))
    steps = [width * math.prod(shape[k + 1 :]) for k in range(len(shape))]
    populate_array(
        made,
        made.data,
        [_word(length) for length in shape],
        [_word(step) for step in steps],
        _word(width),
        None,
    )
    return made._getvalue()


@intrinsic
def as_records(typingctx, row, dtype):
    """Return an array of the record whose numbers are a row from :func:`on_stack`."""
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context, builder, signature, args):
        numbers = context.make_array(signature.args[0])(context, builder, args[0])
        return _array_at(context, builder, array, numbers.data, [1])

    return array(row, dtype), codegen


def _entering(layout: Layout) -> Callable:
    """Return ``(table, weight, grad, arrays)``, which enters addresses and the width of rows.

    It returns whether the gradient has the shape of the weight, except for the number of rows of a
    row-sparse one, and whether the arrays of the state have the shapes of a state of the weight.
    """
    rule, first, sparse = layout.rule, layout.first_state, layout.sparse
    cells, rows = len(layout.split_state[0]), len(rule.row_state)

    @intrinsic
    def enter(typingctx, table, weight, grad, arrays):
        both = types.UniTuple(types.boolean, 2)

        def codegen(context, builder, signature, args):
            entries = context.make_array(table)(context, builder, args[0]).data
            weights, grads = (
                context.make_array(signature.args[k])(context, builder, args[k]) for k in (1, 2)
            )

            def put(column, value):
                builder.store(value, builder.gep(entries, [_word(column)]))

            def place(column, array):
                put(column, builder.ptrtoint(array.data, _word(0).type))

            def same(array, start=0):
                lengths = cgutils.unpack_tuple(builder, array.shape)
                if len(lengths) != len(shape):
                    return cgutils.false_bit
                equal = cgutils.true_bit
                for one, other in zip(shape[start:], lengths[start:], strict=True):
                    equal = builder.and_(equal, builder.icmp_signed("==", one, other))
                return equal

            shape = cgutils.unpack_tuple(builder, weights.shape)
            height = shape[0] if shape else _word(1)
            some = builder.select(builder.icmp_signed(">", height, _word(0)), height, _word(1))
            fits = cgutils.true_bit
            put(WIDTH, builder.sdiv(weights.nitems, some))
            place(ADDRESS, weights)
            place(layout.first_grad, grads)
            sizes = [None] * cells + [height] * rows + [_word(1)] * len(rule.kept)
            parts = cgutils.unpack_tuple(builder, args[3], len(arrays))
            for k, (kind, part, size) in enumerate(zip(arrays, parts, sizes, strict=True)):
                array = context.make_array(kind)(context, builder, part)
                place(first + k, array)
                of_size = size and builder.icmp_signed("==", array.nitems, size)
                fits = builder.and_(fits, of_size or same(array))
            return context.make_tuple(builder, both, [same(grads, int(sparse)), fits])

        return both(table, weight, grad, arrays), codegen

    return enter


def _application(spec: Spec, layout: Layout) -> Callable:
    """Return ``(table, numbers, count, lr, size, items, arrays)``, which counts and does a step.

    The caller's `arrays`, whose addresses are in the table, live until it returns: numba frees an
    array after its last use.
    """
    names, correct, fields = len(spec.names), spec.correct, len(layout.rule.hyper)
    fill = filler(names, spec.rated, spec.programs or ())
    wide_record = np.dtype((np.record, [(name, np.float64) for name in spec.names]))
    real, record = layout.real, layout.record
    loop, reduce = scalar(update_loop(layout)), None
    for step in range(len(layout.rule.passes)):
        reduce = _with_reduction(reduce, layout, step)

    def apply(table, numbers, count, lr, size, items, arrays):
        count[0] += 1
        wide, rounded = on_stack(names, np.float64), on_stack(fields, real)
        fill(numbers, lr, wide)
        if correct is not None:
            correct(np.float64(count[0]), as_records(wide, wide_record)[0], numbers)
        for k in range(fields):
            rounded[0, k] = wide[0, k]
        hyper = as_records(rounded, record)
        if reduce is not None:
            reduce(table, hyper, size)
        chunks = on_stack(3, np.int64)
        chunks[0, 2] = items
        loop(chunks, table, hyper)

    return scalar(apply)


def _with_reduction(before: Callable | None, layout: Layout, step: int) -> Callable:
    """Return ``(table, hyper, size)``, which does the reductions of `before`, and one more."""
    sums, finish = scalar(sum_loop(layout, step)), scalar(finish_loop(layout, step))
    width = layout.rule.sums[step]

    def reduce(table, hyper, size):
        if before is not None:
            before(table, hyper, size)
        count = (size + CHUNK - 1) // CHUNK
        chunks, partial = np.zeros((count, 3), np.int64), np.zeros((count, width))
        for c in range(count):
            chunks[c, 1], chunks[c, 2] = c * CHUNK, min(CHUNK, size - c * CHUNK)
        sums(chunks, table, hyper, partial)
        finish(chunks, table, hyper, partial)

    return scalar(reduce)
