"""A dictionary that calls a function when it changes.

Tests: ``tests/engine/test_per_index.py``.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["Tracked", "weakly"]


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method while its object lives, by weak reference."""
    reference = WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


class Tracked(dict[Any, Any]):
    """Dictionary that calls a function after each change; it pickles and copies as a plain dict.

    Parameters
    ----------
    items : mapping
        Initial items.
    changed : callable
        Bound method without arguments; its object is not kept alive.
    """

    __slots__ = ("changed",)

    def __init__(self, items: Any, changed: Callable[[], None]) -> None:
        super().__init__(items)
        self.changed = weakly(changed)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


def _tracked(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def write(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.changed()

    write.__name__, write.__doc__ = name, method.__doc__
    return write


for _name in ("__setitem__", "__delitem__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Tracked, _name, _tracked(_name))
