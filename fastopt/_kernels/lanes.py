"""Deterministic sums, whose order does not depend on the number of threads or the vector width.

Maxima of nonnegative numbers are computed in the same way; they are NaN if a number is NaN.

Terms are summed in blocks of BLOCK. In a block, term i is added to partial sum i modulo LANES, in
float64; then the partial sums are added pairwise by halves. The terms of a few vectors at a time
are written to a scratch array on the stack and added from there together, so that the arithmetic of
one part overlaps the loads of the next, and the compiler need not assume that they alias.

Tests: ``tests/kernels/test_cpu.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fastopt._kernels.intrinsics import intrinsic
from fastopt.kernels.rule import scalar

BLOCK = 1024
"""Terms that are summed before their sum is added to others; a multiple of PART."""

PART = 64
"""Terms that are computed before they are added to the partial sums; a multiple of LANES."""

LANES = 32
"""Partial sums of a block, whatever the width of the machine's vectors."""


@intrinsic(prefer_literal=True)
def scratch(typingctx, count, size, real):
    """Return pointers to `count` arrays of `size` zeros of type `real` on the stack."""
    pointers = types.UniTuple(types.CPointer(real.dtype), count.literal_value)

    def codegen(context, builder, signature, args):
        array = ir.ArrayType(context.get_value_type(real.dtype), size.literal_value)
        nbytes = size.literal_value * real.dtype.bitwidth // 8
        zero = ir.IntType(32)(0)
        addresses = []
        for _ in range(pointers.count):
            space = cgutils.alloca_once(builder, array)
            space.align = 64
            cgutils.memset(builder, space, context.get_constant(types.intp, nbytes), 0)
            addresses.append(builder.gep(space, [zero, zero]))
        return context.make_tuple(builder, pointers, addresses)

    return pointers(count, size, real), codegen


@scalar
def add(sums, terms, count):
    """Add `count` terms from each pointer of `terms` to the partial sums at that of `sums`.

    The arrays of terms have length PART and are padded with zeros.
    """
    _add_intrinsic(sums, terms, count, False, False)


DOWN = 2.0**-600
"""Factor of numbers whose squares are summed if the sum of the squares is not finite."""


@scalar
def add_squares(sums, terms, count):
    """Add the squares of terms, like :func:`add`; float64 holds squares of float32 exactly."""
    _add_intrinsic(sums, terms, count, True, False)


@scalar
def raise_to(largest, terms, count):
    """Raise the numbers at `largest` to nonnegative terms that are larger, like :func:`add`."""
    _add_intrinsic(largest, terms, count, False, True)


@scalar
def added(x, y):
    """Return the sum of two numbers."""
    return x + y


@scalar
def larger(x, y):
    """Return the larger one of two nonnegative numbers, or NaN if one is NaN."""
    # Without abs(), LLVM turns x = larger(x, y) into a masked store, which is slow with AVX2.
    return y if y > x or y != y else abs(x)


def _merged(builder, x, y, largest):
    """Return code for the sum of two numbers or vectors, or like :func:`larger` if `largest`."""
    if not largest.literal_value:
        return builder.fadd(x, y)
    takes = builder.or_(builder.fcmp_ordered(">", y, x), builder.fcmp_unordered("uno", y, y))
    return builder.select(takes, y, x)


@intrinsic(prefer_literal=True)
def _add_intrinsic(typingctx, sums, terms, count, square, largest):
    """Add explicit vectors: the compiler may not reorder float additions to vectorize a loop."""

    def codegen(context, builder, signature, args):
        kind = terms.dtype.dtype
        real = ir.VectorType(context.get_value_type(kind), LANES)
        wide = ir.VectorType(ir.DoubleType(), LANES)
        size, one = (context.get_constant(types.intp, n) for n in (PART, 1))
        for k in range(len(sums)):
            lanes, values = (builder.extract_value(arg, k) for arg in args[:2])
            with cgutils.for_range_slice(builder, args[2], size, one, inc=True) as (i, _):
                builder.store(context.get_constant(kind, 0), builder.gep(values, [i]))
            lanes = builder.bitcast(lanes, wide.as_pointer())
            running = builder.load(lanes, align=8)
            for first in range(0, PART, LANES):
                place = builder.gep(values, [context.get_constant(types.intp, first)])
                place = builder.bitcast(place, real.as_pointer())
                vector = builder.load(place, align=kind.bitwidth // 8)
                if kind == types.float32:
                    vector = builder.fpext(vector, wide)
                if square.literal_value:
                    vector = builder.fmul(vector, vector)
                running = _merged(builder, running, vector, largest)
            builder.store(running, lanes, align=8)
        return context.get_dummy_value()

    return types.none(sums, terms, types.intp, square, largest), codegen


@scalar
def total(sums):
    """Sum the partial sums at each pointer pairwise by halves, and set them to 0."""
    return _total_intrinsic(sums, False)


@scalar
def highest(largest):
    """Return the largest number at each pointer, and set them to 0."""
    return _total_intrinsic(largest, True)


@intrinsic(prefer_literal=True)
def _total_intrinsic(typingctx, sums, largest):
    totals = types.UniTuple(types.float64, len(sums))

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(ir.DoubleType(), LANES)
        numbers = []
        for pointer in cgutils.unpack_tuple(builder, args[0], len(sums)):
            place = builder.bitcast(pointer, wide.as_pointer())
            lanes, width = builder.load(place, align=8), LANES
            builder.store(wide(None), place, align=8)
            while width > 1:
                width //= 2
                mask = ir.VectorType(ir.IntType(32), width)
                low, high = (
                    builder.shuffle_vector(lanes, lanes, ir.Constant(mask, list(half)))
                    for half in (range(width), range(width, 2 * width))
                )
                lanes = _merged(builder, low, high, largest)
            numbers.append(builder.extract_element(lanes, ir.IntType(32)(0)))
        return context.make_tuple(builder, totals, numbers)

    return totals(sums, largest), codegen


@scalar
def plus(sums, terms, real):
    """Return float64 `sums` plus `terms`, which are rounded to type `real` first."""
    return _plus_intrinsic(sums, terms, real, False)


@scalar
def raised(largest, terms, real):
    """Return the larger ones of float64 numbers and `terms`, which are rounded like in `plus`."""
    return _plus_intrinsic(largest, terms, real, True)


@intrinsic(prefer_literal=True)
def _plus_intrinsic(typingctx, sums, terms, real, largest):
    def codegen(context, builder, signature, args):
        before, after = (cgutils.unpack_tuple(builder, arg, len(sums)) for arg in args[:2])
        for k, kind in enumerate(terms):
            value = context.cast(builder, after[k], kind, real.dtype)
            value = context.cast(builder, value, real.dtype, types.float64)
            before[k] = _merged(builder, before[k], value, largest)
        return context.make_tuple(builder, sums, before)

    return sums(sums, terms, real, largest), codegen


class Reduction(NamedTuple):
    """Functions of the kernels of a reduction."""

    gather: Callable[..., Any]
    """``gather(lanes, terms, count)``: takes terms into the partial results of a block."""
    end: Callable[..., Any]
    """``end(lanes)``: returns the results of a block, and sets the partial ones to 0."""
    merge: Callable[..., Any]
    """``merge(x, y)``: the result of two partial ones."""
    take: Callable[..., Any]
    """``take(results, terms, real)``: takes the terms of one element into each result."""


SUM = Reduction(add, total, added, plus)
MAXIMUM = Reduction(raise_to, highest, larger, raised)
