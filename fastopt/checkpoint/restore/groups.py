"""Conversion of an updater's groups to plain values, and back."""

from collections.abc import Callable, Mapping
from typing import Any

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
from fastopt.optimizer.optimizer import Optimizer

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
    saved: Any, present: Given | None, index: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Rebuild groups from the result of :func:`described_groups`; the updater does not change.

    Parameters
    ----------
    saved : dict
        Result of :func:`described_groups`.
    present : mapping or None
        Current groups of the updater. They supply what cannot be saved: schedules that are plain
        functions, and classes that are not registered.
    index : callable
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
        _put_schedule(f"{label}: its lr_scheduler was", group, beside)
        if "class" not in group:
            continue
        name, attributes = group.pop("class"), group.pop("attributes", None)
        if not isinstance(attributes, dict) or "lr_scheduler" not in attributes:
            raise CheckpointError(f"{label}: it has no attributes of {name}")
        other = beside.get("optimizer")
        klass = optimizer_class(name, other)
        other = other if type(other) is klass else None
        attributes = {key: index(value) for key, value in attributes.items()}
        own_schedule = {} if other is None else {"lr_scheduler": other.lr_scheduler}
        _put_schedule(f"{label}: the lr_scheduler of its {name} was", attributes, own_schedule)
        group["optimizer"] = rebuilt(klass, attributes, other)
    return groups


def _put_schedule(context: str, own: dict[str, Any], present: Mapping[str, Any]) -> None:
    """Put the present schedule in the place of one that was not saved."""
    if is_kept(own.get("lr_scheduler")):
        if "lr_scheduler" not in present:
            raise CheckpointError(
                f"{context} not saved; give the updater a group of that pattern with one"
            )
        own["lr_scheduler"] = present["lr_scheduler"]


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
