"""Python objects and raw memory in compiled code: the only module that follows addresses.

A kernel takes an object as its address, without counting a reference: the caller keeps the object
alive and holds the GIL. :mod:`fastopt._kernels.numpy_abi` has the layout of the objects' headers.

Functions of CPython's C interface need the GIL, without exception. :func:`dictionary_item` and
:func:`long_value` borrow, :func:`new_int` and :func:`attribute` return references that the caller
releases. Between :func:`release_gil` and :func:`restore_gil` a kernel touches no object, not even a
reference count, and follows only addresses whose arrays are held. An error that one of them sets
is cleared before the kernel returns: numba does not look for it, and the next Python call would
raise it.

Tests: ``tests/engine/test_records.py``.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, models, register_model, unbox

from fastopt._kernels.intrinsics import intrinsic

WORD, BYTES = ir.IntType(64), ir.IntType(8).as_pointer()


class _Object(types.Type):  # type: ignore[misc]
    """Any Python object, as an argument that costs nothing to pass."""

    def __init__(self) -> None:
        super().__init__("Object")


Object = _Object()


@register_model(_Object)
class _ObjectModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, kind):
        super().__init__(manager, kind, WORD)


@unbox(_Object)
def _unbox(kind, value, c):
    return NativeValue(c.builder.ptrtoint(value, WORD))


@intrinsic
def address(typingctx, value):
    """Return the address of an :data:`Object`."""
    return types.int64(value), lambda context, builder, signature, args: args[0]


def as_pointer(context, builder, signature, args):
    """Generate the typed pointer to an address, the first argument of an intrinsic."""
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


def _pointer_to(kind: types.Type) -> Any:
    """Return a function that makes a typed pointer from an address."""

    @intrinsic
    def pointer(typingctx, place):
        return types.CPointer(kind)(types.int64), as_pointer

    return pointer


words, small_words = _pointer_to(types.int64), _pointer_to(types.int32)
doubles, singles = _pointer_to(types.float64), _pointer_to(types.float32)
halves, unsigned = _pointer_to(types.uint16), _pointer_to(types.uint64)
signed_bytes, bytes_ = _pointer_to(types.int8), _pointer_to(types.uint8)
half_words, unsigned_words = _pointer_to(types.int16), _pointer_to(types.uint32)


@intrinsic
def after(typingctx, pointer, count):
    """Return a pointer to the number that is `count` places after a pointer, or in a structure."""
    numbers = types.CPointer(types.int64) if isinstance(pointer, types.Record) else pointer

    def codegen(context, builder, signature, args):
        start = builder.bitcast(args[0], context.get_value_type(numbers))
        return builder.gep(start, [args[1]])

    return numbers(pointer, types.int64), codegen


@intrinsic
def record_pointer(typingctx, place, dtype):
    """Return a pointer to records at an address."""
    return types.CPointer(dtype.dtype)(types.int64, dtype), as_pointer


@intrinsic
def record_at(typingctx, place, dtype):
    """Return the record at an address."""
    return dtype.dtype(types.int64, dtype), as_pointer


def _call(context, builder, signature, args):
    kinds = [context.get_value_type(kind) for kind in signature.args[1:]]
    function = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
    builder.call(builder.inttoptr(args[0], function), args[1:])
    return context.get_dummy_value()


@intrinsic
def call(typingctx, function, a, b, c, d, e):
    """Call the C function at an address with five words."""
    return types.none(*[types.int64] * 6), _call


@intrinsic
def invoke(typingctx, function, arguments):
    """Call the C function at an address with numbers of these types; return an int32."""

    def codegen(context, builder, signature, args):
        numbers = cgutils.unpack_tuple(builder, args[1], len(arguments))
        kind = ir.FunctionType(ir.IntType(32), [number.type for number in numbers])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), numbers)

    return types.int32(types.int64, arguments), codegen


@intrinsic
def prepare_step(typingctx, function, t, fields, carried):
    """Call the C function at an address with a number and two words."""
    return types.none(types.int64, types.float64, types.int64, types.int64), _call


def c_function(name: str, result: types.Type, *arguments: types.Type) -> Any:
    """Return a C function for compiled code, where objects and pointers are addresses."""
    return types.ExternalFunction(name, result(*arguments))


dictionary_item = c_function("PyDict_GetItem", types.int64, types.int64, types.int64)
"""Return the address of a dictionary's value, 0 if there is none.

It runs no Python code if the key is exactly an int or a str, like the keys of the dictionary.
"""

long_value = c_function("PyLong_AsLong", types.int64, types.int64)
"""Return the value of a Python int."""

new_int = c_function("PyLong_FromLongLong", types.int64, types.int64)
"""Return a new Python int, which the caller releases."""

attribute = c_function("PyObject_GetAttr", types.int64, types.int64, types.int64)
"""Return a new reference to an attribute of an object, or 0 with an error set.

It runs no Python code if the object's class has no properties and no ``__getattr__``.
"""

compare = c_function("PyObject_RichCompareBool", types.int32, types.int64, types.int64, types.int32)
"""Return whether two objects compare like this, -1 with an error set; 2 means equality.

It runs no Python code for numbers, dtypes and tuples of these.
"""

clear_error = c_function("PyErr_Clear", types.none)
"""Clear the error that a function of CPython has set, if any."""

keep_alive = c_function("Py_IncRef", types.none, types.int64)
"""Count a reference to an object."""

release = c_function("Py_DecRef", types.none, types.int64)
"""Drop a reference to an object."""

release_gil = c_function("PyEval_SaveThread", types.int64)
"""Let other threads run Python; return what :func:`restore_gil` takes."""

restore_gil = c_function("PyEval_RestoreThread", types.none, types.int64)
"""Wait for the GIL."""
