"""Restoring an updater from a checkpoint: first everything is checked, then all of it changes."""

import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from fastopt._engine.validate import label, leaves
from fastopt._kernels.codes import renew
from fastopt.arguments import brief, flag, number
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.objects import KEPT, is_kept, rebuilt
from fastopt.checkpoint.restore.describe import SETTINGS, Stateful
from fastopt.checkpoint.restore.fitting import check_states
from fastopt.checkpoint.restore.groups import check_average, restored_groups, with_present
from fastopt.checkpoint.restore.parameters import Matching, Skipped, keys_of, match, names_of
from fastopt.checkpoint.restore.progress import PROGRESS, check_outside, checked_progress
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
        try:
            _check_fields(saved, type(optimizer).__name__)
            present = keys_of(names_of(optimizer), updater.states)
            matching = match(saved["parameters"], present)
            _check_strict(matching.skipped, strict)
            states = dict(_states(saved, matching, updater))
            attributes = _attributes(saved["attributes"], matching, optimizer)
            rebuilt_optimizer = rebuilt(type(optimizer), attributes, optimizer)
            groups = updater.groups
            if "groups" in saved:
                groups = restored_groups(saved["groups"], groups, matching.attribute)
            check_states(rebuilt_optimizer, states, groups)
            present_of = {k: matching.index.get(i) for k, i in saved["parameters"].items()}
            average = getattr(updater, "average", None)
            check_average(rebuilt_optimizer, groups, average, saved.get("averages"))
            restore_progress = checked_progress(updater, saved, present_of)
        except CheckpointError:
            raise
        except Exception as error:  # an invalid checkpoint can raise anything
            raise CheckpointError(f"not the checkpoint of an updater: {error}") from error
        for state in states.values():
            renew(leaves(state))
        for message in _left_alone(updater, saved):
            warnings.warn(message, stacklevel=3)
        _restore_scaler(updater, saved["loss_scaler"])
        optimizer.restore_from(rebuilt_optimizer)
        if "groups" in saved:
            updater.groups = with_present(groups, updater.groups)
        updater.states_synced = dict.fromkeys(states, False)
        updater.states = states
        for name, value in saved["updater"].items():
            setattr(updater, name, value)
        restore_progress()
    return matching.skipped


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


def _check_strict(skipped: Skipped, strict: bool) -> None:
    if strict and any(skipped):
        raise CheckpointError(
            f"the parameters differ: the checkpoint lacks {skipped.missing} and has "
            f"{skipped.extra} in addition; strict=False loads what both have"
        )


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


def _left_alone(updater: Stateful, saved: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about parts of the updater or the checkpoint that are not restored."""
    if is_kept(saved["attributes"]["lr_scheduler"]):
        yield KEPT
    scaler = getattr(updater, "loss_scaler", None)
    if scaler is None and saved["loss_scaler"] is not None:
        yield "the checkpoint has the state of a loss scaler, the updater has none to take it"
    if scaler is not None and saved["loss_scaler"] is None:
        yield "the checkpoint has no state of a loss scaler, that of the updater is kept"


def _restore_scaler(updater: Stateful, saved: dict[str, Any] | None) -> None:
    scaler = getattr(updater, "loss_scaler", None)
    if scaler is None or saved is None:
        return
    try:
        scaler.load_state_dict(saved)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of the loss scaler does not fit: {error}") from error
