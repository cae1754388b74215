"""Restoring an updater from a checkpoint: first everything is checked, then all of it changes."""

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from fastopt._engine.averaging import Averages
from fastopt._engine.clip import LIMITS
from fastopt._engine.mixed_precision import holds_master
from fastopt._engine.validate import label, leaves
from fastopt._kernels.codes import is_coded, scales_shape, split_scales
from fastopt._notices import warn_user
from fastopt.amp import LossScaler
from fastopt.arguments import ArrayOf, brief, count, flag
from fastopt.averages import Average
from fastopt.averages import rebuilt as rebuilt_average
from fastopt.checkpoint.format import objects
from fastopt.checkpoint.format.container import Array
from fastopt.checkpoint.format.errors import CheckpointError, check_types, refusing
from fastopt.checkpoint.restore.describe import PROGRESS, Stateful, copied, foreign_part
from fastopt.checkpoint.restore.parameters import Matching, Skipped, keys_of, match, names_of
from fastopt.kernels.rule import Rule
from fastopt.optimizer.accumulation import Windows
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Index, Optimizer
from fastopt.sparse import RowSparse

FIELDS: dict[str, Any] = {"optimizer": str, "loss_scaler": (dict, type(None))}
FIELDS |= dict.fromkeys(("attributes", "parameters", "states", "updater"), dict)

REALS = ArrayOf(("float32", "float64"))
SLOTS = ArrayOf((*REALS.dtypes, "bfloat16"))
MASTERS = ArrayOf(("float32", "uint16"))

Current = Callable[[Index], Index | None]
"""Function that returns the updater's index for a key of a checkpoint, or None."""


def check_outside(updater: Stateful) -> None:
    """Raise RuntimeError inside ``averaged()``."""
    averages = updater._averages
    if averages is not None and averages.inside:
        averages.check_free()


def restore(updater: Stateful, saved: Any, strict: bool, copies: bool = False) -> Skipped:
    """Restore `updater` from the result of :func:`~fastopt.checkpoint.restore.describe.describe`.

    The updater has the arrays of `saved` afterwards, or with `copies` its own.

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
            copy_of = copied if copies else lambda part: part
            index = {key: matching.index.get(i) for key, i in saved["parameters"].items()}
            saved_states = saved["states"]
            states = {
                i: copy_of(saved_states[k])
                for k, i in index.items()
                if i is not None and k in saved_states
            }
            rest = {
                name: copy_of(saved[name])
                for name in ("parameters", "groups", *PROGRESS)
                if name in saved
            }
            alike = "groups" not in rest and _are_alike(updater, states)
            if not alike:
                _check_like_present(updater, states)
            made, attributes = optimizer, saved["attributes"]
            same = not any(matching.skipped) and all(i == now for i, now in matching.index.items())
            counts = objects.new_counts(optimizer, attributes) if same else None
            if counts is None:
                attributes = _attributes(copy_of(attributes), matching, optimizer)
                made, alike = objects.rebuilt(type(optimizer), attributes, optimizer), False
            put = _checked(
                updater, made, states, rest, index.__getitem__, matching.attribute, alike
            )
        if objects.is_kept(saved["attributes"]["lr_scheduler"]):
            warn_user(objects.KEPT)
        _warn_of_settings(updater, saved["updater"], made)
        _restore_scaler(updater.loss_scaler, saved["loss_scaler"])
        put()
        if counts:
            _put_counts(optimizer, counts)
        for name, value in saved["updater"].items():
            if value != getattr(updater, name, ...):
                setattr(updater, name, value)
    return matching.skipped


def _warn_of_settings(updater: Stateful, settings: dict[str, Any], made: Optimizer) -> None:
    """Warn of clips and a schedule that a checkpoint without them turns off."""
    names, optimizer = ("clip_gradient", "lr_scheduler"), updater.optimizer
    off = [name for name, value in settings.items() if value is None]
    off = [name for name in off if getattr(updater, name, None) is not None]
    off += [n for n in names if getattr(made, n) is None and getattr(optimizer, n) is not None]
    if off:
        warn_user(
            f"the checkpoint was saved without {' and '.join(off)}, and the load turns "
            f"{'it' if len(off) == 1 else 'them'} off: assign after the load what is to differ"
        )


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
                    optimizer = made or updater.optimizer
                    put = _checked(
                        updater, optimizer, states, tree, lambda key: key, lambda value: value
                    )
                case _:
                    raise CheckpointError(
                        "not the states of an updater, which get_states() makes; load() reads "
                        "files of save()"
                    )
        put()
        if made is not None:
            updater.optimizer.param_dict = {}  # as in MXNet, where it is a new optimizer


def _checked(
    updater: Stateful,
    optimizer: Optimizer,
    states: dict[Index, Any],
    saved: Mapping[str, Any],
    index: Current,
    attribute: Callable[[Any], Any],
    alike: bool = False,
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
    alike : bool
        Whether the states have the form of the present ones, which updates have checked.

    Raises
    ------
    CheckpointError
        Something does not fit together.
    """
    groups = updater.groups
    if "groups" in saved:
        groups = objects.restored_groups(saved["groups"], groups, attribute)
    average, new_groups = updater.average, None
    if average is not None and saved.get("averages") is not None:
        average = rebuilt_average(saved["averages"]["average"])
    if groups:
        with refusing(""):
            new_groups = Groups(groups, optimizer)
            if average is not None:
                new_groups.check_average(average)
    if not alike:
        _check_states(optimizer, states, new_groups)
    restore_progress = _checked_progress(updater, saved, index)

    def put() -> None:
        updater._put_states(states, alike)
        present = updater.groups
        if "groups" in saved:
            updater.groups = None  # the present groups need not match the new optimizer
        restored = objects.in_place(updater.optimizer, optimizer)
        if restored is not updater.optimizer:
            updater.optimizer = restored
        if "groups" in saved:
            updater.groups = objects.with_present(groups, present)
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
    check_types(saved, FIELDS)
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
    if not saved["updater"].keys() <= LIMITS.keys():
        raise CheckpointError(f"unknown settings {list(saved['updater'])}")
    for name, value in saved["updater"].items():
        LIMITS[name](name, value)


def _check_like_present(updater: Stateful, states: Mapping[Index, Any]) -> None:
    """Compare arrays with those at the same positions of the present states."""
    for index, state in states.items():
        for one, other in _pairs(state, updater.states.get(index)):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise CheckpointError(
                    f"state of {label(index, updater.optimizer.idx2name)} has an array of shape "
                    f"{one.shape} and dtype {one.dtype}, where the updater has {other.shape} and "
                    f"{other.dtype}: for a weight of another shape load before the first step, "
                    "then delete its state from updater.states"
                )


def _pairs(one: object, other: object) -> Iterator[tuple[Any, Any]]:
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
        fresh = {k: v for k, v in getattr(optimizer, name).items() if k in matching.fresh}
        attributes[name] = fresh | matching.table(saved[name])
    attributes["idx2name"] = matching.table(saved["idx2name"]) | optimizer.idx2name
    attributes["_index_update_count"] = matching.table(saved["_index_update_count"])
    if objects.is_kept(attributes["lr_scheduler"]):
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


# States


def _are_alike(updater: Stateful, states: Mapping[Index, Any]) -> bool:
    """Whether an updater has states of the same form, and updates have checked them."""
    present = updater.states
    alike = states.keys() == present.keys() and updater._has_records()
    return alike and all(_is_like(state, present[index]) for index, state in states.items())


def _is_like(one: Any, other: Any) -> bool:
    """Whether two states are nested alike, of numbers with the same dtypes and shapes."""
    if type(one) is not type(other):
        return False
    if type(one) is np.ndarray:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.dtype.kind == "f"
    return one is None or (
        type(one) is tuple and len(one) == len(other) and all(map(_is_like, one, other))
    )


def _put_counts(optimizer: Optimizer, counts: Mapping[str, Any]) -> None:
    """Restore update counts, those of the same parameters where records know them."""
    present, saved = optimizer._index_update_count, counts["_index_update_count"]
    if len(saved) != len(present) or not all(index in present for index in saved):
        optimizer.restore(counts)
        return
    present.array[present.positions(list(saved))] = list(saved.values())
    for name in optimizer.in_arrays:
        object.__setattr__(optimizer, name, counts[name])  # no other attribute has changed


def _check_states(optimizer: Optimizer, states: Mapping[Index, Any], groups: Groups | None) -> None:
    """Check restored states before they are used, without knowing the weights.

    States of optimizers without a rule may contain anything that can be saved, except what their
    ``check_saved`` refuses.

    Raises
    ------
    CheckpointError
        The number of arrays in a state differs from the slots of the rule, or arrays have wrong
        dtypes or inconsistent shapes.
    """
    for index, state in states.items():
        context = f"state of {label(index, optimizer.idx2name)}"
        of_index = optimizer if groups is None else groups.optimizer_of(index)
        foreign = foreign_part(state)
        if foreign:
            raise CheckpointError(f"{context} holds something of type {foreign}")
        rule = of_index.rule_for(index) if of_index.native else None
        if rule is None:
            with refusing(f"{context}: "):
                of_index.check_saved(index, state)
            continue
        with refusing(""):
            slots = _check_arrays(context, rule, state, of_index)
        if slots:
            _check_kept(context, of_index, index, slots[0].shape)


def _check_arrays(context: str, rule: Rule, state: object, optimizer: Optimizer) -> list[Array]:
    """Check the arrays of a state, and return those of the rule's slots, without the master."""
    arrays, scales = split_scales(leaves(state))
    if not all(isinstance(array, np.ndarray) for array in arrays):
        raise CheckpointError(f"{context} must hold arrays, got {state!r:.100}")
    count = len(rule.slots)
    paired = optimizer.multi_precision and holds_master(rule, state)
    if len(arrays) != count and not paired:
        raise CheckpointError(
            f"{context} must have {count} arrays for rule {rule.name}, got {len(arrays)}"
        )
    master = arrays.pop(-1 if optimizer.master_last else 0) if paired else None
    for kept in arrays[len(rule.state) :]:
        SLOTS(context, kept)
        if kept.shape:
            raise CheckpointError(f"{context} must have one number for the tensor, got {kept!r}")
    arrays = arrays[: len(rule.state)]
    codes = rule.codes
    whole = arrays[0].shape if arrays else ()
    for (slot, shape), array in zip(rule.shapes(whole), arrays, strict=True):
        allowed = ArrayOf((*SLOTS.dtypes, codes[slot])) if slot in codes else SLOTS
        allowed(context, array)
        if array.shape != shape:
            raise CheckpointError(
                f"{context} has arrays of shapes {whole} and {array.shape}, slot {slot!r} must "
                f"have {shape}"
            )
    of = [array.shape for array in arrays if is_coded(array)]
    if [array.shape for array in scales] != list(map(scales_shape, of)):
        raise CheckpointError(f"{context} has codes of shapes {of}, whose scales do not fit")
    for array in scales:
        REALS(f"{context}: scales", array)
    if master is not None:
        MASTERS(f"{context}: master", master)
        if arrays and rule.state[0] not in rule.row_state and master.shape != arrays[0].shape:
            raise CheckpointError(
                f"{context} has shape {arrays[0].shape}, its master {master.shape}"
            )
    return arrays


def _check_kept(context: str, optimizer: Optimizer, index: Index, shape: tuple[int, ...]) -> None:
    """Check a parameter's deferred decay and sum of gradients against the shape of its state."""
    decay = optimizer.row_decay.get(index)
    if decay is not None and shape[:1] != decay[0].shape:
        raise CheckpointError(
            f"{context} has shape {shape}, the deferred decay of its rows {decay[0].shape}"
        )
    total = vars(optimizer).get("cumgrads", {}).get(index, {}).get("cum_grad")
    if total is None:
        return
    if isinstance(total, tuple):
        values, rows = total
        fits = shape[1:] == values.shape[1:] and (not len(rows) or rows.max() < (*shape, 0)[0])
        form = f"rows of shape {values.shape}"
    else:
        fits, form = total.shape == shape, f"shape {total.shape}"
    if not fits:
        raise CheckpointError(f"{context} has shape {shape}, the sum of its gradients has {form}")


# Gradient sums and averages


def _checked_progress(
    updater: Stateful, saved: Mapping[str, Any], index: Current
) -> Callable[[], None]:
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
    windows, averages = updater._windows, updater._averages
    sums = _checked_sums(saved.get("accumulation"), windows, index)
    checked = _checked_averages(saved, averages, index)

    def restore() -> None:
        if windows is not None:
            windows.restore(*sums)
        if averages is not None and checked is not None:
            updater.average = checked[0]
            averages.arrays, averages.held = checked[1:]
        elif averages is not None:
            averages.arrays, averages.held = {}, None

    return restore


def _checked_sums(
    saved: object, windows: Windows | None, index: Current
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
    present = 1 if windows is None else windows.every
    if present != every and saved["calls"]:
        raise CheckpointError(
            f"it was saved between two updates of accumulate={every}, the updater has "
            f"accumulate={present}"
        )
    if present != every:
        warn_user(
            f"the checkpoint was saved with accumulate={every}, the updater keeps "
            f"accumulate={present}"
        )
    for key, so_far in calls.items():
        count(f"calls[{key!r}]", so_far, most=every - 1)
        total = sums[key]
        REALS(f"sums[{key!r}]", total.values if isinstance(total, RowSparse) else total)
    return calls, sums


def _checked_averages(
    checkpoint: Mapping[str, Any], averages: Averages | None, index: Current
) -> tuple[Average, dict[Index, Any], dict[Index, Any] | None] | None:
    saved = checkpoint.get("averages")
    if saved is None:
        if averages is not None and checkpoint.get("parameters") != {}:
            warn_user("the checkpoint has no averages of weights, those of the updater start again")
        return None
    fields = {"average", "arrays", "weights_hold", "weights"}
    if not isinstance(saved, dict) or set(saved) != fields:
        raise CheckpointError(f"'averages' must have {', '.join(sorted(fields))}")
    average = rebuilt_average(saved["average"])
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


def _of_parameters(name: str, table: Mapping[Any, Any], index: Current) -> dict[Index, Any]:
    """Map the keys of a table to current indices; drop parameters that the updater lacks."""
    try:
        present = {index(key): value for key, value in table.items()}
    except (AttributeError, KeyError):
        raise CheckpointError(f"{name!r} must be a table of the saved parameters") from None
    return {key: value for key, value in present.items() if key is not None}
