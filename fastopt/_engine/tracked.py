"""A dictionary that calls a function when it changes.

Tests: ``tests/engine/test_per_index.py``.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref


def weakly(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method while its object lives, by weak reference."""
    reference, function = ref(method.__self__), method.__func__  # as WeakMethod, but faster

    def call(*keys: object) -> None:
        owner = reference()
        if owner is not None:
            function(owner, *keys)

    return call


class Tracked(dict[Any, Any]):
    """Dictionary that calls a function after each change; it pickles and copies as a plain dict.

    Parameters
    ----------
    items : mapping, optional
        Initial items.
    changed : callable, optional
        Function of the key that has changed, or without arguments if several may have, such as
        that of :func:`weakly`.
    """

    __slots__ = ("changed",)

    def __init__(
        self, items: Mapping[Any, Any] = {}, changed: Callable[..., None] = lambda *keys: None
    ) -> None:
        super().__init__(items)
        self.changed = changed

    def __setitem__(self, key: object, value: object) -> None:
        if self.get(key, self) is not value:
            try:
                super().__setitem__(key, value)
            finally:
                self.changed(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


def _tracked(name: str) -> Callable[..., Any]:
    method, keys = getattr(dict, name), 0 if name in ("clear", "popitem", "update") else 1

    def write(self: Tracked, *args: object, **kwargs: object) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.changed(*args[:keys])

    write.__name__, write.__doc__ = name, method.__doc__
    return write


for _name in ("__delitem__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Tracked, _name, _tracked(_name))
