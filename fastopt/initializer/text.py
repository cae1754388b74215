"""Initializers from their names and texts."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from fastopt.initializer.arrays import Array

__all__ = ["Filler", "build", "filler", "initializer_registry"]

Filler = Callable[[str, Array], None]
"""What fills an array by name: an initializer, Load, Mixed, or a function."""

initializer_registry: dict[str, type[Any]] = {}
"""Classes by lower-case names."""


def build(text: str, **kwargs: Any) -> Any:
    """Make an initializer from its text or name; `kwargs` go before the text's arguments.

    Raises
    ------
    ValueError
        No class of that name is registered, or the text is not that of an initializer.
    TypeError
        The class does not take an argument.
    """
    name = text
    if text.startswith("["):
        name, said = _parsed(text)
        kwargs = {**said, **kwargs}
    klass = initializer_registry.get(name.lower())
    if klass is None:
        known = ", ".join(sorted(initializer_registry))
        raise ValueError(f"Cannot find initializer {name!r}; there are {known}")
    signature = inspect.signature(klass)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise TypeError(f"{klass.__name__} takes {known}; {error}") from None
    return klass(**kwargs)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a text."""
    try:
        name, kwargs = json.loads(text)
    except ValueError:
        name = kwargs = None
    if not (isinstance(name, str) and isinstance(kwargs, dict)):
        raise ValueError(f'the text of an initializer is ["name", {{arguments}}], got {text!r}')
    return name, kwargs


def filler(name: str, value: Any) -> Filler:
    """Return `value` if it fills arrays, or what it is the text or name of.

    Raises
    ------
    TypeError
        It is neither.
    """
    if isinstance(value, str):
        value = build(value)
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            f"{name} must be an initializer, its text or name, or a function of (name, array), "
            f"got {value!r}"
        )
    made: Filler = value
    return made
