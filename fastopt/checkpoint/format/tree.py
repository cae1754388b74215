"""Serialization of trees of numbers and arrays to JSON with arrays, and to bytes."""

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import is_cuda
from fastopt._notices import warn_user
from fastopt.arguments import is_array
from fastopt.checkpoint.format import objects
from fastopt.checkpoint.format.container import METADATA, Array, can_hold, decode, dtype_of, encode
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.optimizer.optimizer import Optimizer
from fastopt.sparse import RowSparse


def dumps(tree: object) -> bytes:
    """Serialize a tree of states without pickle.

    Parameters
    ----------
    tree : object
        None, booleans, numbers, strings, NumPy arrays and scalars, row-sparse arrays, registered
        schedules, optimizers, and tuples, lists and dicts of these; keys of dicts are integers or
        strings.

    Returns
    -------
    bytes
        A safetensors file with a checksum of every array.

    Raises
    ------
    TypeError
        `tree` contains an object of another type, whose position the message names, or contains
        itself.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import checkpoint
    >>> checkpoint.loads(checkpoint.dumps({0: (np.ones(2), None)}))
    {0: (array([1., 1.]), None)}
    """
    try:
        return b"".join(chunks(tree))
    except RecursionError:
        raise TypeError("the tree is nested too deeply, or holds itself") from None


def loads(blob: bytes, present: Optimizer | None = None) -> Any:
    """Rebuild the tree that :func:`dumps` serialized.

    Parameters
    ----------
    blob : bytes
        Result of :func:`dumps`.
    present : Optimizer, optional
        Optimizer that supplies its class, if it is not registered, and its schedule, if the saved
        one was a plain callable, for the optimizer in `blob`.

    Returns
    -------
    object
        The tree, with equal values, types, nesting and memory order.

    Raises
    ------
    CheckpointError
        `blob` is damaged, not of this format, or names an unknown class.

    Examples
    --------
    >>> from fastopt import checkpoint
    >>> checkpoint.loads(checkpoint.dumps([1, (2.5, "three")]))
    [1, (2.5, 'three')]
    """
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise CheckpointError(f"a checkpoint must be bytes, got {type(blob).__name__}")
    return read(io.BytesIO(blob), present)


def chunks(tree: object) -> Iterator[bytes | memoryview]:
    """Chunks of the result of :func:`dumps`; any TypeError is raised before the first chunk."""
    arrays: dict[str, Array] = {}
    return encode(_pack(tree, "", arrays), arrays)


def read(file: io.BufferedIOBase, present: Optimizer | None = None) -> Any:
    """Rebuild the tree from a file; see :func:`loads`."""
    with refusing("not a fastopt checkpoint: "):
        packed, arrays = decode(file)
        reader = _Reader(arrays, present)
        tree = reader.unpack(packed)
    if arrays:
        raise CheckpointError(f"tensors that belong nowhere: {sorted(arrays)}")
    if reader.kept:
        warn_user(objects.KEPT)
    return tree


def _pack(value: object, where: str, arrays: dict[str, Array]) -> Any:
    """JSON form of `value`; arrays are put into `arrays`, named by their position in the tree."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, np.generic):
        return {"number": [_dtype(value, where), _pack(value.item(), where, arrays)]}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if is_cuda(value):
        value = host(value)
    if is_array(value):
        _dtype(value, where)
        arrays[where] = value
        return {"array": where}
    if isinstance(value, (tuple, list)):
        parts = [_pack(part, f"{where}[{i}]", arrays) for i, part in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if isinstance(value, Mapping):
        return {
            "dict": [[_key(k, where), _pack(v, _at(where, k), arrays)] for k, v in value.items()]
        }
    if isinstance(value, RowSparse):
        return {"row_sparse": _pack((value.values, value.indices, value.shape), where, arrays)}
    if isinstance(value, Optimizer):
        attributes = objects.attributes_of(value)
        return {"optimizer": type(value).__name__, "of": _pack(attributes, where, arrays)}
    if objects.is_registered(value):
        return {"schedule": type(value).__name__, "of": _pack(vars(value), where, arrays)}
    cure = ": save its state_dict()" if hasattr(value, "state_dict") else ""
    if is_dataclass(value):
        cure = ": save dataclasses.asdict() of it"
    raise TypeError(
        f"{where or 'the tree'} must be None, a number, a string, an array, or a tuple, list or "
        f"dict of these, got {type(value).__name__}{cure}"
    )


def _dtype(value: Array | np.generic, where: str) -> str:
    if not can_hold(value.dtype):
        cure = f": save its view({value.real.dtype})" if value.dtype.kind == "c" else ""
        raise TypeError(
            f"{where or 'the tree'} has dtype {value.dtype}, which cannot be saved{cure}"
        )
    return value.dtype.name


def _key(key: object, where: str) -> int | str:
    if isinstance(key, (int, str)):
        return key
    if isinstance(key, np.integer):
        return int(key)
    raise TypeError(f"{where or 'the tree'}: keys must be integers or strings, got {key!r}")


def _at(where: str, key: Any) -> str:
    """Position of an item; a first key without brackets, unless the format reserves its name."""
    bare = not where and isinstance(key, str) and key.isidentifier() and key != METADATA
    return key if bare else f"{where}[{key!r}]"


class _Reader:
    """Inverse of :func:`_pack`."""

    def __init__(self, arrays: dict[str, Array], present: Optimizer | None) -> None:
        self.arrays = arrays
        self.present = present
        self.schedule = present.lr_scheduler if present else None
        self.kept = False
        """Whether the current schedule was used in place of one that was not saved."""

    def unpack(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        (kind, of), *_ = value.items()
        match kind:
            case "array":
                return self.arrays.pop(of)
            case "float":
                return float(of)
            case "number":
                return dtype_of(of[0]).type(self.unpack(of[1]))
            case "tuple":
                return tuple(map(self.unpack, of))
            case "list":
                return list(map(self.unpack, of))
            case "dict":
                return {_key(key, "dict"): self.unpack(part) for key, part in of}
            case "row_sparse":
                return RowSparse(*self.unpack(of))
            case "schedule":
                return objects.rebuilt(
                    objects.schedule_class(of), self.unpack(value["of"]), self.schedule
                )
            case "optimizer":
                return self._optimizer(of, self.unpack(value["of"]))
        raise CheckpointError(f"unknown kind of value: {kind!r}")

    def _optimizer(self, name: str, attributes: dict[str, Any]) -> Optimizer:
        present, schedule = self.present, self.schedule
        inner = getattr(present, "fallback", None)
        if isinstance(inner, Optimizer) and type(inner).__name__ == name:
            present, schedule = inner, inner.lr_scheduler
        if objects.is_kept(attributes["lr_scheduler"]):
            self.kept = True
            attributes["lr_scheduler"] = schedule
        return objects.rebuilt(objects.optimizer_class(name, present), attributes, present)
