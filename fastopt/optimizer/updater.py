"""The updater: state for every index, checks at the border, then the optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import number
from fastopt.checkpoint.resumable import Resumable
from fastopt.kernels.pages import small_pages
from fastopt.optimizer.base import Array, Index, Optimizer
from fastopt.optimizer.batch import Call
from fastopt.optimizer.border import check, check_index, label, leaves
from fastopt.sparse import RowSparse

__all__ = ["Updater", "get_updater"]

STEPPED = StepInfo(stepped=True, skipped=False)


class Updater(Resumable):
    """Update weights in place with an optimizer and keep its state for each index.

    Parameters
    ----------
    optimizer : Optimizer
        Decides how to update.
    loss_scaler : fastopt.amp.LossScaler, optional
        Gradients are those of a loss that was multiplied by its scale, and are divided by it. A
        call with a gradient that is not finite updates nothing and makes the scale smaller.
    clip_global_norm : float, optional
        Largest norm of all gradients of a call together, rescaled and divided by the loss scale;
        longer ones are shortened to it. A call with a gradient that is not finite updates nothing.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer.
    info : fastopt.amp.StepInfo
        What the last call did: whether it updated, the global norm (if there is a loss scaler or a
        clip of the norm), and the names of parameters whose gradients were not finite.
    states : dict
        State of each index that has been updated, as ``create_state`` made it.
    states_synced : dict
        Whether the state of an index is on its weight's device.

    Raises
    ------
    TypeError
        `optimizer` is not an :class:`Optimizer`, or `loss_scaler` not a LossScaler.
    ValueError
        `clip_global_norm` is negative, NaN or infinite.

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

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "idx2name"):
            raise TypeError(f"{type(optimizer).__name__}.__init__ must call super().__init__()")
        if loss_scaler is not None and not isinstance(loss_scaler, LossScaler):
            raise TypeError(f"loss_scaler must be a LossScaler, got {loss_scaler!r}")
        if clip_global_norm is not None:
            number("clip_global_norm", clip_global_norm, least=0)
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.clip_global_norm = clip_global_norm
        self.info = StepInfo(stepped=False, skipped=False)
        self.states: dict[Index, Any] = {}
        self.states_synced: dict[Index, bool] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update `weight` in place.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameter; its state and counts are kept under it.
        grad : numpy.ndarray, or a list of them
            Gradient with the weight's shape and dtype; float32 too for weights of half precision.
            It is not changed. A gradient that lists rows may be a
            :class:`~fastopt.sparse.RowSparse`, a pair ``(values, indices)``, or a
            scipy.sparse array in CSR or COO format.
        weight : numpy.ndarray, or a list of them
            float32, float64, float16 or bfloat16, of any shape and layout. Changed in place.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together. No weight, state or count changes.
        """
        optimizer = self.optimizer
        measures = self.loss_scaler is not None or self.clip_global_norm is not None
        if isinstance(index, (list, tuple)):
            self._update_list(index, grad, weight, measures)
            return
        index = check_index(index)
        known = optimizer.native and index in self.states and self.states_synced.get(index)
        if known and not measures:
            optimizer.update_multi_precision(index, weight, grad, self.states[index])
            self.info = STEPPED
        else:
            self._update_list([index], [grad], [weight], measures)

    def _update_list(self, indices: Any, grads: Any, weights: Any, measures: bool) -> None:
        """Update several weights, unless what `measures` looks at forbids it."""
        optimizer = self.optimizer
        with optimizer.lock:
            batch = optimizer.recall(indices, weights, grads, self.states)
            calls: Sequence[Call] = ()
            if batch is None:
                calls = self._checked(_calls(indices, grads, weights))
                batch = optimizer.prepare(calls)
            if measures:
                squares = batch.squares() if batch else _squares(calls)
                names = batch.indices if batch else [index for index, *_ in calls]
                if not self._rescaled(squares, names):
                    for table in batch.tables if batch else ():
                        table.listed = ()  # gradients are not kept alive
                    return
            rescale_grad = optimizer.rescale_grad
            try:
                optimizer.rescale_grad *= self._factor if measures else 1
                if batch is not None:
                    optimizer.run(batch)
                else:
                    optimizer.update_in_turn(calls)
            finally:
                optimizer.rescale_grad = rescale_grad
            for index, _, _, state in calls:
                self.states[index], self.states_synced[index] = state, True
                optimizer.masters_given.pop(index, None)
            if not measures:
                self.info = STEPPED
            elif self.loss_scaler is not None:
                self.loss_scaler.update(overflow=False)

    def _rescaled(self, squares: Array, indices: Sequence[Index]) -> bool:
        """Find the factor of all gradients; False if one of them is not finite."""
        scaler, limit = self.loss_scaler, self.clip_global_norm
        self._factor = 1.0 if scaler is None else 1 / scaler.scale
        norm = math.sqrt(squares.sum()) * abs(self.optimizer.rescale_grad * self._factor)
        if not math.isfinite(norm):
            words = [self.optimizer.idx2name.get(index, str(index)) for index in indices]
            at_fault = np.flatnonzero(~np.isfinite(squares)).tolist()
            culprits = tuple(words[place] for place in at_fault)
            self.info = StepInfo(False, True, norm, culprits)
            if scaler is not None:
                scaler.update(overflow=True)
            return False
        if limit is not None and norm > limit:
            self._factor *= limit / norm
        self.info = StepInfo(True, False, norm)
        return True

    def _checked(self, calls: Sequence[tuple[Index, Any, Any]]) -> list[Call]:
        """Calls with checked arrays and with states, which are made on first sight."""
        optimizer = self.optimizer
        checked: list[Call] = []
        states: dict[Index, Any] = {}
        for index, grad, weight in calls:
            if index not in self.states or not optimizer.native:
                words = label(index, optimizer.idx2name)
                grad = check(words, weight, grad, optimizer.copies.get(index))
                if isinstance(grad, RowSparse) and not optimizer.native:
                    grad = grad.to_dense()
            checked.append((index, weight, grad, None))
        for place, (index, weight, grad, _) in enumerate(checked):
            if index not in states:
                states[index] = self._state(index, weight, isinstance(grad, RowSparse))
            checked[place] = index, weight, grad, states[index]
        return checked

    def _state(self, index: Index, weight: Array, sparse: bool) -> Any:
        """State of `index` on its weight's device, made on first sight."""
        if index not in self.states:
            state = self.optimizer.create_state_multi_precision(index, weight)
            if sparse:
                small_pages(leaves(state))
            return state
        if self.states_synced.get(index):
            return self.states[index]
        return self.sync_state_context(self.states[index], None)

    def set_master(self, index: Any, array: Array) -> None:
        """Give the float32 master of a half-precision weight its values.

        Without it a master starts as the weight, whose values are rounded already.

        Parameters
        ----------
        index : int, str or bytes
            The parameter, of an optimizer with ``multi_precision=True``.
        array : numpy.ndarray
            The exact values, float32, of the weight's shape; they are copied.

        Raises
        ------
        TypeError, ValueError
            The optimizer keeps no masters, or the array does not fit. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0, multi_precision=True))
        >>> exact = np.full(2, 0.1, np.float32)
        >>> updater.set_master(0, exact)
        >>> weight = exact.astype(np.float16)
        >>> updater(0, np.zeros(2, np.float16), weight)
        >>> updater.states[0][1]
        array([0.1, 0.1], dtype=float32)
        """
        index = check_index(index)
        self.optimizer.set_master(index, array, self.states.get(index))

    def set_copy(self, index: Any, array: Array | None) -> None:
        """Keep a half-precision copy of a float32 weight: each update writes it too.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        array : numpy.ndarray or None
            The copy, float16 or bfloat16, of the weight's shape. It is written by every update
            from now on, with the weight's values rounded to nearest. None ends it.

        Raises
        ------
        TypeError, ValueError
            `array` is of another kind, or read-only; or, at the next update, does not have the
            weight's shape or shares its memory.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.1))
        >>> weight = np.ones(2, np.float32)
        >>> copy = weight.astype(np.float16)
        >>> updater.set_copy(0, copy)
        >>> updater(0, np.ones(2, np.float32), weight)
        >>> copy
        array([0.9, 0.9], dtype=float16)
        """
        self.optimizer.set_copy(check_index(index), array)

    def flush(self, index: Any, weight: Array | None = None) -> None:
        """Give all rows of a parameter the decay that they have missed.

        For ``sparse_decay="catch_up"``, before weights are used as a whole: rows that gradients
        have not listed lately are too large by the decay of the steps since.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        weight : numpy.ndarray, optional
            Its weight. Default: the one that was last updated.

        Raises
        ------
        ValueError
            No weight is given and none has been updated.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> made = optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
        >>> updater, weight = optimizer.get_updater(made), np.ones((2, 1))
        >>> updater(0, (np.ones((1, 1)), np.array([0])), weight)
        >>> updater.flush(0)
        >>> weight.round(3)
        array([[0.834],
               [0.984]])
        """
        index = check_index(index)
        self.optimizer.flush(index, weight, self.states.get(index))

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


def _squares(calls: Sequence[Call]) -> Array:
    """Sum of the squares of each gradient, for classes that keep no tables."""
    values = [g.coalesce().values if isinstance(g, RowSparse) else g for _, _, g, _ in calls]
    return np.array([np.square(value, dtype=np.float64).sum() for value in values])
