"""Updates of an updater whose arguments Python has checked: first calls, and slow ones.

Tests: ``tests/updater/``, ``tests/engine/test_rare_forms.py``.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine import device_updates
from fastopt._engine.averaging import Averages
from fastopt._engine.batches import sums_batches
from fastopt._engine.clip import STEPPED, UNCHANGED, measured, scale_of, squares, times
from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.extras import check_given
from fastopt._engine.planner import Call, Planner
from fastopt._engine.records import Records
from fastopt._engine.slow_calls import SlowCallCounter
from fastopt._engine.validate import check, check_like, label, leaves
from fastopt._foreign import as_gradient, as_weight, owner_of
from fastopt._interrupts import uninterrupted
from fastopt._kernels.device_memory import allocated_together, placed
from fastopt._kernels.devices import header, is_cuda, mark_written
from fastopt._kernels.pages import small_pages
from fastopt._kernels.record_words import DONE
from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import Checked, as_float
from fastopt.optimizer.accumulation import Entry, Windows, incomplete
from fastopt.optimizer.optimizer import Array, Index, Optimizer, unused
from fastopt.sparse import REALS, RowSparse

CREATE = "create_state", "create_state_multi_precision"
"""Methods that create states."""


class CheckedUpdates(Checked):
    """Abstract base of :class:`Updater`: how it updates when records do not serve a call.

    Arrays are checked one by one, states created, and gradients accumulated, measured and clipped;
    then records are tried again, which the first call of a parameter creates.
    """

    optimizer: Optimizer
    lock: Any
    loss_scaler: LossScaler | None
    clip_global_norm: float | None
    accumulate: int
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    planner: Planner
    _records: Records
    _info: StepInfo
    _windows: Windows | None = None
    _units: UnitClip | None = None
    _averages: Averages | None = None
    _slow: SlowCallCounter | None = None
    takes_extra: bool = False
    """Whether a call has extra arrays, which are in the states now."""

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights in place, on records if they serve the call."""
        raise NotImplementedError

    # Checks

    def _update_views(
        self, indices: list[Index], grads: list[Any], weights: list[Any], single: bool
    ) -> None:
        """Update arrays of other libraries through NumPy views."""
        own, views = list(grads), list(weights)
        for k, index in enumerate(indices):
            try:
                own[k], views[k] = as_gradient(grads[k]), as_weight(weights[k])
            except (TypeError, ValueError) as error:
                context = label(index, self.optimizer.idx2name)
                raise type(error)(f"{context}: {error}") from error
        if all(map(is_, views, weights)) and all(map(is_, own, grads)):
            self._update(indices, grads, weights, single)
            return
        if single:
            self(indices[0], own[0], views[0])
        else:
            self(indices, own, views)
        mark_written(weights)

    def _update(
        self,
        indices: list[Index],
        grads: list[Any],
        weights: list[Any],
        single: bool = False,
    ) -> None:
        """Check the arrays and update, unless the loss scaler or norm clip skips the step."""
        with self.lock, unused(self.optimizer.updating):
            optimizer = self.optimizer
            if self._averages is not None:
                self._averages.check_free()
            if not indices:
                vars(self)["_info"] = UNCHANGED
                return
            unchecked = optimizer.unchecked
            self._check_names(indices)
            check_given(self, indices)
            if optimizer.inherits:
                optimizer.keep_updates(self.states)
            self._records.admit(optimizer)
            slow = self._slow or SlowCallCounter()
            why = slow.reason(self, indices, grads, weights, unchecked)
            with uninterrupted:
                if self._windows is None:
                    self._apply(indices, grads, weights, single)
                else:
                    entries = self._checked_entries(indices, grads, weights)
                    self._add(self._windows, entries, single)
            if why is not None:
                slow.add(self, *why)
                vars(self)["_slow"] = slow

    def _check_names(self, indices: Sequence[Index]) -> None:
        """Warn of names of multipliers and patterns of groups that no parameter has."""
        optimizer = self.optimizer
        if not optimizer.unchecked or not indices:
            return
        waiting = self._windows.calls if self._windows else ()
        groups = self.planner.groups
        optimizer.check_multipliers(indices, waiting, grouped=groups is not None)
        if groups is not None and not optimizer.unchecked:
            groups.warn_of_unused([*indices, *waiting])

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Check all arrays, then return the calls with states, created for new indices."""
        return self._with_states(self._checked_entries(indices, grads, weights))

    def _checked_entries(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Entry]:
        """Check that weights and gradients match; return indices, weights and gradients."""
        names, native = self.optimizer.idx2name, self.planner.native
        checked = []
        for index, grad, weight in zip(indices, grads, weights, strict=True):
            context = label(index, names)
            grad = check(context, weight, grad, self.planner.copies.get(index))
            if isinstance(grad, RowSparse) and not native:
                optimizer = self.planner.of(index).optimizer
                if not optimizer.native:
                    grad = optimizer.dense_gradient(index, weight, grad)
            checked.append((index, weight, grad))
        return checked

    # States

    def _with_states(self, checked: Sequence[Entry]) -> list[Call]:
        """Return the calls with states, which are created for new indices."""
        states: dict[Index, Any] = {}
        kinds = set(map(type, self.planner.optimizers()))
        plain = all(  # nothing is done with new arrays
            getattr(kind, name) is getattr(Optimizer, name) for kind in kinds for name in CREATE
        )
        with allocated_together() if plain else nullcontext():
            for index, weight, grad in checked:
                if index not in states:
                    states[index] = self._state(index, weight, isinstance(grad, RowSparse))
        return [(index, weight, grad, states[index]) for index, weight, grad in checked]

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """Return the state of `index` on its weight's device, creating it for a new index."""
        if index not in self.states:
            optimizer = self.planner.of(index).optimizer
            state = optimizer.create_state_multi_precision(index, weight)
            if sparse:
                small_pages(leaves(state))
            return placed(state, header(weight))
        if self.states_synced.get(index):
            return self.states[index]
        return self.sync_state_context(self.states[index], header(weight))

    def sync_state_context(self, state: Any, context: Any) -> Any:
        """Move a restored state to its weight's device.

        Parameters
        ----------
        state : None, numpy.ndarray, or tuple or list of them
            The state of one index.
        context : object
            The weight. If it is on a CUDA device, NumPy arrays are copied there; if it is on the
            host, the state is returned unchanged.

        Returns
        -------
        None, numpy.ndarray, tuple or list
            The state with the same nesting.
        """
        return placed(state, header(context))

    def _keep(self, calls: Sequence[Call]) -> None:
        """Store the states of updated weights."""
        for index, _, _, state in calls:
            dict.__setitem__(self.states, index, state)
            dict.__setitem__(self.states_synced, index, True)
            self.optimizer.masters_given.pop(index, None)

    def _stored(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Store states; return a function that puts back what was there before."""
        known = [
            (own, {index: own[index] for index, *_ in calls if index in own})
            for own in (self.states, self.states_synced, self.optimizer.masters_given)
        ]

        def undo() -> None:
            for own, before in known:
                for index, *_ in calls:
                    dict.pop(own, index, None)
                dict.update(own, before)

        try:
            self._keep(calls)
        except BaseException:
            undo()
            raise
        return undo

    def _commit(
        self,
        call: Any,
        calls: Sequence[Call],
        step: Callable[[], None],
        finish: Callable[[], None],
        last: Callable[[], None] | None = None,
    ) -> None:
        """Update without records; states are stored, and all else is finished, if it launches.

        States are stored before the launch, and `finish` and `last` are called after it even if an
        exception from outside, such as that of a signal handler, comes in between.
        """

        def end() -> None:
            finish()
            if last is not None:
                last()

        undo = self._stored(calls)
        try:
            step()
            end()
        except BaseException:
            if call.done:
                end()
            else:
                undo()
            raise

    def _is_frozen(self, index: Index) -> bool:
        """Whether the group of an index is frozen."""
        return self.planner.groups is not None and self.planner.groups.is_frozen(index)

    # Updates

    def _update_in_python(self, calls: Sequence[Call]) -> None:
        """Update with optimizers of which some override ``update()``, in the order of the list."""
        optimizers = {call[0]: self.planner.of(call[0]).optimizer for call in calls}
        for optimizer in dict.fromkeys(optimizers.values()) if len(calls) > 1 else ():
            optimizer.check_calls([call for call in calls if optimizers[call[0]] is optimizer])
        copies = self.planner.copies
        by = lambda call: (optimizers[call[0]], call[0] in copies)  # noqa: E731
        for (optimizer, _), run in groupby(calls, by):
            own = list(run)
            if optimizer.native and own[0][0] not in copies:
                optimizer.update_all(own)
                self._keep(own)
                continue
            for call in own:
                index, weight, grad, state = call
                if type(optimizer).update_multi_precision is not Optimizer.update_multi_precision:
                    optimizer.update_multi_precision(index, weight, grad, state)
                else:
                    optimizer.update_in_python(index, weight, grad, state, copies.get(index))
                self._keep([call])  # in case the user's code raises at the next parameter
        self.planner.updated.update((index, weight) for index, weight, *_ in calls)

    def _add(self, windows: Windows, entries: Sequence[Entry], single: bool) -> None:
        """Accumulate gradients, and update the parameters whose sums are complete."""
        optimizer, indices = self.optimizer, [index for index, *_ in entries]
        self._check_summable(indices)
        last = [entry for entry in entries if windows.is_last(entry[0])]
        before, after = windows.before(indices), windows.after(indices)
        finish = partial(windows.finish, indices, after)
        try:
            windows.add(entries, optimizer.idx2name, single)
            if last:
                own, weights = [i for i, *_ in last], [weight for _, weight, _ in last]
                sums = [windows.sums[i] for i in own]
                self._apply(own, sums, weights, single, 1 / windows.every, finish)
            finish()
        except BaseException:
            if windows.calls is not after:
                windows.put_back(before)
            raise
        if not last:
            self._info = UNCHANGED
            self._records.note(self.planner, indices, [weight for _, weight, _ in entries])

    def _finish(self, index: Any, weight: Any) -> None:
        """Update with the means of incomplete sums, see :meth:`Updater.finish`."""
        with self.lock, unused(self.optimizer.updating):
            optimizer = self.optimizer
            if self._averages is not None:
                self._averages.check_free()
            windows, names = self._windows, optimizer.idx2name
            found = incomplete(windows, index, weight).items()
            given = {i: self._given(i, of, "finish") for i, of in found if not self._is_frozen(i)}
            if windows is None or not given:
                vars(self)["_info"] = UNCHANGED
                return
            indices, calls = list(given), [windows.calls[i] for i in given]
            views = [self._viewed(i, array) for i, array in given.items()]
            of = [label(i, names) for i in indices]
            sums = list(map(windows.total, of, indices, views))
            means = [  # all gradients have one factor
                times(total, calls[0] / count)
                for (*_, total), count in zip(
                    self._checked_entries(indices, sums, views), calls, strict=True
                )
            ]
            finish = partial(windows.finish, indices, windows.without(given))
            with uninterrupted:
                self._apply(indices, means, views, False, 1 / calls[0], finish)
            mark_written(list(given.values()))

    def _given(self, index: Index, weight: Any, call: str) -> Any:
        """Return the weight that was given to a method, or else that of the last call."""
        given = owner_of(self.planner.updated.get(index)) if weight is None else weight
        if given is None:
            raise ValueError(
                f"{label(index, self.optimizer.idx2name)}: {call} needs the weight, which was in "
                f"no call yet: pass it, {call}(index, weight)"
            )
        return given

    def _viewed(self, index: Index, weight: Any) -> Any:
        """Return a weight, or the NumPy view of one of another library."""
        context = label(index, self.optimizer.idx2name)
        try:
            view = as_weight(weight)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{context}: {error}") from error
        check_like(context, "weight", of := header(view), REALS, np.shape(of))
        return view

    def _check_summable(self, indices: Sequence[Index]) -> None:
        """Raise ValueError if gradients cannot be accumulated, because an index is repeated."""
        seen = set[Index]()
        for index in indices:
            if index in seen:
                context = label(index, self.optimizer.idx2name)
                raise ValueError(f"{context}: accumulate={self.accumulate} takes an index once")
            seen.add(index)

    def _apply(
        self,
        indices: list[Index],
        grads: list[Any],
        weights: list[Any],
        single: bool,
        share: float = 1.0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Scale and clip gradients, multiply them by `share`, and update; then call `finish`."""
        native, records = self.planner.native, self._records
        if self._units is not None:
            self._units.check(indices, weights, grads, self.optimizer.idx2name)
        if native and any(map(is_cuda, weights)):
            entries = self._checked_entries(indices, grads, weights)
            device_updates.update(self, entries, single, share, finish)
            return
        try:
            if native and not sums_batches(self.optimizer):
                info = records.take(self, indices, grads, weights, single, share)
            else:
                info = self._apply_in_python(indices, grads, weights, single, share)
                info = self.planner.stepped(info, indices) if info.stepped else info
            if finish is not None:
                finish()
        except BaseException:
            if finish is not None and records.words[DONE]:
                finish()
            raise
        self._report(info)

    def _apply_in_python(
        self,
        indices: list[Index],
        grads: list[Any],
        weights: list[Any],
        single: bool,
        share: float,
    ) -> StepInfo:
        """Clip the gradients in Python, for a user's ``update()`` or a sum of several calls."""
        self._records.words[DONE] = 0
        grads = [grad for *_, grad in self._checked_entries(indices, grads, weights)]
        if self._units is not None:
            grads = self._clipped_units(indices, weights, grads, share)
        info, factor = self._measured(indices, partial(self._squares, grads), share)
        if not info.stepped:
            return info
        grads = [times(grad, factor * share) for grad in grads]
        if self.planner.native:
            self._records.take(self, indices, grads, weights, single)
            return info
        calls = self._with_states(list(zip(indices, weights, grads, strict=True)))
        self._update_in_python(calls)
        self._keep(calls)
        return info

    def _clipped_units(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
    ) -> list[Any]:
        """Return gradients with clipped units; the update multiplies them by `share`."""
        assert self._units is not None
        rescale_grad = as_float("rescale_grad", self.optimizer.rescale_grad)
        factor = rescale_grad * share * scale_of(self.loss_scaler)
        return self._units.all(indices, weights, grads, factor, self.optimizer.idx2name)

    def _measured(
        self,
        indices: Sequence[Index],
        sums: Callable[[float], NDArray[np.float64]],
        share: float = 1.0,
        down: float = 1.0,
    ) -> tuple[StepInfo, float]:
        """Return the outcome and the gradient factor that follow from the sums of squares.

        `share` is a further factor of the gradients; see :func:`fastopt._engine.clip.measured`.
        """
        scaler, limit, optimizer = self.loss_scaler, self.clip_global_norm, self.optimizer
        if scaler is None and limit is None:
            return STEPPED, 1.0
        rescale_grad = as_float("rescale_grad", optimizer.rescale_grad) * share
        return measured(sums, indices, optimizer.idx2name, rescale_grad, scaler, limit, down)

    def _squares(self, grads: Sequence[Any], down: float) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient times `down`."""
        return squares(grads, down)

    def _report(self, info: StepInfo) -> None:
        """Record the outcome of a call."""
        vars(self)["_info"] = info  # skips __setattr__
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=info.skipped)
