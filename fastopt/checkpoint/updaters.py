"""Checkpoints of updaters: what is saved, and the files."""

import copy
from typing import TYPE_CHECKING, Any

from fastopt.checkpoint.errors import read_from
from fastopt.checkpoint.files import PathLike, write_atomically
from fastopt.checkpoint.objects import attributes_of
from fastopt.checkpoint.parameters import Skipped, keys_of, names_of
from fastopt.checkpoint.restore import SETTINGS, foreign_part, restore
from fastopt.checkpoint.tree import chunks, read
from fastopt.optimizer.border import label

if TYPE_CHECKING:
    from fastopt.optimizer.updater import Updater

__all__ = ["describe", "load", "load_states_dict", "save", "states_dict"]


def describe(updater: "Updater") -> dict[str, Any]:
    """All that a checkpoint holds of `updater`, with its live arrays.

    Raises
    ------
    TypeError
        A state is not made of None, numbers, arrays, and tuples, lists and dicts of these.
    """
    optimizer = updater.optimizer
    attributes = attributes_of(optimizer)
    indices = [*updater.states, *attributes["_index_update_count"]]
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
        "states": {k: updater.states[i] for k, i in keys.items() if i in updater.states},
        "updater": {name: getattr(updater, name) for name in SETTINGS if hasattr(updater, name)},
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }


def save(updater: "Updater", path: PathLike) -> None:
    """See :meth:`fastopt.Updater.save`."""
    with updater.optimizer.lock:
        write_atomically(path, chunks(describe(updater)))


def load(updater: "Updater", path: PathLike, strict: bool) -> Skipped:
    """See :meth:`fastopt.Updater.load`."""
    with read_from(path), open(path, "rb") as file:
        return restore(updater, read(file), strict)


def states_dict(updater: "Updater") -> dict[str, Any]:
    """See :meth:`fastopt.Updater.states_dict`."""
    with updater.optimizer.lock:
        return copy.deepcopy(describe(updater))


def load_states_dict(updater: "Updater", states: dict[str, Any], strict: bool) -> Skipped:
    """See :meth:`fastopt.Updater.load_states_dict`."""
    return restore(updater, copy.deepcopy(states), strict)
