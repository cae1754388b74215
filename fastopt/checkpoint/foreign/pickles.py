"""Parser of pickled MXNet states that does not execute the pickle.

A pickle is a program for a stack machine. This machine builds numbers, strings, tuples, lists and
dicts, but imports and calls nothing: a class is represented by its name, an instance by its class
name and state. Its memory is bounded by the length of the pickle.
"""

import pickletools
import re
from dataclasses import dataclass
from typing import Any

from fastopt.checkpoint.format.errors import CheckpointError

ARRAYS = ("mxnet.ndarray.ndarray.NDArray", "mxnet.ndarray.sparse.RowSparseNDArray")
BYTES = ("builtins.bytearray", "__builtin__.bytearray", "_codecs.encode")
"""Functions that convert strings to bytes, in pickle protocols without a bytes instruction."""

OTHERS = re.compile(r"mxnet\.(optimizer(\.\w+)?|lr_scheduler)\.\w+")
"""Other classes that may occur; only their names and states are used."""

LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
MEMORIZE = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
RECALL = ("GET", "BINGET", "LONG_BINGET")
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Class:
    """Name of a class or function, which must be one that MXNet states use."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ARRAYS + BYTES and not OTHERS.fullmatch(self.name):
            raise CheckpointError(f"it refers to {self.name}, which states of MXNet do not need")


@dataclass(eq=False)
class Instance:
    """Instance of a class: its name and state; for bytes, the arguments of the conversion."""

    name: str
    state: Any = None


def values(data: bytes) -> Any:
    """Return the value of a pickle, with an :class:`Instance` for each object.

    Raises
    ------
    CheckpointError
        The pickle uses classes or instructions that MXNet states do not need.
    ValueError, LookupError, TypeError
        The pickle is malformed.
    """
    machine = _Machine()
    for instruction, argument, position in pickletools.genops(data):
        if instruction.name != "STOP":
            machine.step(instruction.name, argument)
        elif position != len(data) - 1:
            raise CheckpointError("something follows its end")
    (value,) = machine.stack
    return value


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


class _Machine:
    """Stack machine of a pickle; methods with an underscore implement the instruction they name."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """Outer stacks, one for each open mark."""
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in LITERALS:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in TUPLES:
            parts = [self.stack.pop() for _ in range(TUPLES[name])]
            self.stack.append(tuple(parts[::-1]))
        elif name in MEMORIZE:
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in RECALL:
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            run = getattr(self, f"_{name.lower()}", None)
            if run is None:
                raise CheckpointError(f"it has a {name} instruction")
            run(argument)

    def marked(self) -> list[Any]:
        parts, self.stack = self.stack, self.below.pop()
        return parts

    def _mark(self, _: None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _tuple(self, _: None) -> None:
        parts = self.marked()
        self.stack.append(tuple(parts))

    def _list(self, _: None) -> None:
        parts = self.marked()
        self.stack.append(parts)

    def _empty_list(self, _: None) -> None:
        self.stack.append([])

    def _append(self, _: None) -> None:
        self.extend([self.stack.pop()])

    def _appends(self, _: None) -> None:
        self.extend(self.marked())

    def extend(self, parts: list[Any]) -> None:
        expect(list, self.stack[-1]).extend(parts)

    def _dict(self, _: None) -> None:
        parts = self.marked()
        self._empty_dict(_)
        self.update(parts)

    def _empty_dict(self, _: None) -> None:
        self.stack.append({})

    def _setitem(self, _: None) -> None:
        value = self.stack.pop()
        self.update([self.stack.pop(), value])

    def _setitems(self, _: None) -> None:
        self.update(self.marked())

    def update(self, parts: list[Any]) -> None:
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            expect(dict, self.stack[-1])[expect((int, str), key)] = value

    def _global(self, argument: str) -> None:
        self.stack.append(Class(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: None) -> None:
        name = self.stack.pop()
        self.stack.append(Class(f"{self.stack.pop()}.{name}"))

    def _reduce(self, _: None) -> None:
        arguments = expect(tuple, self.stack.pop())
        name = expect(Class, self.stack.pop()).name
        self.stack.append(Instance(name, arguments if name in BYTES else None))

    _newobj = _reduce

    def _build(self, _: None) -> None:
        state = expect(dict, self.stack.pop())
        instance = expect(Instance, self.stack[-1])
        if instance.state is not None:
            raise CheckpointError(f"it sets the state of {instance.name} twice")
        instance.state = state
