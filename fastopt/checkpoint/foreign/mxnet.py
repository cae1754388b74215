"""Import of optimizer states written by MXNet, from a pickle of which nothing is run.

A pickle is a program for a stack machine. Here it may only build numbers, strings, tuples, lists
and dicts: its instructions are checked before it runs, and in place of each class it gets one that
keeps the name and the state of an instance. So its memory is bounded by its length.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fastopt._engine.validate import leaves
from fastopt.arguments import count
from fastopt.checkpoint.foreign.ndarray import Allowance, from_bytes
from fastopt.checkpoint.format.errors import CheckpointError, ForeignValue, read_from, refusing
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.objects import KEEP
from fastopt.checkpoint.restore.describe import Stateful, describe, foreign_part, under_keys
from fastopt.checkpoint.restore.parameters import keys_of
from fastopt.optimizer.optimizer import Index

STAYING = ("lr_scheduler", "sym_info")
"""Attributes that are not loaded from an MXNet optimizer."""


class MXNetStates(dict[Index, Any]):
    """States by index, each None, an array, or a tuple of these, nested like in MXNet."""

    optimizer: str | None = None
    """Class name of the optimizer, if it was saved."""

    attributes: Mapping[str, Any] = {}
    """Attributes of the optimizer that are numbers, strings, arrays or containers of these."""


def load_mxnet_states(source: PathLike | bytes, max_bytes: int | None = None) -> MXNetStates:
    r"""Read a file written by ``get_states`` of an MXNet updater, without MXNet.

    The file is a pickle. It is not executed: numbers and arrays are parsed, and anything else in it
    raises an error.

    Parameters
    ----------
    source : str, os.PathLike or bytes
        The file or its contents.
    max_bytes : int, optional
        Limit on the bytes of row-sparse arrays after conversion to dense ones. Default: 64 MiB plus
        100 times the size of the file.

    Returns
    -------
    MXNetStates
        A dict of states by index; row-sparse arrays are converted to dense ones. ``optimizer`` and
        ``attributes`` are set if the file was written with ``dump_optimizer=True``.

    Raises
    ------
    CheckpointError
        The file is damaged or not such a file, or its row-sparse arrays exceed `max_bytes`.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> from fastopt.checkpoint import load_mxnet_states
    >>> load_mxnet_states(b"\x80\x04}K\x00Ns.")
    {0: None}
    """
    if not isinstance(source, (bytes, bytearray, memoryview)):
        with read_from(source):
            return load_mxnet_states(Path(source).read_bytes(), max_bytes)
    data = bytes(source)
    most = None if max_bytes is None else count("max_bytes", max_bytes, least=0)
    with refusing("not a file of MXNet's get_states: "):
        return _states(data, Allowance.of(len(data), most))


def described_by_mxnet(
    updater: Stateful, source: PathLike | bytes, max_bytes: int | None = None
) -> dict[str, Any]:
    """Convert an MXNet file to the argument of :func:`~.restore.restore.restore`."""
    imported = load_mxnet_states(source, max_bytes)
    with refusing("not a file of MXNet's get_states: "):
        attributes, imported_attributes = updater.optimizer.__getstate__(), imported.attributes
        taken = {
            k: v for k, v in imported_attributes.items() if k in attributes and k not in STAYING
        }
        if "cumgrads" in taken:
            taken["cumgrads"] = dict(_sums(taken, imported))
        if imported.optimizer and "lr_scheduler" not in imported_attributes:
            taken["lr_scheduler"] = KEEP  # a schedule is an object that cannot be converted
        keys = keys_of(taken.get("idx2name", {}), imported)
        return {
            **describe(updater),
            "optimizer": imported.optimizer or type(updater.optimizer).__name__,
            "attributes": attributes | taken,
            "parameters": keys,
            "states": under_keys(imported, keys),
        }


def _sums(taken: Mapping[str, Any], states: MXNetStates) -> Iterator[tuple[Index, Any]]:
    """Convert LBSGD's sums of gradients; MXNet stores the number 0 for an empty sum."""
    for index, entry in taken["cumgrads"].items():
        total = entry["cum_grad"]
        if not isinstance(total, np.ndarray):
            arrays = leaves(states.get(index))
            if taken["batch_scale"] > 1 and not arrays:
                raise CheckpointError(f"index {index!r}: a sum of gradients of unknown shape")
            total = np.zeros_like(arrays[0]) if taken["batch_scale"] > 1 else None
        yield index, {**entry, "cum_grad": total}


# The pickle

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

    def __setstate__(self, state: object) -> None:
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
    for step, (instruction, argument, position) in enumerate(pickletools.genops(data)):
        if instruction.name not in INSTRUCTIONS:
            raise CheckpointError(f"it has a {instruction.name} instruction")
        if instruction.name in MEMORIZE and int(argument or 0) > step:
            raise CheckpointError(f"it memorizes {step} values at most, one of them as {argument}")
        if instruction.name == "STOP" and position != len(data) - 1:
            raise CheckpointError("something follows its end")
    return _Unpickler(io.BytesIO(data), encoding="latin-1").load()


def as_bytes(value: object) -> bytes:
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


def expect(kind: type | tuple[type, ...], value: object) -> Any:
    """Return `value` if it is an instance of `kind`, else raise CheckpointError."""
    if not isinstance(value, kind):
        raise CheckpointError(f"it has a {type(value).__name__} where {kind} belongs")
    return value


# Its values


def _states(data: bytes, dense: Allowance) -> MXNetStates:
    content = values(data)
    if not isinstance(content, tuple):
        content = content, None
    elif len(content) != 2:
        raise CheckpointError(f"it has {len(content)} parts where states and optimizer belong")
    saved, optimizer = content
    convert = _Converter(3 * len(data), dense)
    states = MXNetStates()
    for index, state in expect(dict, saved).items():
        states[expect((int, str), index)] = convert(state)
        foreign = foreign_part(states[index])
        if foreign:
            raise CheckpointError(f"state of index {index!r} holds something of type {foreign}")
    if optimizer is not None:
        states.optimizer = expect(Instance, optimizer).name.rpartition(".")[2]
        states.attributes = convert.attributes(optimizer)
    return states


class _Converter:
    """Converter of the parsed values of a pickle to arrays and plain values.

    A small pickle can expand exponentially by referring to the same objects repeatedly, so the
    output size is limited by an allowance that files without repetition never exceed.
    """

    def __init__(self, allowance: int, dense: Allowance) -> None:
        self.allowance, self.dense = allowance, dense

    def __call__(self, value: object) -> Any:
        self.spend(1)
        if isinstance(value, Instance):
            if value.name not in ARRAYS:
                raise ForeignValue(f"it holds an instance of {value.name}")
            blob = as_bytes(expect(dict, value.state).get("handle"))
            self.spend(len(blob))
            return from_bytes(blob, self.dense)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self, value))
        if isinstance(value, dict):
            return {key: self(part) for key, part in value.items()}
        if value is None or isinstance(value, (int, float, str)):
            return value
        raise ForeignValue(f"it holds {type(value).__name__}")

    def attributes(self, optimizer: Instance) -> dict[str, Any]:
        """Return the attributes that can be converted completely."""
        converted = {}
        for name, value in expect(dict, optimizer.state).items():
            with suppress(ForeignValue):
                converted[name] = self(value)
        return converted

    def spend(self, amount: int) -> None:
        self.allowance -= amount
        if self.allowance < 0:
            raise CheckpointError("it names the same things too often")
