"""Reader of pickled MXNet states that runs nothing of the pickle.

A pickle is a program for a stack machine. Here it may only build numbers, strings, tuples, lists
and dicts: its instructions are checked before it runs, and in place of each class it gets one that
keeps the name and the state of an instance. So its memory is bounded by its length.
"""

import io
import pickle
import pickletools
import re
from typing import Any, ClassVar

from fastopt.checkpoint.format.errors import CheckpointError

ARRAYS = ("mxnet.ndarray.ndarray.NDArray", "mxnet.ndarray.sparse.RowSparseNDArray")
BYTES = ("builtins.bytearray", "__builtin__.bytearray", "_codecs.encode")
"""Functions that convert strings to bytes, in pickle protocols without a bytes instruction."""

OTHERS = re.compile(r"mxnet\.(optimizer(\.\w+)?|lr_scheduler)\.\w+")
"""Other classes that may occur; only their names and states are used."""

MEMORIZE = ("PUT", "BINPUT", "LONG_BINPUT")

INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
        *("MEMOIZE", *MEMORIZE, "GET", "BINGET", "LONG_BINGET"),
    )
)


class Instance:
    """Instance of a class: its state; for bytes, the arguments of the conversion."""

    name: ClassVar[str]
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        if self.name in BYTES:
            self.state = arguments

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise CheckpointError(f"it sets the state of {self.name} twice")
        self.state = expect(dict, state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Instance]:
        full = f"{module}.{name}"
        if full not in ARRAYS + BYTES and not OTHERS.fullmatch(full):
            raise CheckpointError(f"it refers to {full}, which states of MXNet do not need")
        return type(full, (Instance,), {"name": full})


def values(data: bytes) -> Any:
    """Return the value of a pickle, with an :class:`Instance` for each object.

    Raises
    ------
    CheckpointError
        The pickle uses classes or instructions that MXNet states do not need.
    Exception
        The pickle is malformed.
    """
    for count, (instruction, argument, position) in enumerate(pickletools.genops(data)):
        if instruction.name not in INSTRUCTIONS:
            raise CheckpointError(f"it has a {instruction.name} instruction")
        if instruction.name in MEMORIZE and int(argument or 0) > count:
            raise CheckpointError(f"it memorizes {count} values at most, one of them as {argument}")
        if instruction.name == "STOP" and position != len(data) - 1:
            raise CheckpointError("something follows its end")
    return _Unpickler(io.BytesIO(data), encoding="latin-1").load()


def as_bytes(value: Any) -> bytes:
    """Return bytes, which may be represented by a Latin-1 string and the encoding function."""
    if not isinstance(value, Instance):
        return bytes(expect((bytes, bytearray), value))
    if value.name not in BYTES:
        raise CheckpointError(f"it has {value.name} where bytes belong")
    data, *encoding = value.state or (b"",)
    if isinstance(data, str) and encoding in (["latin1"], ["latin-1"]):
        return data.encode("latin-1")
    if encoding:
        raise CheckpointError(f"it encodes as {encoding}, not as Latin text")
    return as_bytes(data)


def expect(kind: Any, value: Any) -> Any:
    """Return `value` if it is an instance of `kind`, else raise CheckpointError."""
    if not isinstance(value, kind):
        raise CheckpointError(f"it has a {type(value).__name__} where {kind} belongs")
    return value
