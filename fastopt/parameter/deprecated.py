"""Deprecated names: ``ctx`` for ``device``."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(old: str, new: str) -> None:
    """Warn that a name is deprecated; the warning points at the caller's caller."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def ctx_is_device(function: Callable[P, R]) -> Callable[P, R]:
    """Accept ``ctx=`` as a deprecated alias of the argument `device`.

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
