"""The updater: state for every index, checks at the border, then the optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import number
from fastopt.checkpoint.resumable import Resumable
from fastopt.interrupts import uninterrupted
from fastopt.kernels.device_memory import host, placed
from fastopt.kernels.devices import header, is_cuda
from fastopt.kernels.pages import small_pages
from fastopt.optimizer.base import Array, Index, Optimizer
from fastopt.optimizer.batch import Batch, Call
from fastopt.optimizer.border import as_lists, check, check_index, label, leaves
from fastopt.optimizer.norms import measured, squares, times
from fastopt.optimizer.rates import as_float
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
        longer ones are shortened to it, all to nothing by 0. Default None: no limit. A call with a
        gradient that is not finite updates nothing.

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
        _check_limits(loss_scaler, clip_global_norm)
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.clip_global_norm = clip_global_norm
        self.info = StepInfo(stepped=False, skipped=False)
        self.states: dict[Index, Any] = {}
        self.states_synced: dict[Index, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Attributes; states on a device are copied to main memory, until their next update."""
        synced = {
            index: bool(known) and not any(map(is_cuda, leaves(self.states.get(index))))
            for index, known in self.states_synced.items()
        }
        return {**vars(self), "states": host(self.states), "states_synced": synced}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update `weight` in place.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameter; its state and counts are kept under it.
        grad : numpy.ndarray or CUDA array, or a list of them
            Gradient with the weight's shape and dtype; float32 too for weights of half precision.
            It is not changed. A gradient that lists rows may be a
            :class:`~fastopt.sparse.RowSparse`, a pair ``(values, indices)``, or a
            scipy.sparse array in CSR or COO format.
        weight : numpy.ndarray or CUDA array, or a list of them
            float32, float64, float16 or bfloat16, of any shape and layout. Changed in place. A
            CUDA array is one with ``__cuda_array_interface__``; state is made on its device, where
            the gradient must be too.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together. No weight, state or count changes.
        ImportError
            An array is on a CUDA device, and numba-cuda or a driver is missing.
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
        indices, grads, weights = as_lists(indices, grads, weights)
        if measures:
            _check_limits(self.loss_scaler, self.clip_global_norm)
        with optimizer.lock, uninterrupted:
            folds = not measures or optimizer.folds
            batch = optimizer.recall(indices, weights, grads, self.states) if folds else None
            calls: Sequence[Call] = ()
            if batch is None:
                calls = self._checked(zip(indices, grads, weights, strict=True), measures)
                batch = optimizer.prepare(calls) if folds else None
            info, factor = STEPPED, 1.0
            if measures:
                sums = self._squares(batch, calls)
                names = optimizer.idx2name
                rescale_grad = as_float("rescale_grad", optimizer.rescale_grad)
                limits = self.loss_scaler, self.clip_global_norm
                info, factor = measured(sums, indices, names, rescale_grad, *limits)
            if info.stepped:
                self._run(batch, calls, factor, folds)
            elif batch is not None:
                batch.let_go()
            self.info = info
            if self.loss_scaler is not None:
                self.loss_scaler.update(overflow=info.skipped)

    def _squares(self, batch: Batch | None, calls: Sequence[Call]) -> Array:
        """Sum of the squares of each gradient."""
        return squares(calls) if batch is None else batch.squares()

    def _run(self, batch: Batch | None, calls: Sequence[Call], factor: float, folds: bool) -> None:
        """Update with gradients times `factor`, and keep the states."""
        optimizer = self.optimizer
        rescale_grad = optimizer.rescale_grad
        if folds:
            optimizer.rescale_grad = as_float("rescale_grad", rescale_grad) * factor
        else:
            calls = [(i, weight, times(grad, factor), state) for i, weight, grad, state in calls]
        try:
            if batch is not None:
                optimizer.run(batch)
            elif optimizer.native:
                optimizer.update_in_turn(calls) if folds else optimizer.update_all(calls)
            else:
                for call in calls:
                    optimizer.update_multi_precision(*call)
                    self._keep([call])  # even if code of the user's fails at the next one
                return
        finally:
            optimizer.rescale_grad = rescale_grad
        self._keep(calls)

    def _keep(self, calls: Sequence[Call]) -> None:
        """Keep the states of weights that have been updated."""
        for index, _, _, state in calls:
            self.states[index], self.states_synced[index] = state, True
            self.optimizer.masters_given.pop(index, None)

    def _checked(self, calls: Iterable[tuple[Any, Any, Any]], measures: bool) -> list[Call]:
        """Calls with checked arrays and with states, which are made on first sight."""
        optimizer = self.optimizer
        checked: list[Call] = []
        states: dict[Index, Any] = {}
        for given, grad, weight in calls:
            index = check_index(given)
            if measures or index not in self.states or not optimizer.native:
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

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """State of `index` on its weight's device, made on first sight."""
        if index not in self.states:
            state = self.optimizer.create_state_multi_precision(index, weight)
            if sparse:
                small_pages(leaves(state))
            return placed(state, header(weight))
        if self.states_synced.get(index):
            return self.states[index]
        return self.sync_state_context(self.states[index], header(weight))

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
        array([[0.884],
               [0.984]])
        """
        index, optimizer = check_index(index), self.optimizer
        with optimizer.lock:
            last, state = optimizer.updated.get(index) if weight is None else weight, None
            if last is not None and index in self.states:
                state = self._state(index, last)
            optimizer.flush(index, weight, state)
            if index in self.states:
                self.states[index], self.states_synced[index] = state, True

    def sync_state_context(self, state: Any, context: Any) -> Any:
        """Bring a restored state to its weight's device.

        Parameters
        ----------
        state : None, numpy.ndarray, or tuple or list of them
            The state of one index.
        context : object
            The weight. If it is on a CUDA device, NumPy arrays are copied there; in main memory
            the state is where it is needed and comes back as it is.

        Returns
        -------
        None, numpy.ndarray, tuple or list
            The state with the same nesting.
        """
        return placed(state, header(context))


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an :class:`Updater` for an optimizer.

    Parameters
    ----------
    optimizer : Optimizer
        Decides how to update.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.create("adam"))
    >>> updater.states
    {}
    """
    return Updater(optimizer)


def _check_limits(loss_scaler: Any, clip_global_norm: Any) -> None:
    if loss_scaler is not None and not isinstance(loss_scaler, LossScaler):
        raise TypeError(f"loss_scaler must be a LossScaler, got {loss_scaler!r}")
    if clip_global_norm is not None:
        number("clip_global_norm", clip_global_norm, least=0)
