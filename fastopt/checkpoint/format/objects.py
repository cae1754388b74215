"""Conversion of optimizers, schedules and groups to class names and attributes, and back."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastopt._notices import warn_user
from fastopt.arguments import Checked
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.lr_scheduler import LRScheduler, scheduler_registry
from fastopt.lr_scheduler.base import restored
from fastopt.optimizer.optimizer import Optimizer

Given = Mapping[str, Mapping[str, Any]]
"""Groups as the user gives them."""

Kind = TypeVar("Kind", bound=Checked)

TABLES = dict, Mapping
"""Types of tables; most are dicts, which is checked faster."""

PLAIN = frozenset({type(None), bool, int, float, str})

KEEP = "<keep the present schedule>"
"""Placeholder for a schedule that cannot be saved."""

KEPT = (
    "the saved learning-rate schedule is not of a registered class; the present one is kept: if "
    "there is none, assign it"
)


def is_kept(schedule: object) -> bool:
    """Whether `schedule` is the placeholder for one that could not be saved."""
    return isinstance(schedule, str) and schedule == KEEP


def is_registered(schedule: object) -> bool:
    """Whether the class of `schedule` is registered, so that it can be saved by name."""
    return scheduler_registry.get(type(schedule).__name__) is type(schedule)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes to save: those of ``__getstate__``, with unregistered schedules replaced."""
    attributes = dict(optimizer.__getstate__())
    schedule = attributes["lr_scheduler"]
    if schedule is not None and not is_registered(schedule):
        attributes["lr_scheduler"] = KEEP
    counts = attributes["_index_update_count"]
    attributes["_index_update_count"] = {index: int(count) for index, count in counts.items()}
    return attributes


def rebuilt(klass: type[Kind], attributes: Mapping[str, Any], present: object) -> Kind:
    """Create an instance of a class from attributes, without calling ``__init__``.

    Classes of this package accept the attributes that they declare, and attributes that the user
    has set on `present`, an instance of the same class. Other classes accept any attributes, and
    their own arguments that are missing take their defaults, with a warning.

    Raises
    ------
    CheckpointError
        An attribute is not accepted, or a value is invalid.
    """
    attributes = _with_defaults(klass, attributes)
    for name in attributes.keys() - klass._described_attributes():
        if not _is_attribute(klass, name):
            raise CheckpointError(f"{klass.__name__} cannot store an attribute {name!r}")
    present_attributes = vars(present) if type(present) is klass else {}
    strange = sorted(attributes.keys() - klass._described_attributes() - present_attributes.keys())
    if strange and _is_ours(klass):
        raise CheckpointError(
            f"{klass.__name__} has no attribute {', '.join(strange)}; set it before a load if it "
            "is your own"
        )
    with refusing(f"{klass.__name__}: "):
        instance = klass.__new__(klass)
        restore = getattr(instance, "__setstate__", instance.__dict__.update)
        restore(klass._checked_attributes(attributes))
        instance.check_together()
    return instance


def _with_defaults(klass: type[Checked], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults of missing arguments that a user's class declares, and warn."""
    ours = next(base for base in klass.__mro__ if _is_ours(base) and issubclass(base, Checked))
    late = {
        argument.stored or name: argument.default
        for name, argument in klass.declared.items()
        if argument.init and not argument.names and name not in ours.declared
        if (argument.stored or name) not in attributes
    }
    if not late:
        return attributes
    defaults = ", ".join(f"{name}={value!r}" for name, value in late.items())
    warn_user(f"the saved {klass.__name__} lacks arguments, which take their defaults: {defaults}")
    return {**late, **attributes}


def new_counts(optimizer: Optimizer, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the update counts among attributes that do not differ from the optimizer's otherwise.

    None if they do differ. Rolling back and averaging many clients change nothing else in an
    optimizer, whose attributes need no check then.

    Raises
    ------
    CheckpointError
        A count is invalid.
    """
    present = vars(optimizer)
    kept = present.keys() - optimizer.transient - {"param_dict"}
    if attributes.keys() != kept | {*optimizer.in_arrays}:
        return None
    counts = {"_index_update_count", *optimizer.in_arrays}
    for name in kept - counts:
        if present[name] is not attributes[name] and not _same(present[name], attributes[name]):
            return None
    with refusing(f"{type(optimizer).__name__}: "):
        return {name: optimizer._progress[name](name, attributes[name]) for name in counts}


def _same(one: object, other: object) -> bool:
    """Whether two values are equal, except arrays and what holds them."""
    if type(other) in PLAIN:
        same = type(one) is type(other) and one == other
        return same and bool(one or repr(one) == repr(other))  # 0.0 is not -0.0
    if isinstance(one, TABLES) and isinstance(other, TABLES):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return (
        isinstance(one, LRScheduler)
        and type(one) is type(other)
        and _same(*map(vars, (one, other)))
    )


def _is_attribute(klass: type[Checked], name: object) -> bool:
    """Whether an instance attribute may have this name.

    It may override a default in a user's class, but no method, and nothing defined in this package.
    """
    if not isinstance(name, str) or name.startswith("__"):
        return False
    if name in getattr(klass, "in_arrays", ()):
        return True
    if name in klass.transient or name == "param_dict":
        return False
    value = getattr(klass, name, None)
    if callable(value) or hasattr(type(value), "__get__"):
        return False
    return not any(name in vars(base) for base in klass.__mro__ if _is_ours(base))


def _is_ours(klass: type) -> bool:
    return klass.__module__.partition(".")[0] == "fastopt"


def optimizer_class(name: object, present: Optimizer | None) -> type[Optimizer]:
    """Class with a name: the current optimizer's class, or a registered one."""
    registered: type | None = Optimizer.opt_registry.get(str(name).lower())
    for klass in (type(present), registered):
        if klass is not None and klass.__name__ == name and issubclass(klass, Optimizer):
            return klass
    raise CheckpointError(f"optimizer class {name} is not registered")


def schedule_class(name: str) -> type[LRScheduler]:
    """Registered schedule class with a name."""
    if name not in scheduler_registry:
        raise CheckpointError(f"schedule class {name} is not registered")
    return scheduler_registry[name]


# Groups


def described_groups(groups: Given | None) -> dict[str, dict[str, Any]]:
    """Return groups in the form of a checkpoint: optimizers as class name and attributes."""
    described: dict[str, dict[str, Any]] = {}
    for pattern, group in (groups or {}).items():
        described[pattern] = description = dict(group)
        opt = description.pop("optimizer", None)
        if opt is not None:
            description["class"], description["attributes"] = type(opt).__name__, attributes_of(opt)
        schedule = description.get("lr_scheduler")
        if schedule is not None and not is_registered(schedule):
            description["lr_scheduler"] = KEEP
    return described


def restored_groups(
    saved: object, present: Given | None, index: Callable[[Any], Any]
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
    if not isinstance(saved, dict) or not all(
        isinstance(description, dict) for description in saved.values()
    ):
        raise CheckpointError("its groups must be dicts by pattern")
    groups: dict[str, dict[str, Any]] = {}
    for pattern, description in saved.items():
        label, beside = f"groups[{pattern!r}]", (present or {}).get(pattern, {})
        groups[pattern] = group = dict(description)
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


def _put_schedule(context: str, group: dict[str, Any], present: Mapping[str, Any]) -> None:
    """Put the present schedule in the place of one that was not saved."""
    if is_kept(group.get("lr_scheduler")):
        if "lr_scheduler" not in present:
            raise CheckpointError(
                f"{context} not saved; give the updater a group of that pattern with one"
            )
        group["lr_scheduler"] = present["lr_scheduler"]


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
    result: dict[str, Mapping[str, Any]] = {}
    for pattern, description in (groups or {}).items():
        now: Mapping[str, Any] = (present or {}).get(pattern, {})
        result[pattern] = group = dict(description)
        if isinstance(description.get("optimizer"), Optimizer):
            group["optimizer"] = in_place(now.get("optimizer"), description["optimizer"])
        if "lr_scheduler" in description:
            group["lr_scheduler"] = restored(now.get("lr_scheduler"), description["lr_scheduler"])
    return result
