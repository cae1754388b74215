"""Optimizers and schedules as the names of their classes and their attributes."""

from collections.abc import Mapping
from typing import Any

from fastopt.arguments import count, number
from fastopt.checkpoint.errors import CheckpointError
from fastopt.lr_scheduler import scheduler_registry
from fastopt.optimizer.base import Optimizer

__all__ = [
    "KEEP",
    "KEPT",
    "attributes_of",
    "check_attributes",
    "is_registered",
    "optimizer_class",
    "rebuilt",
    "schedule_class",
]

KEEP = "<keep the present schedule>"
"""Stands for a schedule that cannot be saved."""

KEPT = "the saved learning-rate schedule is not of a registered class; the present one is kept"


def is_registered(schedule: Any) -> bool:
    """Whether `schedule` can be saved by the name of its class."""
    return scheduler_registry.get(type(schedule).__name__) is type(schedule)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes to save: all that the optimizer's ``__getstate__`` gives."""
    attributes = dict(optimizer.__getstate__())
    schedule = attributes["lr_scheduler"]
    if schedule is not None and not is_registered(schedule):
        attributes["lr_scheduler"] = KEEP
    counts = attributes["_index_update_count"]
    attributes["_index_update_count"] = {index: int(count) for index, count in counts.items()}
    return attributes


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raise an exception unless the attributes that all optimizers have can be theirs."""
    for name in ("num_update", "begin_num_update", "seed"):
        count(name, attributes[name], least=0)
    for index, updates in attributes["_index_update_count"].items():
        count(f"the count of index {index!r}", updates, least=0)
    for table in ("lr_mult", "wd_mult"):
        for key, value in attributes[table].items():
            number(f"{table}[{key!r}]", value)
    if not all(isinstance(name, str) for name in attributes["idx2name"].values()):
        raise CheckpointError("idx2name must hold names")
    schedule = attributes["lr_scheduler"]
    if schedule is not None and not callable(schedule):
        raise CheckpointError(f"lr_scheduler cannot be {schedule!r}")


def rebuilt(klass: Any, attributes: Mapping[str, Any]) -> Any:
    """Instance of a class with these attributes, as :mod:`copy` makes one.

    Raises
    ------
    CheckpointError
        The attributes are not those of such an instance.
    """
    for name in attributes:
        if not isinstance(name, str) or callable(getattr(klass, name, None)):
            raise CheckpointError(f"{klass.__name__} cannot have an attribute {name!r} of its own")
    made = klass.__new__(klass)
    restore = getattr(made, "__setstate__", made.__dict__.update)
    restore(dict(attributes))
    return made


def optimizer_class(name: Any, present: Optimizer | None) -> type[Optimizer]:
    """Class of that name: the present optimizer's or a registered one."""
    for klass in (type(present), Optimizer.opt_registry.get(str(name).lower())):
        if klass is not None and klass.__name__ == name and issubclass(klass, Optimizer):
            return klass
    raise CheckpointError(f"optimizer class {name} is not registered")


def schedule_class(name: Any) -> Any:
    """Registered class of that name."""
    if name not in scheduler_registry:
        raise CheckpointError(f"schedule class {name} is not registered")
    return scheduler_registry[name]
