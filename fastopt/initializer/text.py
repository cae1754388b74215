"""Creation of initializers from their names and texts."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from fastopt._advice import INITIALIZERS
from fastopt._suggestions import choices, closest
from fastopt.arguments import brief
from fastopt.initializer.arrays import Array

Filler = Callable[[str, Array], None]
"""Callable that fills an array by name: an initializer, Load, Mixed, or a function."""

initializer_registry: dict[str, type[Any]] = {}
"""Initializer classes by lower-case name."""


def build(text: str, **kwargs: Any) -> Any:
    """Create an initializer from its text or name; `kwargs` override the text's arguments.

    Raises
    ------
    ValueError
        No class of that name is registered, or the text does not describe an initializer.
    TypeError
        The class does not accept an argument.
    """
    name = text
    if text.startswith("["):
        name, saved = _parsed(text)
        kwargs = {**saved, **kwargs}
    klass = initializer_registry.get(name.lower())
    if klass is None:
        names = sorted(initializer_registry)
        advice = choices(INITIALIZERS.get(name.lower()) or closest(name, names), names)
        raise ValueError(f"Cannot find initializer {name!r}; {advice}")
    signature = inspect.signature(klass)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        hint = "; the seed is the argument rng" if "seed" in kwargs else ""
        raise TypeError(f"{klass.__name__} takes {known}; {error}{hint}") from None
    return klass(**kwargs)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text into name and arguments."""
    try:
        name, kwargs = json.loads(text)
    except ValueError:
        name = kwargs = None
    if not (isinstance(name, str) and isinstance(kwargs, dict)):
        raise ValueError(f'the text of an initializer is ["name", {{arguments}}], got {text!r}')
    return name, kwargs


def filler(name: str, value: object) -> Filler:
    """Return `value` if it is a callable, or the initializer whose text or name it is.

    Raises
    ------
    TypeError
        `value` is a class, or neither a callable nor a string.
    """
    if isinstance(value, str):
        value = build(value)
    if isinstance(value, type) or not callable(value):
        got = f"the class {value.__name__}: call it" if isinstance(value, type) else brief(value)
        raise TypeError(
            f"{name} must be an initializer, its text or name, or a function of (name, array), "
            f"got {got}"
        )
    function: Filler = value
    return function
