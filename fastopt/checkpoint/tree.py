"""State as safetensors bytes: arrays plus one JSON text that says how they are nested."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from fastopt.checkpoint.errors import CheckpointError
from fastopt.lr_scheduler import scheduler_registry
from fastopt.optimizer.base import Array, Optimizer

__all__ = ["dumps", "loads"]

FORMAT = "1"
KEY = "fastopt"
KEEP = "<keep the present schedule>"


def dumps(tree: Any) -> bytes:
    """Serialize a tree of states; nothing of it is pickled.

    Parameters
    ----------
    tree : object
        None, booleans, numbers, strings, NumPy arrays, registered schedules, optimizers, and
        tuples, lists and dicts of these; keys of dicts are integers or strings.

    Returns
    -------
    bytes
        In the safetensors format.

    Raises
    ------
    TypeError
        `tree` holds something else. The message says where.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import checkpoint
    >>> checkpoint.loads(checkpoint.dumps({0: (np.ones(2), None)}))
    {0: (array([1., 1.]), None)}
    """
    arrays: dict[str, Array] = {}
    text = json.dumps(_pack(tree, "state", arrays))
    return safetensors.numpy.save(arrays, {KEY: text, "format": FORMAT})


def loads(blob: bytes, present: Optimizer | None = None) -> Any:
    """Rebuild what :func:`dumps` serialized.

    Parameters
    ----------
    blob : bytes
        From :func:`dumps`.
    present : Optimizer, optional
        Lends its class, if that is not registered, and its schedule, if the saved one was a plain
        callable, to the optimizer in `blob`.

    Returns
    -------
    object
        The tree, with equal values, types and nesting.

    Raises
    ------
    CheckpointError
        `blob` is not such a text, or it names an unknown class.
    """
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise CheckpointError(f"a checkpoint must be bytes, got {type(blob).__name__}")
    blob = bytes(blob)
    try:
        arrays = safetensors.numpy.load(blob)  # checks the header that is read next
        length = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise CheckpointError(f"format must be {FORMAT}, got {metadata['format']}")
        return _unpack(json.loads(metadata[KEY]), arrays, present)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"not a fastopt checkpoint: {error!r}") from error


def _pack(value: Any, where: str, arrays: dict[str, Array]) -> Any:
    """JSON form of `value`; arrays go into `arrays` under their place in the tree."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        # safetensors writes the memory of an array whatever its strides
        arrays[where] = np.array(value, order="C", subok=False)
        return {"array": where}
    if isinstance(value, (tuple, list)):
        parts = [_pack(part, f"{where}[{i}]", arrays) for i, part in enumerate(value)]
        return {type(value).__name__: parts}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (int, str)):
                raise TypeError(f"{where}: keys must be integers or strings, got {key!r}")
        return {"dict": [[k, _pack(v, f"{where}[{k!r}]", arrays)] for k, v in value.items()]}
    if isinstance(value, Optimizer):
        attributes = dict(value.__getstate__())
        scheduler = attributes["lr_scheduler"]
        if scheduler is not None and type(scheduler).__name__ not in scheduler_registry:
            attributes["lr_scheduler"] = KEEP
        return {"optimizer": type(value).__name__, "of": _pack(attributes, where, arrays)}
    if type(value).__name__ in scheduler_registry:
        return {"schedule": type(value).__name__, "of": _pack(vars(value), where, arrays)}
    raise TypeError(
        f"{where} must be None, a number, a string, an array, or a tuple, list or dict of these, "
        f"got {type(value).__name__}"
    )


def _unpack(value: Any, arrays: dict[str, Array], present: Optimizer | None) -> Any:
    """Inverse of :func:`_pack`."""
    if not isinstance(value, dict):
        return value
    kind = next(iter(value))
    if kind == "array":
        return np.array(arrays[value["array"]])
    if kind in ("tuple", "list"):
        parts = [_unpack(part, arrays, present) for part in value[kind]]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {k: _unpack(v, arrays, present) for k, v in value["dict"]}
    attributes = _unpack(value["of"], arrays, present)
    if kind == "schedule":
        return _instance(scheduler_registry[value["schedule"]], attributes)
    if kind == "optimizer":
        if attributes["lr_scheduler"] == KEEP:
            attributes["lr_scheduler"] = _kept_schedule(present)
        return _instance(_optimizer_class(value["optimizer"], present), attributes)
    raise CheckpointError(f"unknown kind of value: {kind!r}")


def _instance(klass: Any, attributes: dict[str, Any]) -> Any:
    made = klass.__new__(klass)
    restore = getattr(made, "__setstate__", made.__dict__.update)
    restore(attributes)
    return made


def _optimizer_class(name: str, present: Optimizer | None) -> type[Optimizer]:
    for klass in (type(present), Optimizer.opt_registry.get(name.lower())):
        if klass is not None and klass.__name__ == name and issubclass(klass, Optimizer):
            return klass
    raise CheckpointError(f"optimizer class {name} is not registered")


def _kept_schedule(present: Optimizer | None) -> Any:
    warnings.warn(
        "the saved learning-rate schedule is not of a registered class; the present one is kept",
        stacklevel=5,
    )
    return present.lr_scheduler if present else None
