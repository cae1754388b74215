"""Arguments of optimizers about learning rates and multipliers, and their checks."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from fastopt._engine.per_index import Index
from fastopt.arguments import Real, Stored, brief, number
from fastopt.lr_scheduler.base import Schedule

Rate = float | Schedule | None
"""A learning rate or a schedule."""

RateAttribute = Stored[float, Rate]
LazyAttribute = Stored[bool, bool | None]

RATE = Real(least=0)

SMALLEST_RATE = float(np.finfo(np.float32).tiny)


def check_parameters(param_idx2name: Any, param_dict: Any, sym: Any) -> None:
    """Raise TypeError unless arguments that describe the parameters have the right types."""
    if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
        raise TypeError(f"param_idx2name must map indices to names, got {param_idx2name!r}")
    for index, name in (param_idx2name or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"param_idx2name[{index!r}] must be a name, got {name!r}")
    if param_dict is not None and not isinstance(param_dict, Mapping):
        raise TypeError(f"param_dict must map indices to parameters, got {brief(param_dict)}")
    if not (sym is None or (hasattr(sym, "attr_dict") and hasattr(sym, "list_arguments"))):
        raise TypeError(f"sym must have attr_dict() and list_arguments(), got {sym!r}")


def check_schedule(name: str, lr_scheduler: Any) -> Any:
    """Return a schedule or None; raise TypeError for anything that cannot be called."""
    if lr_scheduler is None or (callable(lr_scheduler) and not isinstance(lr_scheduler, type)):
        return lr_scheduler
    got = brief(lr_scheduler)
    if isinstance(lr_scheduler, type):
        got = f"the class {lr_scheduler.__name__}: pass an instance"
    raise TypeError(f"{name} must be a function of the number of updates, got {got}")


def check_rate(name: str, lr: Any) -> float:
    """Return a learning rate; raise unless it is a finite number, at least 0."""
    if callable(lr):
        raise TypeError(f"{name} must be a number; assign a schedule to lr_scheduler")
    if isinstance(lr, (int, float)) and lr < 0:
        must = f"{name} must be a finite number, at least 0, got {lr}"
        raise ValueError(f"{must}; maximize=True ascends")
    return RATE(name, lr)


def largest_rate(name: str, value: Any) -> float:
    """Check the learning rate that others are divided by."""
    rate = number(name, value)
    if rate < SMALLEST_RATE:
        raise ValueError(
            f"{name} must be the largest learning rate, above 0, or None for uncorrected decay, "
            f"got {brief(value)}"
        )
    return rate


def check_sym_info(name: str, value: Any) -> Any:
    """Check `sym_info`: an empty tuple, or the attributes and argument names of a symbol."""
    if isinstance(value, tuple) and len(value) in (0, 2):
        attributes, names = value or ({}, [])
        if isinstance(attributes, Mapping) and isinstance(names, (list, tuple)):
            for key in names:
                for multiplier in ("__lr_mult__", "__wd_mult__"):
                    number(f"{name}[{key!r}]", float(attributes.get(key, {}).get(multiplier, 1)))
            return value
    raise TypeError(f"{name} must be a pair of attributes and names, got {brief(value)}")


class ScheduledRateError(RuntimeError, UserWarning):
    """The learning rate of an optimizer with a schedule cannot be set.

    It is also a UserWarning, which is what MXNet raises.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> made = optimizer.SGD(lr_scheduler=lambda n: 0.1)
    >>> try:
    ...     made.set_learning_rate(0.2)
    ... except optimizer.ScheduledRateError:
    ...     print(made.learning_rate)
    0.1
    """


def endings(*words: str) -> tuple[str, ...]:
    """Return the suffixes of names whose last part, after ``_``, ``.`` or ``/``, is in `words`."""
    return tuple(map("".join, product("_./", words)))


def multipliers(name: str, given: Mapping[Index, float]) -> dict[Index, float]:
    """Return a checked copy of a table of multipliers."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of multipliers, got {brief(given)}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in given.items()}
