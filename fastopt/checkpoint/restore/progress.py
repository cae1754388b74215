"""Gradient sums and weight averages in checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastopt._kernels.device_memory import host
from fastopt._notices import warn_user
from fastopt.arguments import ArrayOf, count
from fastopt.averages import described, rebuilt
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.optimizer.optimizer import Index
from fastopt.sparse import RowSparse

PROGRESS = ("accumulation", "averages")
"""Fields of a checkpoint that are written only by updaters with `accumulate` or `average`."""

REALS = ArrayOf(("float32", "float64"))

Current = Callable[[Index], Index | None]
"""Function that returns the updater's index for a key of a checkpoint, or None."""


def indices_of(updater: Any) -> list[Index]:
    """Indices with a gradient sum or an average."""
    windows, averages = _parts(updater)
    return [*(windows.calls if windows else ()), *(averages.arrays if averages else ())]


def progress_of(updater: Any, keys: Mapping[Index, Index]) -> dict[str, Any]:
    """Gradient sums of open accumulation windows, and averages, by the keys of the parameters."""
    windows, averages = _parts(updater)
    fields: dict[str, Any] = {}
    if windows is not None:
        fields["accumulation"] = {
            "every": windows.every,
            "calls": under_keys(windows.calls, keys),
            "sums": under_keys(windows.open_sums(), keys),
        }
    if averages is not None and averages.average is None:
        raise RuntimeError(
            "the weights hold averages that the optimizer has computed: save outside of averaged()"
        )
    if averages is not None:
        held = averages.held
        fields["averages"] = {
            "average": described(averages.average),
            "arrays": host(under_keys(averages.arrays, keys)),
            "weights_hold": "weights" if held is None else "averages",
            "weights": under_keys(held or {}, keys),
        }
    return fields


def check_outside(updater: Any) -> None:
    """Raise RuntimeError inside ``averaged()``."""
    _, averages = _parts(updater)
    if averages is not None and averages.inside:
        averages.check_free()


def checked_progress(updater: Any, saved: Mapping[str, Any], index: Current) -> Callable[[], None]:
    """Check the result of :func:`progress_of`, and return a function that restores it.

    Parameters
    ----------
    updater : Updater
        The updater.
    saved : mapping
        The checkpoint.
    index : callable
        Returns the updater's index for a key, None if it does not have the parameter.

    Raises
    ------
    CheckpointError
        The fields are invalid, or do not match the settings of the updater.
    """
    windows, averages = _parts(updater)
    sums = _checked_sums(saved.get("accumulation"), windows, index)
    found = _checked_averages(saved, averages, index)

    def restore() -> None:
        if windows is not None:
            windows.restore(*sums)
        if averages is not None and found is not None:
            updater.average = found[0]
            averages.arrays, averages.held = found[1:]
        elif averages is not None:
            averages.arrays, averages.held = {}, None

    return restore


def _parts(updater: Any) -> tuple[Any, Any]:
    return getattr(updater, "_windows", None), getattr(updater, "_averages", None)


def under_keys(table: Mapping[Index, Any], keys: Mapping[Index, Index]) -> dict[Index, Any]:
    """Values of a table by index, under the keys of a checkpoint."""
    return {key: table[index] for key, index in keys.items() if index in table}


def _checked_sums(
    saved: Any, windows: Any, index: Current
) -> tuple[dict[Index, int], dict[Index, Any]]:
    if saved is None:
        return {}, {}
    if not isinstance(saved, dict) or set(saved) != {"every", "calls", "sums"}:
        raise CheckpointError("'accumulation' must have every, calls and sums")
    every = count("every", saved["every"])
    calls = _of_parameters("calls", saved["calls"], index)
    sums = _of_parameters("sums", saved["sums"], index)
    if calls.keys() != sums.keys():
        raise CheckpointError("'accumulation' must have calls and sums of the same parameters")
    own = 1 if windows is None else windows.every
    if own != every and saved["calls"]:
        raise CheckpointError(
            f"it was saved between two updates of accumulate={every}, the updater has "
            f"accumulate={own}"
        )
    if own != every:
        warn_user(
            f"the checkpoint was saved with accumulate={every}, the updater keeps accumulate={own}"
        )
    for key, number in calls.items():
        count(f"calls[{key!r}]", number, most=every - 1)
        total = sums[key]
        REALS(f"sums[{key!r}]", total.values if isinstance(total, RowSparse) else total)
    return calls, sums


def _checked_averages(
    checkpoint: Mapping[str, Any], averages: Any, index: Current
) -> tuple[Any, dict[Index, Any], dict[Index, Any] | None] | None:
    saved = checkpoint.get("averages")
    if saved is None:
        if averages is not None and checkpoint.get("parameters") != {}:
            warn_user("the checkpoint has no averages of weights, those of the updater start again")
        return None
    fields = {"average", "arrays", "weights_hold", "weights"}
    if not isinstance(saved, dict) or set(saved) != fields:
        raise CheckpointError(f"'averages' must have {', '.join(sorted(fields))}")
    average = rebuilt(saved["average"])
    if averages is None:
        warn_user("the checkpoint has averages of weights, the updater has no average to take them")
        return None
    if type(average) is not type(averages.average):
        raise CheckpointError(
            f"it has averages of {average}, the updater has average={averages.average}"
        )
    arrays = _of_parameters("arrays", saved["arrays"], index)
    held = _of_parameters("weights", saved["weights"], index)
    for key, array in arrays.items():
        REALS(f"arrays[{key!r}]", array)
    for key, array in held.items():
        if not isinstance(array, np.ndarray) or key not in arrays:
            raise CheckpointError(f"weights[{key!r}] must be an array with an average")
        if array.shape != arrays[key].shape:
            raise CheckpointError(
                f"weights[{key!r}] has shape {array.shape}, its average {arrays[key].shape}"
            )
    return average, arrays, held if saved["weights_hold"] == "averages" else None


def _of_parameters(name: str, table: Any, index: Current) -> dict[Index, Any]:
    """Map the keys of a table to current indices; drop parameters that the updater lacks."""
    try:
        present = {index(key): value for key, value in table.items()}
    except (AttributeError, KeyError):
        raise CheckpointError(f"{name!r} must be a table of the saved parameters") from None
    return {key: value for key, value in present.items() if key is not None}
