"""Contents of an updater's checkpoint."""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fastopt._engine.averaging import Averages
from fastopt._engine.clip import LIMITS
from fastopt._engine.validate import label
from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import is_cuda
from fastopt.amp import LossScaler
from fastopt.arguments import is_array
from fastopt.averages import Average, described
from fastopt.checkpoint.format.objects import PLAIN, Given, attributes_of, described_groups
from fastopt.checkpoint.restore.parameters import Keys, keys_of, names_of
from fastopt.optimizer.accumulation import Windows
from fastopt.optimizer.optimizer import Index, Optimizer

PROGRESS = ("accumulation", "averages")
"""Fields of a checkpoint that are written only by updaters with `accumulate` or `average`."""


class Stateful(Protocol):
    """Attributes of an updater that checkpoints save and restore."""

    optimizer: Optimizer
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    groups: Given | None
    average: Average | None
    loss_scaler: LossScaler | None
    _windows: Windows | None
    _averages: Averages | None

    def _has_records(self) -> bool:
        """Whether updates have checked all states, so that others of their form need no check."""

    def _put_states(self, states: dict[Index, Any], alike: bool) -> None:
        """Replace all states, with `alike` by others of their form."""


def check_updater(updater: object) -> None:
    """Raise TypeError unless `updater` has the attributes `optimizer` and `states`."""
    if not (hasattr(updater, "optimizer") and hasattr(updater, "states")):
        raise TypeError(f"updater must be an Updater, got {type(updater).__name__}")


def describe(updater: Stateful) -> dict[str, Any]:
    """Return the contents of a checkpoint: the updater's own arrays, or host copies of device ones.

    Raises
    ------
    TypeError
        A state contains something other than None, numbers, arrays, tuples, lists and dicts.
    """
    optimizer = updater.optimizer
    attributes = attributes_of(optimizer)
    indices = [*updater.states, *attributes["_index_update_count"], *_in_progress(updater)]
    keys = keys_of(names_of(optimizer), indices)
    for index, state in updater.states.items():
        foreign = foreign_part(state)
        if foreign:
            raise TypeError(
                f"state of {label(index, optimizer.idx2name)} must be None, a number, an array, "
                f"or a tuple, list or dict of these, got {foreign}"
            )
    scaler = updater.loss_scaler
    return {
        "optimizer": type(optimizer).__name__,
        "attributes": attributes,
        "parameters": keys,
        "states": {k: host(updater.states[i]) for k, i in keys.items() if i in updater.states},
        "updater": {name: getattr(updater, name) for name in LIMITS if hasattr(updater, name)},
        "loss_scaler": None if scaler is None else scaler.state_dict(),
        **({"groups": described_groups(updater.groups)} if updater.groups else {}),
        **_progress_of(updater, keys),
    }


def describe_states(updater: Stateful, with_optimizer: bool) -> dict[str, Any]:
    """Return the contents of :meth:`Updater.get_states <fastopt.Updater.get_states>`, by index."""
    progress = _progress_of(updater, {index: index for index in _in_progress(updater)})
    states = {"states": updater.states, "optimizer": updater.optimizer if with_optimizer else None}
    groups = with_optimizer and updater.groups
    return states | progress | ({"groups": described_groups(groups)} if groups else {})


def copied(tree: Any) -> Any:
    """Return a deep copy of a checkpoint, fast for arrays, numbers and strings."""
    kind = type(tree)
    if kind is dict:
        return {key: copied(part) for key, part in tree.items()}
    if kind is tuple or kind is list:
        return kind(map(copied, tree))
    if kind is np.ndarray:
        return tree.copy("K")
    return tree if kind in PLAIN else copy.deepcopy(tree)


def foreign_part(state: object) -> str | None:
    """Type name of a part of a state that cannot be saved, or None if all parts can.

    None, numbers, arrays, tuples, lists and dicts can be saved.
    """
    if isinstance(state, (tuple, list, Mapping)):
        parts = state.values() if isinstance(state, Mapping) else state
        return next(filter(None, map(foreign_part, parts)), None)
    plain = state is None or isinstance(state, (int, float)) or is_array(state) or is_cuda(state)
    plain = plain or (isinstance(state, np.generic) and not isinstance(state, np.flexible))
    return None if plain else type(state).__name__


def under_keys(table: Mapping[Index, Any], keys: Keys) -> dict[Index, Any]:
    """Values of a table by index, in its order, under the keys of a checkpoint."""
    key_of = {index: key for key, index in keys.items()}
    return {key_of[index]: value for index, value in table.items() if index in key_of}


def _in_progress(updater: Stateful) -> list[Index]:
    """Indices with a gradient sum or an average."""
    windows, averages = updater._windows, updater._averages
    return [*(windows.calls if windows else ()), *(averages.arrays if averages else ())]


def _progress_of(updater: Stateful, keys: Keys) -> dict[str, Any]:
    """Gradient sums of open accumulation windows, and averages, by the keys of the parameters."""
    windows, averages = updater._windows, updater._averages
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
        fields["averages"] = {
            "average": described(averages.average),
            "arrays": host(under_keys(averages.arrays, keys)),
            "weights_hold": "weights" if averages.held is None else "averages",
            "weights": under_keys(averages.held or {}, keys),
        }
    return fields
