"""The updater: state for every index, checks at the border, then the optimizer."""

from collections.abc import Sequence
from typing import Any

from fastopt.checkpoint.resumable import Resumable
from fastopt.optimizer.base import Array, Index, Optimizer
from fastopt.optimizer.border import check, check_index

__all__ = ["Updater", "get_updater"]


class Updater(Resumable):
    """Update weights in place with an optimizer and keep its state for each index.

    Parameters
    ----------
    optimizer : Optimizer
        Decides how to update.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer.
    states : dict
        State of each index that has been updated, as ``create_state`` made it.
    states_synced : dict
        Whether the state of an index is on its weight's device.

    Raises
    ------
    TypeError
        `optimizer` is not an :class:`Optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.Updater(optimizer.create("sgd", learning_rate=0.1))
    >>> weight = np.ones(3, np.float32)
    >>> updater(0, np.full(3, 2, np.float32), weight)
    >>> weight
    array([0.8, 0.8, 0.8], dtype=float32)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "idx2name"):
            raise TypeError(f"{type(optimizer).__name__}.__init__ must call super().__init__()")
        self.optimizer = optimizer
        self.states: dict[Index, Any] = {}
        self.states_synced: dict[Index, bool] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update `weight` in place.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameter; its state and counts are kept under it.
        grad : numpy.ndarray, or a list of them
            Gradient with the weight's shape and dtype. It is not changed.
        weight : numpy.ndarray, or a list of them
            float32 or float64, of any shape and layout. Changed in place.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together. No weight, state or count changes.
        """
        optimizer = self.optimizer
        if isinstance(index, (list, tuple)):
            calls = _calls(index, grad, weight)
        else:
            index = check_index(index)
            if optimizer.native and index in self.states and self.states_synced.get(index):
                optimizer.update(index, weight, grad, self.states[index])
                return
            calls = [(index, grad, weight)]
        with optimizer.lock:
            self._update(calls)

    def _update(self, calls: Sequence[tuple[Index, Any, Any]]) -> None:
        """Check all calls, make states on first sight, update, and keep the states."""
        optimizer = self.optimizer
        for index, grad, weight in calls:
            if index not in self.states or not optimizer.native:
                check(index, optimizer.idx2name, weight, grad)
        states: dict[Index, Any] = {}
        for index, _, weight in calls:
            if index not in states:
                states[index] = self._state(index, weight)
        optimizer.update_all([(i, w, g, states[i]) for i, g, w in calls])
        self.states.update(states)
        self.states_synced.update(dict.fromkeys(states, True))

    def _state(self, index: Index, weight: Array) -> Any:
        """State of `index` on its weight's device, made on first sight."""
        if index not in self.states:
            return self.optimizer.create_state_multi_precision(index, weight)
        if self.states_synced.get(index):
            return self.states[index]
        return self.sync_state_context(self.states[index], None)

    def sync_state_context(self, state: Any, context: Any) -> Any:
        """Bring a restored state to a device.

        Parameters
        ----------
        state : None, numpy.ndarray, or tuple or list of them
            The state of one index.
        context : object
            The device. Arrays in main memory are where the CPU needs them, so that the state
            comes back as it is.

        Returns
        -------
        None, numpy.ndarray, tuple or list
            The state with the same nesting.
        """
        return state


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an :class:`Updater` for `optimizer`.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.create("adam"))
    >>> updater.states
    {}
    """
    return Updater(optimizer)


def _calls(indices: Sequence[Any], grads: Any, weights: Any) -> list[tuple[Index, Any, Any]]:
    for role, given in (("gradients", grads), ("weights", weights)):
        if not isinstance(given, (list, tuple)) or len(given) != len(indices):
            raise TypeError(f"a list of {len(indices)} indices needs a list of as many {role}")
    return list(zip(map(check_index, indices), grads, weights, strict=True))
