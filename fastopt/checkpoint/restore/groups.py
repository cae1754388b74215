"""Conversion of an updater's groups to plain values, and back."""

from collections.abc import Callable, Mapping
from typing import Any

from fastopt._engine.planner import Planner
from fastopt.averages import Average
from fastopt.averages import rebuilt as rebuilt_average
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.objects import (
    KEEP,
    attributes_of,
    is_kept,
    is_registered,
    optimizer_class,
    rebuilt,
)
from fastopt.lr_scheduler.base import restored
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Index, Optimizer

Given = Mapping[str, Mapping[str, Any]]


def described_groups(groups: Given | None) -> dict[str, dict[str, Any]]:
    """Return groups in the form of a checkpoint: optimizers as class name and attributes."""
    described: dict[str, dict[str, Any]] = {}
    for pattern, given in (groups or {}).items():
        described[pattern] = own = dict(given)
        opt = own.pop("optimizer", None)
        if opt is not None:
            own["class"], own["attributes"] = type(opt).__name__, attributes_of(opt)
        schedule = own.get("lr_scheduler")
        if schedule is not None and not is_registered(schedule):
            own["lr_scheduler"] = KEEP
    return described


def restored_groups(
    saved: Any, present: Given | None, index: Callable[[Any], Any] = lambda value: value
) -> dict[str, dict[str, Any]]:
    """Rebuild groups from the result of :func:`described_groups`; the updater does not change.

    Parameters
    ----------
    saved : dict
        Result of :func:`described_groups`.
    present : mapping or None
        Current groups of the updater. They supply what cannot be saved: schedules that are plain
        functions, and classes that are not registered.
    index : callable, optional
        Maps the saved indices in an attribute of an optimizer to the updater's indices.

    Raises
    ------
    CheckpointError
        `saved` is invalid, or a schedule was not saved and `present` does not have it.
    """
    if not isinstance(saved, dict) or not all(isinstance(own, dict) for own in saved.values()):
        raise CheckpointError("its groups must be dicts by pattern")
    groups: dict[str, dict[str, Any]] = {}
    for pattern, own in saved.items():
        label, beside = f"groups[{pattern!r}]", (present or {}).get(pattern, {})
        groups[pattern] = group = dict(own)
        if is_kept(group.get("lr_scheduler")):
            if "lr_scheduler" not in beside:
                raise CheckpointError(
                    f"{label}: its lr_scheduler was not saved; give the updater "
                    "a group of that pattern with one"
                )
            group["lr_scheduler"] = beside["lr_scheduler"]
        if "class" not in group:
            continue
        name, attributes = group.pop("class"), group.pop("attributes", None)
        if not isinstance(attributes, dict) or "lr_scheduler" not in attributes:
            raise CheckpointError(f"{label}: it has no attributes of {name}")
        other = beside.get("optimizer")
        klass = optimizer_class(name, other)
        other = other if type(other) is klass else None
        attributes = {key: index(value) for key, value in attributes.items()}
        if is_kept(attributes["lr_scheduler"]):
            if other is None:
                raise CheckpointError(
                    f"{label}: the lr_scheduler of its {name} was not saved; "
                    "give the updater a group of that pattern with one"
                )
            attributes["lr_scheduler"] = other.lr_scheduler
        group["optimizer"] = rebuilt(klass, attributes, other)
    return groups


def in_place(present: Optimizer | None, saved: Optimizer) -> Optimizer:
    """Restore an optimizer, or if its class differs its schedule, in the present one's place."""
    if present is not None and type(present) is type(saved):
        if present is not saved:
            present.restore_from(saved)
        return present
    if present is not None:
        saved.lr_scheduler = restored(present.lr_scheduler, saved.lr_scheduler)
    return saved


def with_present(groups: Given | None, present: Given | None) -> Given:
    """Replace restored optimizers and schedules by the current ones, which get their attributes."""
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, own in (groups or {}).items():
        now: Mapping[str, Any] = (present or {}).get(pattern, {})
        found[pattern] = group = dict(own)
        if isinstance(own.get("optimizer"), Optimizer):
            group["optimizer"] = in_place(now.get("optimizer"), own["optimizer"])
        if "lr_scheduler" in own:
            group["lr_scheduler"] = restored(now.get("lr_scheduler"), own["lr_scheduler"])
    return found


def optimizers_of(optimizer: Optimizer, groups: Given | None) -> Callable[[Index], Optimizer]:
    """Return a function that maps an index to its optimizer.

    Raises
    ------
    CheckpointError
        The groups do not match the optimizer.
    """
    if not groups:
        return lambda index: optimizer
    try:
        return Groups(groups, Planner(optimizer)).optimizer_of
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def check_average(
    optimizer: Optimizer, groups: Given | None, average: Average | None, saved: Any
) -> None:
    """Raise CheckpointError unless the weights of all groups can be averaged.

    `average` is the updater's average, `saved` are the averages in the checkpoint.
    """
    if not groups or average is None:
        return
    averages = [average, *([] if saved is None else [rebuilt_average(saved["average"])])]
    try:
        for each in averages:
            Groups(groups, Planner(optimizer)).check_average(each)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
