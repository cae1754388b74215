"""Conversion of optimizers and schedules to class names and attributes, and back."""

from collections.abc import Mapping
from typing import Any

from fastopt.arguments import Checked
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.lr_scheduler import LRScheduler, scheduler_registry
from fastopt.optimizer.optimizer import Optimizer

PLAIN = frozenset({type(None), bool, int, float, str})

KEEP = "<keep the present schedule>"
"""Placeholder for a schedule that cannot be saved."""

KEPT = "the saved learning-rate schedule is not of a registered class; the present one is kept"


def is_kept(schedule: Any) -> bool:
    """Whether `schedule` is the placeholder for one that could not be saved."""
    return isinstance(schedule, str) and schedule == KEEP


def is_registered(schedule: Any) -> bool:
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


def rebuilt(klass: type[Checked], attributes: Mapping[str, Any], present: Any) -> Any:
    """Create an instance of a class from attributes, without calling ``__init__``.

    Classes of this package accept the attributes that they declare, and attributes that the user
    has set on `present`, an instance of the same class. Other classes accept any attributes.

    Raises
    ------
    CheckpointError
        An attribute is not accepted, or a value is invalid.
    """
    for name in attributes.keys() - klass._described_attributes():
        if not _is_attribute(klass, name):
            raise CheckpointError(f"{klass.__name__} cannot store an attribute {name!r}")
    own = vars(present) if type(present) is klass else {}
    strange = sorted(attributes.keys() - klass._described_attributes() - own.keys())
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


def new_counts(optimizer: Optimizer, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the update counts among attributes that do not differ from the optimizer's otherwise.

    None if they do differ. Rolling back and averaging many clients change nothing else in an
    optimizer, whose attributes need no check then.

    Raises
    ------
    CheckpointError
        A count is invalid.
    """
    own = vars(optimizer)
    kept = own.keys() - optimizer.transient - {"param_dict"}
    if attributes.keys() != kept | {*optimizer.in_arrays}:
        return None
    counts = {"_index_update_count", *optimizer.in_arrays}
    for name in kept - counts:
        if own[name] is not attributes[name] and not _same(own[name], attributes[name]):
            return None
    with refusing(f"{type(optimizer).__name__}: "):
        return {name: optimizer._progress[name](name, attributes[name]) for name in counts}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, except arrays and what holds them."""
    if type(other) in PLAIN:
        same = type(one) is type(other) and one == other
        return same and bool(one or repr(one) == repr(other))  # 0.0 is not -0.0
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return (
        isinstance(one, LRScheduler)
        and type(one) is type(other)
        and _same(*map(vars, (one, other)))
    )


def _is_attribute(klass: type[Checked], name: Any) -> bool:
    """Whether an instance attribute may have this name.

    It may override a default in a user's class, but no method, and nothing defined in this package.
    """
    if not isinstance(name, str) or name.startswith("__"):
        return False
    if name in getattr(klass, "in_arrays", ()):
        return True
    if name in klass.transient or name == "param_dict":
        return False
    own = getattr(klass, name, None)
    if callable(own) or hasattr(type(own), "__get__"):
        return False
    return not any(name in vars(base) for base in klass.__mro__ if _is_ours(base))


def _is_ours(klass: type) -> bool:
    return klass.__module__.partition(".")[0] == "fastopt"


def optimizer_class(name: Any, present: Optimizer | None) -> type[Optimizer]:
    """Class with a name: the current optimizer's class, or a registered one."""
    registered: type | None = Optimizer.opt_registry.get(str(name).lower())
    for klass in (type(present), registered):
        if klass is not None and klass.__name__ == name and issubclass(klass, Optimizer):
            return klass
    raise CheckpointError(f"optimizer class {name} is not registered")


def schedule_class(name: Any) -> Any:
    """Registered schedule class with a name."""
    if name not in scheduler_registry:
        raise CheckpointError(f"schedule class {name} is not registered")
    return scheduler_registry[name]
