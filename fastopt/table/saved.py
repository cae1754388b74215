"""Fields of a table's checkpoint, and their validation."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt._kernels.hashing import FREE
from fastopt._kernels.layout import kind_of
from fastopt.arguments import count, number
from fastopt.checkpoint.format.container import dtype_of
from fastopt.checkpoint.format.errors import CheckpointError, check_types
from fastopt.optimizer import Optimizer
from fastopt.table.index import MOST_ROWS
from fastopt.table.storage import Form, Init, Start, check_optimizer

FORMAT = 1

SETTINGS: dict[str, Any] = {
    "embedding_table": int,
    "name": str,
    "dim": int,
    "dtype": str,
    "init": object,
    "seed": int,
    "capacity": (int, type(None)),
    "min_count": int,
    "half_life": (float, type(None)),
    "id_dtype": (str, type(None)),
    "step": int,
    "optimizer": Optimizer,
}

FIELDS: dict[str, Any] = SETTINGS | {
    "ids": tuple,
    "waiting": (tuple, type(None)),
    "weight": np.ndarray,
    "state": list,
    "decay": (tuple, type(None)),
}

DESCRIPTION: dict[str, Any] = SETTINGS | {
    "flushes": int,
    "high": int,
    "used": int,
    "waiting": (int, type(None)),
    "decay": (float, type(None)),
    "record": list,
}
"""Fields of a table in files. `high`: number of rows that have had an id; `used`: number of rows
that were written to; `waiting`: number of rows of the index of waiting ids; `record`: dtype and
shape of the weight and state arrays of a row."""


def checked(saved: Any, optimizer: Optimizer | None, init: Init | None) -> dict[str, Any]:
    """Check the fields of a saved table, and return them with dtypes decoded and a `form`.

    Parameters
    ----------
    saved : object
        Contents of the file.
    optimizer : Optimizer or None
        Optimizer to use in place of the saved one; it must be of the same class.
    init : str, Initializer, callable or None
        Initializer to use in place of the saved one.

    Raises
    ------
    CheckpointError, TypeError, ValueError
        A field is missing or invalid.
    """
    fields = _checked_settings(saved, FIELDS, "EmbeddingTable.save()", optimizer, init)
    counts = "float32" if saved["half_life"] is not None else "uint32"
    step = saved["step"]
    high = _check_records("ids", saved["ids"], counts, step)
    if saved["waiting"] is not None:
        _check_records("waiting", saved["waiting"], counts, step)
    _check_array("weight", saved["weight"], fields["dtype"].name, (high, saved["dim"]))
    if not all(isinstance(array, np.ndarray) for array in saved["state"]):
        raise CheckpointError("'state' must hold arrays")
    if saved["decay"] is not None:
        rows, total = saved["decay"]
        _check_array("decay", rows, "float64", (high,))
        number("decay", total)
        if not np.isfinite(rows).all():
            raise CheckpointError("'decay' must be finite")
    return fields


def checked_description(
    saved: Any, optimizer: Optimizer | None, init: Init | None
) -> dict[str, Any]:
    """Check the description of a table in files, like :func:`checked`."""
    made_by = "EmbeddingTable(path=...)"
    fields = _checked_settings(saved, DESCRIPTION, made_by, optimizer, init)
    for name in ("flushes", "high", "used", "waiting"):
        if saved[name] is not None:
            count(name, saved[name], least=0, most=None if name == "flushes" else MOST_ROWS)
    if saved["decay"] is not None:
        number("decay", saved["decay"])
    return fields


def _checked_settings(
    saved: Any, kinds: dict[str, Any], made_by: str, optimizer: Optimizer | None, init: Init | None
) -> dict[str, Any]:
    """Check the types of all fields, and the values of those in SETTINGS."""
    if not isinstance(saved, Mapping) or saved.keys() != kinds.keys():
        raise CheckpointError(f"not the checkpoint of a table, which {made_by} makes")
    check_types(saved, kinds)
    if saved["embedding_table"] != FORMAT:
        raise CheckpointError(f"format must be {FORMAT}, got {saved['embedding_table']}")
    fields = dict(saved)
    count("seed", saved["seed"], least=0, most=2**63 - 1)
    count("step", saved["step"], least=0, most=int(FREE) - 1)
    if saved["id_dtype"] not in (None, "int64", "uint64"):
        raise CheckpointError(f"id_dtype must be int64 or uint64, got {saved['id_dtype']!r}")
    fields["id_dtype"] = saved["id_dtype"] and np.dtype(saved["id_dtype"])
    fields["dtype"] = dtype = dtype_of(saved["dtype"])
    if kind_of(dtype) is None:
        raise CheckpointError(f"dtype must be of real numbers, got {dtype}")
    start = _start(saved["init"], saved["seed"], init)
    numbers = [saved[name] for name in ("capacity", "min_count", "half_life")]
    fields["form"] = Form(saved["name"], saved["dim"], dtype, start, *numbers)
    restored = saved["optimizer"]
    check_optimizer(restored)
    if optimizer is not None and type(optimizer) is not type(restored):
        raise CheckpointError(
            f"it was saved with {type(restored).__name__}, optimizer is {type(optimizer).__name__}"
        )
    if saved["name"] not in restored._index_update_count:
        raise CheckpointError(f"the optimizer does not count the updates of {saved['name']!r}")
    restored.row_decay.pop(saved["name"], None)  # of a recovered table; `decay` has its own
    if restored.row_decay or restored.masters_given:
        raise CheckpointError("the optimizer has arrays of parameters besides the table")
    if (saved["min_count"] > 1) != (saved["waiting"] is not None):
        raise CheckpointError("ids wait for a row if min_count is more than 1 only")
    return fields


def _start(saved: object, seed: int, init: Init | None) -> Start:
    if init is not None:
        return Start(init)
    if not isinstance(saved, str):
        raise CheckpointError("its first values came from a function, pass it as init")
    return Start(saved, seed)


def _check_records(name: str, records: tuple[Any, ...], counts: str, step: int) -> int:
    """Check the ids, counts and last uses of rows; return the number of rows."""
    if len(records) != 3 or not all(isinstance(array, np.ndarray) for array in records):
        raise CheckpointError(f"{name!r} must be three arrays")
    ids, numbers, last = records
    rows = len(ids) if ids.ndim else 0
    _check_array(f"{name}: id", ids, "int64", (rows,))
    _check_array(f"{name}: count", numbers, counts, (rows,))
    _check_array(f"{name}: last use", last, "uint32", (rows,))
    used = last != FREE
    if rows > MOST_ROWS or (used & (last > step)).any():
        raise CheckpointError(f"{name!r} has a last use after step {step}")
    if len(np.unique(ids[used])) != np.count_nonzero(used):
        raise CheckpointError(f"{name!r} has an id twice")
    if not (np.isfinite(numbers) & (numbers >= 0)).all() or numbers[~used].any():
        raise CheckpointError(f"{name!r} has a count that none is")
    return rows


def _check_array(name: str, array: object, dtype: str, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or (array.dtype.name, array.shape) != (dtype, shape):
        raise CheckpointError(f"{name} must be an array of {dtype} of shape {shape}")
