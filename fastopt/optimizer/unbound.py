"""Half-precision weights whose float32 master has not been passed to an updater yet."""

from typing import Any
from weakref import WeakValueDictionary

from fastopt._notices import warn_user

_unbound: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def expect_bind(weight: object) -> None:
    """Record that `weight` has a master that must be passed to an updater."""
    _unbound[id(weight)] = weight


def bound(weight: object) -> None:
    """Record that an updater uses the master of `weight`."""
    _unbound.pop(id(weight), None)


def warn_if_unbound(context: str, weight: object) -> None:
    """Warn once if `weight` is about to be updated without its master."""
    if _unbound.pop(id(weight), None) is not None:
        warn_user(
            f"{context}: the weight's float32 master is not used; call bind(updater) of its "
            "ParameterInfo before the first update"
        )
