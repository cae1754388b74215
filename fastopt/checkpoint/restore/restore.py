"""Restoring an updater from a checkpoint: first everything is checked, then all of it changes."""

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from fastopt._engine.validate import label, leaves
from fastopt._kernels.codes import renew
from fastopt._notices import warn_user
from fastopt.amp import LossScaler
from fastopt.arguments import brief, flag, number
from fastopt.averages import rebuilt as rebuilt_average
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.checkpoint.format.objects import KEPT, is_kept, new_counts, rebuilt
from fastopt.checkpoint.restore.describe import SETTINGS, Stateful
from fastopt.checkpoint.restore.fitting import check_states
from fastopt.checkpoint.restore.groups import in_place, restored_groups, with_present
from fastopt.checkpoint.restore.parameters import Matching, Skipped, keys_of, match, names_of
from fastopt.checkpoint.restore.progress import PROGRESS, check_outside, checked_progress
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Index, Optimizer

FIELDS: dict[str, Any] = {
    "optimizer": str,
    "attributes": dict,
    "parameters": dict,
    "states": dict,
    "updater": dict,
    "loss_scaler": (dict, type(None)),
}


def restore(updater: Stateful, saved: Any, strict: bool) -> Skipped:
    """Restore `updater` from the result of :func:`~fastopt.checkpoint.restore.describe.describe`.

    Raises
    ------
    CheckpointError
        The checkpoint does not match the updater. Nothing has changed.
    TypeError
        `strict` is not a bool.
    """
    flag("strict", strict)
    check_outside(updater)
    optimizer = updater.optimizer
    with optimizer.call_lock:
        with refusing("not the checkpoint of an updater: "):
            _check_fields(saved, type(optimizer).__name__)
            matching = match(saved["parameters"], keys_of(names_of(optimizer), updater.states))
            if strict and any(matching.skipped):
                missing, extra = matching.skipped
                raise CheckpointError(
                    f"the parameters differ: the checkpoint lacks {missing} and has {extra} in "
                    "addition; strict=False loads what both have"
                )
            states = dict(_states(saved, matching, updater))
            made, attributes = optimizer, saved["attributes"]
            counts = new_counts(optimizer, attributes) if matching.is_identity else None
            if counts is None:
                attributes = _attributes(attributes, matching, optimizer)
                made = rebuilt(type(optimizer), attributes, optimizer)
            index = {key: matching.index.get(i) for key, i in saved["parameters"].items()}
            put = checked(updater, made, states, saved, index.__getitem__, matching.attribute)
        if is_kept(saved["attributes"]["lr_scheduler"]):
            warn_user(KEPT)
        _restore_scaler(getattr(updater, "loss_scaler", None), saved["loss_scaler"])
        put()
        if counts:
            optimizer.restore(counts)
        for name, value in saved["updater"].items():
            if value != getattr(updater, name, ...):
                setattr(updater, name, value)
    return matching.skipped


def restore_states(updater: Stateful, tree: Any) -> None:
    """Restore `updater` from states by index, with the optimizer or None.

    Raises
    ------
    CheckpointError
        The states do not match the optimizer. Nothing has changed.
    """
    check_outside(updater)
    with updater.optimizer.call_lock:
        with refusing("not the states of an updater: "):
            match tree:
                case {"states": dict(states), "optimizer": None | Optimizer() as made, **rest} if (
                    rest.keys() <= {"groups", *PROGRESS}
                ):
                    own = made or updater.optimizer
                    put = checked(updater, own, states, tree, lambda key: key, lambda value: value)
                case _:
                    raise CheckpointError(
                        "not the states of an updater, which get_states() makes; load() reads "
                        "files of save()"
                    )
        put()
        if made is not None:
            updater.optimizer.param_dict = {}  # as in MXNet, where it is a new optimizer


def checked(
    updater: Stateful,
    optimizer: Optimizer,
    states: dict[Index, Any],
    saved: Mapping[str, Any],
    index: Callable[[Index], Index | None],
    attribute: Callable[[Any], Any],
) -> Callable[[], None]:
    """Check what an updater shall have, and return a function that gives it that.

    Parameters
    ----------
    updater : Updater
        The updater.
    optimizer : Optimizer
        The optimizer whose attributes it shall have.
    states : dict
        The states by the updater's indices.
    saved : mapping
        The checkpoint, with ``groups``, ``accumulation`` and ``averages`` where it has them.
    index, attribute : callable
        Return the updater's index for a key of the checkpoint, None if it has none, and an
        attribute of an optimizer with the updater's indices.

    Raises
    ------
    CheckpointError
        Something does not fit together.
    """
    groups = updater.groups
    if "groups" in saved:
        groups = restored_groups(saved["groups"], groups, attribute)
    average, found = getattr(updater, "average", None), None
    if average is not None and saved.get("averages") is not None:
        average = rebuilt_average(saved["averages"]["average"])
    if groups:
        with refusing(""):
            found = Groups(groups, optimizer)
            if average is not None:
                found.check_average(average)
    check_states(optimizer, states, found)
    restore_progress = checked_progress(updater, saved, index)

    def put() -> None:
        for state in states.values():
            renew(leaves(state))
        updater.states_synced = dict.fromkeys(states, False)
        updater.states = states
        present = updater.groups
        if "groups" in saved:
            updater.groups = None  # the present groups need not match the new optimizer
        own = in_place(updater.optimizer, optimizer)
        if own is not updater.optimizer:
            updater.optimizer = own
        if "groups" in saved:
            updater.groups = with_present(groups, present)
        restore_progress()

    return put


def _check_fields(saved: Any, optimizer: str) -> None:
    if isinstance(saved, dict) and "ranks" in saved:
        raise CheckpointError("it was saved by ranks; load() reads all of its files")
    if not isinstance(saved, dict) or set(saved) - {"groups", *PROGRESS} != set(FIELDS):
        problem = "not the checkpoint of an updater, as save() or state_dict() return it"
        if isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}:
            problem += "; fastopt.checkpoint.from_torch_state_dict() loads a torch state_dict"
        elif isinstance(saved, (str, PathLike)):
            problem += f", got {saved!r}; load(path) reads a file"
        elif not isinstance(saved, dict):
            problem += f", got {brief(saved)}"
        raise CheckpointError(problem)
    for field, kind in FIELDS.items():
        if not isinstance(saved[field], kind):
            raise CheckpointError(f"{field!r} is of type {type(saved[field]).__name__}")
    if saved["optimizer"] != optimizer:
        raise CheckpointError(
            f"it was saved with {saved['optimizer']}, the updater has {optimizer}"
        )
    keys = saved["parameters"]
    if len(set(keys.values())) < len(keys) or not keys.keys() >= saved["states"].keys():
        raise CheckpointError("its states do not belong to its parameters")
    for index in keys.values():
        if not isinstance(index, (int, str)) or isinstance(index, bool):
            raise CheckpointError(f"an index must be an integer or a string, got {index!r}")
    if not set(saved["updater"]) <= set(SETTINGS):
        raise CheckpointError(f"unknown settings {list(saved['updater'])}")
    for name, value in saved["updater"].items():
        if value is not None or name == "clip_adaptive_eps":
            number(name, value, least=0)


def _states(
    saved: Mapping[str, Any], matching: Matching, updater: Stateful
) -> Iterator[tuple[Index, Any]]:
    """Current index and saved state of each parameter that both sides have."""
    for key, state in saved["states"].items():
        index = matching.index.get(saved["parameters"][key])
        if index is None:
            continue
        message = f"state of {label(index, updater.optimizer.idx2name)}"
        for one, other in _pairs(state, updater.states.get(index)):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise CheckpointError(
                    f"{message} has an array of shape {one.shape} and dtype {one.dtype}, "
                    f"where the updater has {other.shape} and {other.dtype}"
                )
        yield index, state


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of arrays at the same position in two states, where their nesting is the same."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        yield one, other
    elif isinstance(one, (tuple, list)) and type(one) is type(other) and len(one) == len(other):
        for part, its in zip(one, other, strict=True):
            yield from _pairs(part, its)


def _attributes(
    saved: Mapping[str, Any], matching: Matching, optimizer: Optimizer
) -> dict[str, Any]:
    """Saved attributes, mapped to the current indices and names."""
    for name, value in saved.items():
        if isinstance(vars(optimizer).get(name), Mapping) and not isinstance(value, Mapping):
            raise CheckpointError(f"{name} must be a table, got {value!r}")
    attributes = {name: matching.attribute(value) for name, value in saved.items()}
    for name in ("lr_mult", "wd_mult"):
        own = {k: v for k, v in getattr(optimizer, name).items() if k in matching.fresh}
        attributes[name] = own | matching.table(saved[name])
    attributes["idx2name"] = matching.table(saved["idx2name"]) | optimizer.idx2name
    attributes["_index_update_count"] = matching.table(saved["_index_update_count"])
    if is_kept(attributes["lr_scheduler"]):
        attributes["lr_scheduler"], attributes["lr"] = optimizer.lr_scheduler, optimizer.lr
    return attributes


def _restore_scaler(scaler: LossScaler | None, saved: dict[str, Any] | None) -> None:
    if scaler is not None and saved is not None:
        with refusing("the state of the loss scaler does not fit: "):
            scaler.load_state_dict(saved)
    elif saved is not None:
        warn_user("the checkpoint has the state of a loss scaler, the updater has none to take it")
    elif scaler is not None:
        warn_user("the checkpoint has no state of a loss scaler, that of the updater is kept")
