"""Old spellings: what was a context is a device."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["ctx_is_device", "renamed"]

P = ParamSpec("P")
R = TypeVar("R")


def renamed(old: str, new: str) -> None:
    """Warn the caller of the caller that a name is deprecated."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def ctx_is_device(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with an argument `device` take it as ``ctx=`` too, with a warning.

    Raises
    ------
    TypeError
        Both are given.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "ctx" in kwargs:
            renamed("ctx", "device")
            if "device" in kwargs:
                raise TypeError("device is given twice, as device and as ctx")
            kwargs["device"] = kwargs.pop("ctx")
        return function(*args, **kwargs)

    return call
