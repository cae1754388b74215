"""Updates as pure functions of gradients, state and weights."""

import copy
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fastopt._structure import as_given, copies
from fastopt._updater.updater import Updater
from fastopt.arguments import brief
from fastopt.optimizer import Optimizer, create
from fastopt.optimizer.optimizer import new_copy

__all__ = ["Functional", "functional"]


T = TypeVar("T")


class _Update(Protocol):
    """Type of the second function, whose new params have the type of the old ones."""

    def __call__(self, grads: Any, state: dict[str, Any], params: T) -> tuple[T, dict[str, Any]]:
        """Return new params and the new state."""


class Functional(NamedTuple):
    """The two functions of :func:`functional`.

    Parameters
    ----------
    init : callable
        ``init(params)`` returns the state before the first update.
    update : callable
        ``update(grads, state, params)`` returns new params and state; no argument changes.
    """

    init: Callable[[Any], dict[str, Any]]
    update: "_Update"


def functional(optimizer: str | Optimizer, **settings: object) -> Functional:
    """Return an optimizer as a pair of pure functions, like those of optax.

    Parameters
    ----------
    optimizer : str or Optimizer
        Name, or an optimizer, which is copied.
    **settings
        Arguments of :class:`~fastopt.optimizer.Updater`, such as ``clip_global_norm=1.0``.

    Returns
    -------
    Functional
        ``init`` and ``update``. The params are nested arrays, see
        :meth:`~fastopt.optimizer.Updater.step`. The state is a dict, the one that
        :meth:`~fastopt.optimizer.Updater.states_dict` returns, with read-only arrays; it can be
        pickled, compared and kept, and loaded by an updater. ``update(grads, state, params)``
        copies both params and state, so an update in place costs less.

    Raises
    ------
    TypeError, ValueError
        The optimizer or a setting is invalid; and from the functions those of
        :meth:`~fastopt.optimizer.Updater.step` and
        :meth:`~fastopt.optimizer.Updater.load_states_dict`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> init, update = fastopt.functional(fastopt.SGD(lr=0.1, momentum=0.9))
    >>> params = {"weight": np.ones(2)}
    >>> state = init(params)
    >>> first, after = update({"weight": np.ones(2)}, state, params)
    >>> again, _ = update({"weight": np.ones(2)}, state, params)
    >>> params["weight"], first["weight"], again["weight"]
    (array([1., 1.]), array([0.9, 0.9]), array([0.9, 0.9]))
    """
    pair = _Pair(new_copy(create(optimizer)), settings)
    return Functional(pair.init, pair.update)


class _Pair:
    """Holds the updater that has computed the last state."""

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.updater = self._new()
        self.state: dict[str, Any] | None = None
        """State that the updater is in."""
        self.lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pair, (self.optimizer, self.settings)

    def init(self, params: object) -> dict[str, Any]:
        """Return the state before the first update."""
        updater, new = self._new(), copies(params)
        paths, _, arrays, _ = updater.structures.flatten(new, new)
        trained = [
            (path, *updater._real_views(path, np.zeros_like(array), array))
            for path, array in zip(paths, arrays, strict=True)
            if not updater._is_frozen(path)
        ]
        updater._keep(updater._checked(*(zip(*trained, strict=True) if trained else ((), (), ()))))
        return _state_of(updater)

    def update(self, grads: Any, state: dict[str, Any], params: T) -> tuple[T, dict[str, Any]]:
        """Return new params and the new state."""
        with self.lock:
            if state is None or state is not self.state:
                if not (isinstance(state, dict) and "states" in state):
                    raise TypeError(
                        f"state must be what init() or update() returned, got {brief(state)}; the "
                        "order is update(grads, state, params)"
                    )
                self.state, self.updater = None, self._new()
                self.updater.load_states_dict(state)
            updated = copies(params)
            leaves = self.updater._leaves(grads, updated, "raise")
            self._check_names(leaves[0], updated)
            self.state = None
            self.updater(*leaves)
            self.state = _state_of(self.updater)
            return as_given(updated, params), self.state

    def _check_names(self, paths: Sequence[str], params: object) -> None:
        """Raise if a path has no state, and the state has paths that are not in params."""
        updater, states = self.updater, self.updater.states
        new = [path for path in paths if path not in states and not updater._is_frozen(path)]
        every = updater.structures.flatten(params, params)[0] if new else ()
        unused = [path for path in states if path not in every] if new else ()
        if unused:
            raise ValueError(
                f"this call starts states of {brief(new)}, and does not use those of "
                f"{brief(unused)}: pass the state of these params, which begins with init(params)"
            )

    def _new(self) -> Updater:
        return Updater(copy.deepcopy(self.optimizer), **self.settings)


def _state_of(updater: Updater) -> dict[str, Any]:
    """Return a copy of the state, with read-only arrays."""
    state = updater.states_dict()
    _freeze(state)
    return state


def _freeze(value: object) -> None:
    """Make the arrays of a state read-only."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _freeze(item)
