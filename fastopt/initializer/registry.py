"""Registry of initializer classes."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from fastopt.initializer.base import Initializer
from fastopt.initializer.text import Filler, build, initializer_registry

Init = str | Initializer | Filler
Class = TypeVar("Class", bound=type[Initializer])


def register(klass: Class) -> Class:
    """Register a class under its lower-case name; a decorator.

    Parameters
    ----------
    klass : type
        Subclass of :class:`Initializer`. Replacing a class of the same name warns.

    Raises
    ------
    TypeError
        `klass` is not a subclass of :class:`Initializer`.

    Examples
    --------
    >>> from fastopt import initializer
    >>> @initializer.register
    ... @initializer.alias("half")
    ... class Halves(initializer.Initializer):
    ...     def _init_weight(self, desc, arr):
    ...         arr[...] = 0.5
    >>> initializer.create("halves"), initializer.create("half")
    (Halves(), Halves())
    """
    _enter(getattr(klass, "__name__", ""), klass)
    return klass


def alias(*names: str) -> Callable[[Class], Class]:
    """Register a class under additional names; a decorator like :func:`register`.

    Parameters
    ----------
    *names : str
        Names, case-insensitive.

    Raises
    ------
    TypeError
        A name is not a string, or the class is not a subclass of :class:`Initializer`.

    Examples
    --------
    >>> from fastopt import initializer
    >>> @initializer.register
    ... @initializer.alias("sevens")
    ... class Seven(initializer.Initializer):
    ...     def _init_weight(self, desc, arr):
    ...         arr[...] = 7
    >>> type(initializer.create("sevens")).__name__
    'Seven'
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be strings, got {names!r}")

    def enter(klass: Class) -> Class:
        for name in names:
            _enter(name, klass)
        return klass

    return enter


def _enter(name: str, klass: object) -> None:
    if not (isinstance(klass, type) and issubclass(klass, Initializer)):
        raise TypeError(f"only subclasses of Initializer can be registered, got {klass!r}")
    old = initializer_registry.get(name.lower(), klass)
    if old is not klass:
        warnings.warn(f"{klass!r} replaces {old!r} in initializer_registry", stacklevel=3)
    initializer_registry[name.lower()] = klass


def create(name: str | Initializer, **kwargs: Any) -> Initializer:
    """Create an initializer from its registered name or its text.

    Parameters
    ----------
    name : str or Initializer
        Case-insensitive name of a registered class, or the result of :meth:`Initializer.dumps`.
        An initializer is returned unchanged.
    **kwargs
        Arguments of the class; they override those of the text.

    Raises
    ------
    ValueError
        No class of that name is registered, or the text does not describe an initializer.
    TypeError
        The class does not accept an argument, or `name` has another type.

    Examples
    --------
    >>> from fastopt import initializer
    >>> initializer.create("he_normal", rng=0), initializer.create('["normal", {"sigma": 0.5}]')
    (HeNormal(truncated=True), Normal(sigma=0.5))
    """
    if isinstance(name, Initializer):
        if kwargs:
            raise TypeError(f"{name!r} is an instance and takes no {', '.join(kwargs)}")
        return name
    if not isinstance(name, str):
        raise TypeError(f"name must be a string or an Initializer, got {name!r}")
    made: Initializer = build(name, **kwargs)
    return made
