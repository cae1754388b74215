"""Contents of an updater's checkpoint."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt._engine.validate import label
from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import is_cuda
from fastopt.arguments import Checked
from fastopt.checkpoint.format.objects import attributes_of
from fastopt.checkpoint.restore.groups import described_groups
from fastopt.checkpoint.restore.parameters import keys_of, names_of
from fastopt.checkpoint.restore.progress import indices_of, progress_of
from fastopt.optimizer.optimizer import Index, Optimizer

SETTINGS = ("clip_global_norm", "clip_adaptive", "clip_adaptive_eps")
"""Hyper-parameters of updaters; some kinds of updaters lack some of them."""


class Stateful(Checked):
    """Attributes of an updater that checkpoints save and restore."""

    optimizer: Optimizer
    lock: Any
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    groups: Mapping[str, Mapping[str, Any]] | None = None


def check_updater(updater: Any) -> None:
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
    indices = [*updater.states, *attributes["_index_update_count"], *indices_of(updater)]
    keys = keys_of(names_of(optimizer), indices)
    for index, state in updater.states.items():
        foreign = foreign_part(state)
        if foreign:
            raise TypeError(
                f"state of {label(index, optimizer.idx2name)} must be None, a number, an array, "
                f"or a tuple, list or dict of these, got {foreign}"
            )
    scaler = getattr(updater, "loss_scaler", None)
    return {
        "optimizer": type(optimizer).__name__,
        "attributes": attributes,
        "parameters": keys,
        "states": {k: host(updater.states[i]) for k, i in keys.items() if i in updater.states},
        "updater": {name: getattr(updater, name) for name in SETTINGS if hasattr(updater, name)},
        "loss_scaler": None if scaler is None else scaler.state_dict(),
        **({"groups": described_groups(updater.groups)} if updater.groups else {}),
        **progress_of(updater, keys),
    }


def foreign_part(state: Any) -> str | None:
    """Type name of a part of a state that cannot be saved, or None if all parts can.

    None, numbers, arrays, tuples, lists and dicts can be saved.
    """
    if state is None or isinstance(state, (int, float)):
        return None
    if is_cuda(state):
        return None
    if isinstance(state, np.generic) and not isinstance(state, np.flexible):
        return None
    if isinstance(state, np.ndarray) and not isinstance(state, np.ma.MaskedArray):
        return None
    if not isinstance(state, (tuple, list, Mapping)):
        return type(state).__name__
    parts = state.values() if isinstance(state, Mapping) else state
    return next(filter(None, map(foreign_part, parts)), None)
