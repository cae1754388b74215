"""Typed pointers, loads and stores for use inside kernels.

These are bare loads and stores: pointers have no reference counts and no strides, so the loops
around them vectorize. Half-precision values are converted to float32 when they are loaded and
rounded when they are stored.

Tests: ``tests/kernels/test_cpu.py``.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.cpu import CPUContext
from numba.extending import overload

from fastopt._kernels import half
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.noise import dither_bits
from fastopt.kernels.rule import scalar

LINE = 64
"""Bytes of a cache line."""


@intrinsic
def locate(typingctx, table, row, column, start, memory):
    """Return pointers to element `start` of the arrays with addresses at ``table[row, column:]``.

    `memory` is a tuple with the storage type of each array.
    """

    def place(context, builder, address, kind, start):
        return builder.gep(builder.inttoptr(address, kind), [start])

    return _locating(table, memory, place)


def _locating(table, memory, place):
    """Return the signature and code generator for pointers into each array.

    `place` generates the address of the element.
    """
    pointers = types.Tuple([types.CPointer(real.dtype) for real in memory])

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
        first = builder.add(builder.mul(args[1], columns), args[2])
        located = []
        for k, pointer in enumerate(pointers):
            entry = builder.add(first, context.get_constant(types.intp, k))
            address = builder.load(builder.gep(array.data, [entry]))
            kind = context.get_value_type(pointer)
            located.append(place(context, builder, address, kind, args[3]))
        return context.make_tuple(builder, pointers, located)

    return pointers(table, types.intp, types.intp, types.intp, memory), codegen


@intrinsic
def locate_bytes(typingctx, table, row, column, offset, memory):
    """Return pointers like :func:`locate`, `offset` bytes from the start of the arrays."""

    def place(context, builder, address, kind, offset):
        return builder.inttoptr(builder.add(address, offset), kind)

    return _locating(table, memory, place)


@intrinsic
def shifted(typingctx, pointers, count):
    """Return pointers `count` elements further on."""

    def codegen(context, builder, signature, args):
        moved = [builder.gep(base, [args[1]]) for base in cgutils.unpack_tuple(builder, args[0])]
        return context.make_tuple(builder, pointers, moved)

    return pointers(pointers, types.intp), codegen


@intrinsic
def inside(typingctx, buffer):
    """Return a pointer to the first element of `buffer`, in a tuple."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return context.make_tuple(builder, signature.return_type, [data])

    return types.Tuple([types.CPointer(buffer.dtype)])(buffer), codegen


@intrinsic
def private(typingctx, records, i):
    """Copy record `i` to registers, so that the compiler knows that stores do not alias it."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        copy = cgutils.alloca_once(builder, array.data.type.pointee)
        word = ir.IntType(32).as_pointer()
        source = builder.bitcast(builder.gep(array.data, [args[1]]), word)
        target = builder.bitcast(copy, word)
        for k in range(records.dtype.size // 4):  # a GPU would copy byte by byte
            at = [context.get_constant(types.intp, k)]
            value = builder.load(builder.gep(source, at), align=4)
            builder.store(value, builder.gep(target, at), align=4)
        return copy

    return records.dtype(records, types.intp), codegen


def given(hyper, i, record):
    """Return record `i` like :func:`private`, or make the record from a tuple of numbers."""


@overload(given, inline="always")
def _given(hyper, i, record):
    if isinstance(hyper, types.BaseTuple):
        return lambda hyper, i, record: _given_intrinsic(hyper, record)
    return lambda hyper, i, record: private(hyper, i)


@intrinsic
def _given_intrinsic(typingctx, hyper, record):
    def codegen(context, builder, signature, args):
        kind = context.get_value_type(signature.return_type)
        copy = cgutils.alloca_once(builder, kind.pointee)
        copy.align = hyper.dtype.bitwidth // 8
        target = builder.bitcast(copy, context.get_value_type(hyper.dtype).as_pointer())
        for k, number in enumerate(cgutils.unpack_tuple(builder, args[0], len(hyper))):
            builder.store(number, builder.gep(target, [context.get_constant(types.intp, k)]))
        return copy

    return record.dtype(hyper, record), codegen


@scalar
def _widen_float16(bits):
    return half.widen_float16(bits)


_WIDEN = {types.uint16: _widen_float16, types.int16: half.widen_bfloat16}
"""Functions of the bits as uint16, by the types of pointers."""


def _wide(kind):
    return types.float32 if kind in _WIDEN else kind


@intrinsic
def load(typingctx, pointers, i):
    """Load element `i` at each pointer, as a tuple; half-precision values become float32."""
    values = types.Tuple([_wide(pointer.dtype) for pointer in pointers])

    def codegen(context, builder, signature, args):
        loaded, bases = [], cgutils.unpack_tuple(builder, args[0], len(pointers))
        for pointer, base in zip(pointers, bases, strict=True):
            value = builder.load(builder.gep(base, [args[1]]))
            if pointer.dtype in _WIDEN:
                value = _widened(context, builder, pointer.dtype, value)
            loaded.append(value)
        return context.make_tuple(builder, values, loaded)

    return values(pointers, types.intp), codegen


def _widened(context, builder, kind, value):
    """Generate the conversion of the bits of half-precision values to float32."""
    if kind == types.uint16 and _on_gpu(context):
        return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
    signature = types.float32(types.uint16)
    return context.compile_internal(builder, _WIDEN[kind], signature, [value])


def _on_gpu(context):
    """Whether code is generated for a GPU, all of which convert float16 in one instruction."""
    return not isinstance(context, CPUContext)


def checked(result, slots):
    """Return the result of a rule; at compile time, check that it is (weight, `slots` numbers)."""


@overload(checked, prefer_literal=True)
def _checked(result, slots):
    good = isinstance(result, types.BaseTuple) and len(result) == 2
    good = good and isinstance(result[1], types.BaseTuple) and len(result[1]) == slots.literal_value
    numbers = (result[0], *result[1]) if good else ()
    if not good or not all(isinstance(n, (types.Number, types.Boolean)) for n in numbers):
        # Not numba's TypingError, whose message would be a page long.
        raise TypeError(
            f"it must return (new_weight, new_state) in every branch, with {slots.literal_value} "
            f"numbers in the tuple new_state, but returns {result}"
        )
    return lambda result, slots: result


@scalar
def _narrow_float16(x):
    return half.narrow_float16(x)


_NARROW = {types.uint16: _narrow_float16, types.int16: half.narrow_bfloat16}


@intrinsic
def store(typingctx, pointers, i, values):
    """Store `values` to element `i` at each pointer, rounded to its type.

    A single value is stored at all pointers.
    """

    def narrow(context, builder, kind, value, args, k):
        if kind == types.uint16 and _on_gpu(context):
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        signature = types.uint16(types.float32)
        return context.compile_internal(builder, _NARROW[kind], signature, [value])

    return types.none(pointers, types.intp, values), _storing(narrow)


_DITHER = {types.uint16: half.dither_float16, types.int16: half.dither_bfloat16}


@intrinsic
def store_dithered(typingctx, pointers, i, values, run):
    """Like :func:`store`, with stochastic rounding of half-precision values.

    The random bits depend on the `run` from :func:`~fastopt._kernels.noise.dither_run`, whose
    element `i` is stored, and on the position of the pointer.
    """

    def dither(context, builder, kind, value, args, k):
        drawn = types.uint32(run, types.intp, types.int64)
        numbers = [args[3], args[1], context.get_constant(types.int64, k)]
        bits = context.compile_internal(builder, dither_bits, drawn, numbers)
        rounded = types.uint16(types.float32, types.uint32)
        return context.compile_internal(builder, _DITHER[kind], rounded, [value, bits])

    return types.none(pointers, types.intp, values, run), _storing(dither)


def _storing(narrow):
    """Return a code generator that stores values; `narrow` rounds to half precision."""

    def codegen(context, builder, signature, args):
        pointers, _, values = signature.args[:3]
        for k, pointer in enumerate(pointers):
            index = k if len(values) > 1 else 0
            value = builder.extract_value(args[2], index)
            kind = pointer.dtype
            value = context.cast(builder, value, values[index], _wide(kind))
            if kind in _NARROW:
                value = narrow(context, builder, kind, value, args, k)
            target = builder.extract_value(args[0], k)
            builder.store(value, builder.gep(target, [args[1]]))
        return context.get_dummy_value()

    return codegen


def prefetch_line(builder, place, write):
    """Generate the prefetch of the cache line at a pointer to bytes."""
    flags = [ir.IntType(32)(flag) for flag in (write, 3, 1)]  # keep, data
    declared = ir.FunctionType(ir.VoidType(), [place.type] + [flag.type for flag in flags])
    fetch = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
    builder.call(fetch, [place, *flags])


@intrinsic(prefer_literal=True)
def prefetch(typingctx, pointers, count, write):
    """Prefetch the cache lines of the next `count` elements at each pointer.

    `write` is a constant: whether the elements will be written to.
    """

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        step, zero = (context.get_constant(types.intp, n) for n in (LINE, 0))
        bases = cgutils.unpack_tuple(builder, args[0], len(pointers))
        for pointer, base in zip(pointers, bases, strict=True):
            width = context.get_constant(types.intp, pointer.dtype.bitwidth // 8)
            size = builder.mul(args[1], width)
            start = builder.bitcast(base, byte)
            with cgutils.for_range_slice(builder, zero, size, step, inc=True) as (offset, _):
                prefetch_line(builder, builder.gep(start, [offset]), int(write.literal_value))
        return context.get_dummy_value()

    return types.none(pointers, types.intp, write), codegen
