"""Initializers from their names and texts."""

import inspect
import json
from typing import Any

__all__ = ["build", "initializer_registry"]

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
