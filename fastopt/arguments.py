"""Checks of arguments, with errors that name the argument, what it must be and what it is."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

__all__ = ["brief", "choice", "count", "flag", "number"]

LENGTH = 100
"""Characters of a value that a message quotes."""


def brief(value: Any) -> str:
    """Return the value as messages quote it: on one line, and the beginning of a long one."""
    words = " ".join(repr(value).split())
    return words if len(words) <= LENGTH else f"{words[:LENGTH]}..."


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
) -> float:
    """Return `value` as a float if it is a number from `least` to `most` and less than `below`.

    Raises
    ------
    TypeError
        `value` is not a real number.
    ValueError
        `value` is NaN, out of range, or infinite where that is not asked for.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {brief(value)}")
    exact = float(value)
    if math.isinf(exact) and infinite:
        return exact
    if math.isfinite(exact) and least <= exact <= most and exact < below:
        return exact
    limits = [f"at least {least}"] * (least > -math.inf)
    limits += [f"at most {most}"] * (most < math.inf) + [f"below {below}"] * (below < math.inf)
    kind = "a number" if infinite else "a finite number"
    raise ValueError(f"{name} must be {', '.join([kind, *limits])}, got {value}")


def count(name: str, value: Any, *, least: int = 1) -> int:
    """Return `value` as an int if it is an integer of at least `least`.

    Raises
    ------
    TypeError
        `value` is not an integer.
    ValueError
        `value` is less than `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {brief(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def choice(name: str, value: str, *choices: str) -> str:
    """Return `value` if it is one of `choices`, else raise ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {brief(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool if it is True or False, else raise TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")
    return bool(value)
