"""Import of optimizer states written by MXNet."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastopt._engine.validate import leaves
from fastopt.arguments import count
from fastopt.checkpoint.foreign.ndarray import Allowance, from_bytes
from fastopt.checkpoint.foreign.pickles import ARRAYS, Instance, as_bytes, expect, values
from fastopt.checkpoint.format.errors import CheckpointError, read_from, refusing
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.objects import KEEP
from fastopt.checkpoint.restore.describe import Stateful, describe, foreign_part
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
        return _described(updater, imported)


def _described(updater: Stateful, imported: MXNetStates) -> dict[str, Any]:
    attributes = dict(updater.optimizer.__getstate__())
    taken = {k: v for k, v in imported.attributes.items() if k in attributes and k not in STAYING}
    if "cumgrads" in taken:
        taken["cumgrads"] = dict(_sums(taken, imported))
    if imported.optimizer and "lr_scheduler" not in imported.attributes:
        taken["lr_scheduler"] = KEEP  # a schedule is an object that cannot be converted
    keys = keys_of(taken.get("idx2name", {}), imported)
    return {
        **describe(updater),
        "optimizer": imported.optimizer or type(updater.optimizer).__name__,
        "attributes": attributes | taken,
        "parameters": keys,
        "states": {key: imported[index] for key, index in keys.items() if index in imported},
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


class _Foreign(CheckpointError):
    """Raised for values other than numbers, strings, arrays and containers of these."""


class _Converter:
    """Converter of the parsed values of a pickle to arrays and plain values.

    A small pickle can expand exponentially by referring to the same objects repeatedly, so the
    output size is limited by an allowance that files without repetition never exceed.
    """

    def __init__(self, allowance: int, dense: Allowance) -> None:
        self.allowance, self.dense = allowance, dense

    def __call__(self, value: Any) -> Any:
        self.spend(1)
        if isinstance(value, Instance):
            if value.name not in ARRAYS:
                raise _Foreign(f"it holds an instance of {value.name}")
            blob = as_bytes(expect(dict, value.state).get("handle"))
            self.spend(len(blob))
            return from_bytes(blob, self.dense)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self, value))
        if isinstance(value, dict):
            return {key: self(part) for key, part in value.items()}
        if value is None or isinstance(value, (int, float, str)):
            return value
        raise _Foreign(f"it holds {type(value).__name__}")

    def attributes(self, optimizer: Instance) -> dict[str, Any]:
        """Return the attributes that can be converted completely."""
        converted = {}
        for name, value in expect(dict, optimizer.state).items():
            with suppress(_Foreign):
                converted[name] = self(value)
        return converted

    def spend(self, amount: int) -> None:
        self.allowance -= amount
        if self.allowance < 0:
            raise CheckpointError("it names the same things too often")
