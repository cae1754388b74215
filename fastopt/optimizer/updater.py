"""The updater: the state of every index, and the way of a call to its plan."""

import math
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from operator import is_
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import Instance, OrNone, Real, brief, count, number
from fastopt.arrays import Gradient, Weight
from fastopt.averages import Average, check_average
from fastopt.checkpoint.resumable import Resumable
from fastopt.engine.averaging import Averages, exact_copy
from fastopt.engine.clip import measured, overflow, scale_of, squares, times
from fastopt.engine.clip_adaptive import UnitClip
from fastopt.engine.mixed_precision import has_master, set_master, split_state
from fastopt.engine.plan import Plan
from fastopt.engine.planner import Call, Planner
from fastopt.engine.state_dtype import in_dtype_of, mapped_slots
from fastopt.engine.tracked import Tracked
from fastopt.engine.validate import as_lists, check, check_index, is_listed, label, leaves
from fastopt.foreign import as_gradient, as_weight, latest
from fastopt.interrupts import uninterrupted
from fastopt.kernels.cpu import LENGTH, LIMIT, RESCALE, SCALE, SKIPPED
from fastopt.kernels.device_memory import host, placed
from fastopt.kernels.devices import header, is_cuda, mark_written
from fastopt.kernels.pages import small_pages
from fastopt.naming import constructs
from fastopt.optimizer.accumulation import Entry, Waiting, Windows
from fastopt.optimizer.averaged import check_averaged
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Array, Index, Optimizer, as_float, create
from fastopt.sparse import RowSparse

__all__ = ["Updater", "get_updater"]

OURS = {np.ndarray, RowSparse}
"""Types of arrays that need no view."""

STEPPED = StepInfo(stepped=True, skipped=False)
ACCUMULATED = StepInfo(stepped=False, skipped=False)
"""A call whose gradients were added to their sums."""

LIMITS = {
    "loss_scaler": OrNone(Instance(LossScaler, "a LossScaler")),
    "clip_global_norm": OrNone(Real(least=0)),
}
OF_OPTIMIZER = ("lr", "learning_rate")
"""What the optimizer has."""

SETTINGS = ("accumulate", "average", "clip_adaptive", "clip_adaptive_eps")
"""Attributes that are checked when they are set."""

PARTS = ("_windows", "_averages", "_units")
"""What works for them."""


class Updater(Resumable):
    """Update weights in place with an optimizer and keep its state for each index.

    Parameters
    ----------
    optimizer : Optimizer or str
        Decides how to update; or the name of a class, for one with its defaults.
    loss_scaler : fastopt.amp.LossScaler, optional
        Gradients are those of a loss that was multiplied by its scale, and are divided by it. A
        call with a gradient that is not finite updates nothing and makes the scale smaller.
    clip_global_norm : float, optional
        Largest norm of all gradients of a call together, rescaled and divided by the loss scale;
        gradients with a larger norm are scaled down to it, 0 zeroes them. Default None: no limit. A
        call with a gradient that is not finite updates nothing.
    groups : dict of str to dict, optional
        Hyper-parameters of groups of weights, by a regular expression: a weight belongs to the
        first group whose pattern ``re.search`` finds in its name, which is that of ``idx2name`` or
        the index. A group has any argument of the optimizer, which it overrides, ``lr_mult`` and
        ``wd_mult``; or ``"frozen": True``: its weights are left alone and their gradients may be
        None; or ``"optimizer"``: another one or its name, whose counts, names and `rescale_grad`
        are those of `optimizer`, and whose multipliers are its own. Default: none.
    accumulate : int
        Calls of an index for one update, with the mean of their gradients. Default 1. See
        ``docs/accumulation.md``.
    average : EMA, SWA or Lookahead, optional
        Average of the weights that is kept beside them, see :attr:`averages` and
        :meth:`averaged`. Default None.
    clip_adaptive : float, optional
        Largest ratio of the norm of a unit's gradient to that of its weight; larger gradients are
        scaled down to it. Units are the slices along the first axis, and all of a weight of one
        dimension or none. Default None: no limit. See ``docs/clipping.md``.
    clip_adaptive_eps : float
        Smallest norm that a unit of the weight counts with. Default 1e-3.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer.
    info : fastopt.amp.StepInfo
        What the last call did: whether it updated, the global norm (if there is a loss scaler or a
        clip of the norm), and the names of parameters whose gradients were not finite.
    groups : mapping or None
        The groups; assign others to change them.
    states : dict
        State of each index that has been updated, as ``create_state`` made it.
    states_synced : dict
        Whether the state of an index is on its weight's device.

    Raises
    ------
    TypeError
        `optimizer` is not an :class:`Optimizer`, or `loss_scaler` not a LossScaler; a group has a
        hyper-parameter that its optimizer lacks, or one of another type; `average` is of another
        kind, or an optimizer has no rule that it could be computed with, or it alone has averages
        in its own state.
    ValueError
        `clip_global_norm`, `clip_adaptive` or `clip_adaptive_eps` is negative, NaN or infinite, or
        `accumulate` is less than 1; a pattern is not a regular expression, a hyper-parameter of a
        group is out of range; or no class has the name `optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.Updater(optimizer.create("sgd", learning_rate=0.1))
    >>> weight = np.ones(3, np.float32)
    >>> updater(0, np.full(3, 2, np.float32), weight)
    >>> weight
    array([0.8, 0.8, 0.8], dtype=float32)

    Groups of weights:

    >>> groups = {r"bias$|norm": {"wd_mult": 0.0}, r"^embed": {"frozen": True}}
    >>> updater = optimizer.Updater(optimizer.SGD(learning_rate=0.1, wd=0.5), groups=groups)
    >>> weights = {"embed": np.ones(1), "fc": {"weight": np.ones(1), "bias": np.ones(1)}}
    >>> updater.step({"embed": None, "fc": {"weight": np.ones(1), "bias": np.ones(1)}}, weights)
    >>> weights["embed"], weights["fc"]
    (array([1.]), {'weight': array([0.85]), 'bias': array([0.9])})
    """

    def __init__(
        self,
        optimizer: Optimizer | str,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        accumulate: int = 1,
        average: Average | None = None,
        clip_adaptive: float | None = None,
        clip_adaptive_eps: float = 1e-3,
    ) -> None:
        optimizer = create(optimizer)
        if not hasattr(optimizer, "idx2name"):
            raise TypeError(f"{type(optimizer).__name__}.__init__ must call super().__init__()")
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.clip_global_norm = clip_global_norm
        self.accumulate = accumulate
        self.average = average
        self.clip_adaptive_eps = clip_adaptive_eps
        self.clip_adaptive = clip_adaptive
        self._info = StepInfo(stepped=False, skipped=False)
        self.states = {}
        self.states_synced = {}
        self.groups = groups

    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    planner: Planner
    _info: StepInfo
    _plans: dict[Any, Any]
    _windows: Windows | None = None
    _units: UnitClip | None = None
    _averages: Averages | None = None

    @property
    def info(self) -> StepInfo:
        """What the last call did, with the estimate of an optimizer that makes one."""
        sums, info = self.optimizer.step_sums, self._info
        return info if sums is None else info._replace(d=sums.d)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "groups":
            self._group(value, self.planner)
            return
        if name in OF_OPTIMIZER:
            own = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{own} to set; set updater.optimizer.learning_rate")
        if name in ("states", "states_synced"):
            value = Tracked(value, self._forget_plans)
        elif name in SETTINGS:
            value = self._set(name, value)
        elif name in LIMITS:
            value = LIMITS[name](name, value)
        elif name == "optimizer":
            value = create(value)
            if value is not vars(self).get(name):
                self._plan_with(value)
        super().__setattr__(name, value)
        if name in ("states", "states_synced"):
            self._forget_plans()
        elif name in (*LIMITS, *SETTINGS, *PARTS):
            parts = ("loss_scaler", "clip_global_norm", "_windows", "_units")
            self.planner.measures = any(vars(self).get(part) is not None for part in parts)
            self.planner.averages = self._averages
            self._forget_plans()

    def _plan_with(self, optimizer: Optimizer) -> None:
        """Plan updates with another optimizer; nothing changes unless the groups fit it."""
        planner, before = Planner(optimizer), vars(self).get("planner")
        if before is not None:
            planner.take_over(before)
        self._group(vars(self).get("groups"), planner)
        vars(self)["planner"], vars(self)["_plans"] = planner, planner.plans

    def _group(self, groups: Any, planner: Planner) -> None:
        """Let weights have the optimizers of `groups`."""
        found = None if groups is None else Groups(groups, planner)
        average = vars(self).get("average")
        if found is not None and average is not None:
            found.check_average(average)
        planner.groups = found
        vars(self)["groups"] = None if found is None else found.given
        if found is not None:
            found.main.unchecked = True  # patterns are checked with the names of multipliers
        planner.plans.clear()

    def _set(self, name: str, value: Any) -> Any:
        """Check a setting, and make what works for it."""
        own = vars(self)
        if name == "accumulate":
            value = count(name, value)
            if self._windows is not None and self._windows.calls and value != self._windows.every:
                raise ValueError(
                    f"accumulate cannot change while gradients of {list(self._windows.calls)} "
                    "wait for their update"
                )
            if self._windows is None or value != self._windows.every:
                own["_windows"] = Windows(value) if value > 1 else None
        elif name == "average":
            value = check_average(value)
            if value is not None:
                check_averaged(self.optimizer, value)
                if self.planner.groups is not None:
                    self.planner.groups.check_average(value)
            now = self._averages
            if value is None or now is None or type(now.average) is not type(value):
                own["_averages"] = None if value is None else Averages(value)
            else:
                now.average = value
        elif name == "clip_adaptive_eps":
            value = number(name, value, least=0)
            if self._units is not None:
                self._units.least = value
        elif value is None:
            own["_units"] = None
        else:
            value = number(name, value, least=0)
            own["_units"] = UnitClip(value, self.clip_adaptive_eps)
        return value

    def _forget_plans(self) -> None:
        """Forget all plans, since a state may have been replaced."""
        self.planner.plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Attributes; states on a device are copied to the host, until their next update."""
        hidden = {"planner", "_plans", "_units"}
        synced = {
            index: bool(known) and not any(map(is_cuda, leaves(self.states.get(index))))
            for index, known in self.states_synced.items()
        }
        kept = {name: value for name, value in vars(self).items() if name not in hidden}
        if self.groups is not None:  # in a view that is read-only and cannot be pickled
            kept["groups"] = {pattern: dict(given) for pattern, given in self.groups.items()}
        return {**kept, "states": host(dict(self.states)), "states_synced": synced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        for name, value in state.items():
            if name != "optimizer":
                setattr(self, name, value)

    @overload
    def __call__(self, index: int | str | bytes, grad: Gradient, weight: Weight) -> None: ...

    @overload
    def __call__(
        self,
        index: Sequence[int | str | bytes] | KeysView[Any],
        grad: Sequence[Gradient] | ValuesView[Gradient],
        weight: Sequence[Weight] | ValuesView[Weight],
    ) -> None: ...

    def __call__(self, index: Any, grad: Any, weight: Any = None) -> None:
        """Update `weight` in place.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameter; its state and counts are kept under it. Lists may be other sequences or
            views of dictionaries, as in ``updater(w.keys(), g.values(), w.values())``.
        grad : numpy.ndarray or CUDA array, or a list of them
            Gradient with the weight's shape and dtype; float32 too for weights of half precision.
            It is not changed. A row-sparse gradient may be a
            :class:`~fastopt.sparse.RowSparse`, a pair ``(values, indices)``, or a
            scipy.sparse array in CSR or COO format.
        weight : numpy.ndarray or CUDA array, or a list of them
            float32, float64, float16 or bfloat16, of any shape and layout. Changed in place. A
            CUDA array is one with ``__cuda_array_interface__``; state is made on its device, where
            the gradient must be too. Tensors of torch on the CPU, arrays with ``__dlpack__`` and
            writable buffers are updated through NumPy views of them.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together. No weight, state or count changes.
        ImportError
            An array is on a CUDA device, and numba-cuda or a driver is missing.
        """
        optimizer = self.optimizer
        try:
            plan = self._plans.get(tuple(index) if type(index) is list else index)
        except TypeError:  # of an array, say, which the checks refuse
            plan = None
        if plan is not None:
            if type(grad) is list and not plan.small:
                grad = tuple(grad)  # alive, whatever other threads do to the list meanwhile
            with optimizer.lock:
                if plan.version == optimizer.version:
                    if plan.quick_call((index, grad, weight)):
                        if self._info is not STEPPED:
                            self._info = STEPPED
                        return
                elif optimizer.unchecked:
                    pass  # names of multipliers are checked below
                elif self.planner.measures:
                    if self._measured_again(plan, index, grad, weight):
                        return
                elif (
                    plan.step(1.0, (index, grad, weight)) >= 0
                    if plan.small
                    else plan.fits(index, grad, weight) and not plan.step()
                ):
                    if self._info is not STEPPED:
                        self._info = STEPPED
                    return
        if weight is None:
            raise TypeError(
                "a call takes index, grad and weight; updater.step(grads, weights) takes nested "
                "gradients and weights, named by their paths"
            )
        single = not is_listed(index)
        if single:
            indices, grads, weights = [check_index(index)], [grad], [weight]
        else:
            indices, grads, weights = as_lists(index, grad, weight)
            indices = [check_index(each) for each in indices]
            if not all(isinstance(each, (list, tuple)) for each in (index, grad, weight)):
                self(indices, grads, weights)  # what were views of dictionaries
                return
        groups = self.planner.groups
        if groups is not None and groups.freezes:
            taken = groups.select(indices)
            if taken is not None:
                if indices := taken(indices):
                    self(indices, taken(grads), taken(weights))
                else:
                    self._info = StepInfo(stepped=False, skipped=False)
                return
        if {*map(type, grads), *map(type, weights)} <= OURS:
            self._update(indices, grads, weights, single)
        else:
            self._update_views(indices, grads, weights, single)

    def step(self, grads: Any, weights: Any) -> None:
        """Update nested weights in place: dictionaries, lists, tuples, dataclasses of arrays.

        The index of a weight is its path: the keys, positions and attributes that lead to it,
        joined by dots, such as ``"hidden.weight"`` or ``"layers.0"``; that of an array that is not
        in a container is ``""``. It is otherwise like the call with lists of the indices, the
        gradients and the weights, with the same errors.

        Parameters
        ----------
        grads : dict, list, tuple, named tuple, dataclass instance or array
            Gradients, in containers with the same names as the weights'; types of containers and
            orders of keys may differ. None leaves a weight, or all in a container, alone. A pair
            ``(values, indices)`` in the place of a weight is row-sparse.
        weights : dict, list, tuple, named tuple, dataclass instance or array
            Weights, nested to any depth. They are changed in place, the containers are not.

        Raises
        ------
        ValueError
            A gradient is missing, or has no weight; two weights have the same path. Nothing
            changes.
        TypeError
            The containers do not fit together. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> updater = optimizer.Updater(optimizer.SGD(learning_rate=0.1))
        >>> weights = {"layers": [np.ones(2), np.ones(1)], "scale": np.ones(1)}
        >>> grads = {"layers": [np.ones(2), np.ones(1)], "scale": None}
        >>> updater.step(grads, weights)
        >>> weights
        {'layers': [array([0.9, 0.9]), array([0.9])], 'scale': array([1.])}
        >>> list(updater.states)
        ['layers.0', 'layers.1']
        """
        planner = self.planner
        paths, own, arrays, left = planner.structures.flatten(grads, weights)
        if left and planner.groups is not None:
            planner.groups.note(left)
        self(paths, own, arrays)

    def _update_views(
        self, indices: list[Index], grads: list[Any], weights: list[Any], single: bool
    ) -> None:
        """Update arrays of other libraries by NumPy views of them."""
        own, views = list(grads), list(weights)
        for k, index in enumerate(indices):
            try:
                own[k], views[k] = as_gradient(grads[k]), as_weight(weights[k])
            except (TypeError, ValueError) as error:
                words = label(index, self.optimizer.idx2name)
                raise type(error)(f"{words}: {error}") from error
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
        """Update after all checks, unless a loss scaler or a clip of the norm forbids it."""
        optimizer = self.optimizer
        with optimizer.lock:
            if self._averages is not None:
                self._averages.check_free()
            if optimizer.unchecked and indices:
                waiting = self._windows.calls if self._windows else ()
                optimizer.check_multipliers(indices, waiting)
                if self.planner.groups is not None and not optimizer.unchecked:
                    self.planner.groups.warn_of_unused([*indices, *waiting])
            with uninterrupted:
                if self.planner.measures:
                    self._measured_step(indices, grads, weights, single)
                else:
                    self._step(indices, grads, weights, single)
                    self._info = STEPPED

    def _step(
        self, indices: list[Index], grads: list[Any], weights: list[Any], single: bool
    ) -> None:
        """Update by a new plan, or by code of the user's."""
        optimizer = self.optimizer
        calls = self._checked(indices, grads, weights)
        if not optimizer.native:
            self._update_in_python(calls)
            return
        if optimizer.accumulates or not calls:
            self.planner.update_all(calls)
        else:
            plan = self.planner.prepare(calls, single)
            plan.step()
            self.planner.remember(plan)
        self._keep(calls)

    def _measured_again(self, plan: Any, index: Any, grad: Any, weight: Any) -> bool:
        """Update with summed, scaled and clipped gradients, if the plan fits the call."""
        with uninterrupted:
            if self._windows is not None:
                return self._add_again(self._windows, plan, index, grad, weight)
            if plan.alternates and (plan := plan.chosen()) is None:
                return False
            if not plan.folds:
                return False
            if self._units is not None:
                if (grad := self._clip_again(plan, grad, weight)) is None:
                    return False
            elif plan.small and plan.scales:
                return self._measured_at_once(plan, (index, grad, weight))
            if not plan.fits(index, grad, weight):
                return False
            self._step_again(plan)
        return True

    def _measured_at_once(self, plan: Plan, objects: tuple[Any, Any, Any]) -> bool:
        """Do the same by one kernel."""
        optimizer, limit = self.optimizer, self.clip_global_norm
        scale, norm = scale_of(self.loss_scaler), plan.norm
        norm[RESCALE] = as_float("rescale_grad", optimizer.rescale_grad)
        norm[SCALE], norm[LIMIT] = scale, math.inf if limit is None else limit
        status = plan.step(scale, objects)
        if status < 0:
            return False
        length = norm.item(LENGTH)
        if status == SKIPPED:
            self._report(overflow(plan.squares(), plan.indices, optimizer.idx2name, length))
        else:
            self._report(StepInfo(stepped=True, skipped=False, global_norm=length))
        return True

    def _step_again(self, plan: Plan, share: float = 1.0) -> None:
        """Update by a plan, whose arrays are entered, with gradients times `share`."""
        info, factor = self._measured(lambda: self._squares(plan, ()), plan.indices, share)
        if info.stepped:
            plan.step(factor * share)
        else:
            plan.release()
        self._report(info)

    def _add_again(self, windows: Windows, plan: Any, index: Any, grad: Any, weight: Any) -> bool:
        """Add gradients to their sums by a plan, and update by another after the last of them."""
        indices, phase = plan.indices, windows.phase(plan.indices)
        adding = windows.plan(plan.key, phase) if phase >= 0 else None
        if adding is None or not _are(weight, plan.weights, bool(plan.length)):
            return False
        sums = adding.weights if plan.length else adding.weights[0]
        if phase + 1 < windows.every:
            if not adding.call_again(index, grad, sums):
                return False
            windows.count(indices)
            if self._info is not ACCUMULATED:
                self._info = ACCUMULATED
            return True
        if plan.alternates and (plan := plan.chosen()) is None:
            return False
        if self._units is not None or not plan.folds or not plan.fits(index, sums, weight):
            return False
        steady = plan.filled[:1] == (self.optimizer.version,) and plan.settled
        before = {} if steady else windows.before(indices)  # what is computed may raise
        if not adding.call_again(index, grad, sums):
            return False
        try:
            self._step_again(plan, 1 / windows.every)
        except BaseException:
            windows.put_back(before)
            raise
        windows.close(indices)
        return True

    def _clip_again(self, plan: Plan, grad: Any, weight: Any) -> Any:
        """Gradients with clipped units, if they are like those of the plan; else None."""
        if not _are(weight, plan.weights, bool(plan.length)):
            return None
        grads = grad if plan.length else [grad]
        if plan.length and (type(grad) not in (list, tuple) or len(grad) != plan.length):
            return None
        for each, own in zip(grads, plan.weights, strict=True):
            if type(each) is not np.ndarray or type(own) is not np.ndarray:
                return None
            if each.shape != own.shape or each.dtype != own.dtype:
                return None
        clipped = self._clipped_units(plan.indices, plan.weights, grads, 1.0)
        return clipped if plan.length else clipped[0]

    def _clipped_units(
        self, indices: Sequence[Index], weights: Sequence[Any], grads: Sequence[Any], share: float
    ) -> list[Any]:
        """Gradients with clipped units, which are multiplied by `share` afterwards."""
        assert self._units is not None
        rescale_grad = as_float("rescale_grad", self.optimizer.rescale_grad)
        factor = rescale_grad * share * scale_of(self.loss_scaler)
        return self._units.all(indices, weights, grads, factor, self.optimizer.idx2name)

    def _measured_step(
        self, indices: list[Index], grads: list[Any], weights: list[Any], single: bool
    ) -> None:
        """Update with summed, scaled and clipped gradients, by a new plan or by code of the user's.

        With sums, the plan is that of the parameters whose sums are complete.
        """
        if self._windows is None:
            self._apply(self._checked(indices, grads, weights), single)
        else:
            self._add(self._windows, self._checked_entries(indices, grads, weights), single)

    def _add(self, windows: Windows, entries: Sequence[Entry], single: bool) -> None:
        """Add gradients to their sums, and update the parameters whose sums are complete."""
        optimizer, indices = self.optimizer, [index for index, *_ in entries]
        self._check_summable(entries)
        last = [entry for entry in entries if windows.is_last(entry[0])]
        calls = self._with_states([(i, w, g) for i, w, g in last]) if last else []
        before = windows.before(indices) if last else {}
        try:
            windows.add(entries, optimizer.idx2name, single)
            if last:
                calls = [(i, w, windows.sums[i], state) for i, w, _, state in calls]
                self._apply(calls, single, 1 / windows.every)
        except BaseException:
            windows.put_back(before)
            raise
        complete = [index for index, *_ in last]
        windows.close(complete)
        windows.count([index for index in indices if index not in complete])
        if not last:
            self._info = ACCUMULATED
            waiting = Waiting(indices, [weight for _, weight, _ in entries], single)
            plan = self._plans.get(waiting.key)
            if plan is None or not all(map(is_, waiting.weights, plan.weights)):
                self.planner.keep(waiting.key, waiting)

    def _check_summable(self, entries: Sequence[Entry]) -> None:
        """Raise unless gradients can be added to sums: an index once, rows on the host."""
        names, seen = self.optimizer.idx2name, set[Index]()
        for index, weight, grad in entries:
            words, optimizer = label(index, names), self.planner.of(index).optimizer
            if index in seen:
                raise ValueError(f"{words}: accumulate={self.accumulate} takes an index once")
            seen.add(index)
            lazy = isinstance(grad, RowSparse) and optimizer.lazy_update and is_cuda(weight)
            if lazy and optimizer.native:
                raise TypeError(
                    f"{words}: lazy updates on a CUDA device need a sum of indexed rows, which is "
                    "kept on the host alone: accumulate takes dense gradients there, or "
                    "lazy_update=False"
                )

    def _apply(self, calls: list[Call], single: bool, share: float = 1.0) -> None:
        """Update with scaled and clipped gradients, which are multiplied by `share`."""
        optimizer, indices = self.optimizer, [index for index, *_ in calls]
        if self._units is not None and calls:
            _, weights, grads, states = map(list, zip(*calls, strict=True))
            grads = self._clipped_units(indices, weights, grads, share)
            calls = list(zip(indices, weights, grads, states, strict=True))
        plan = self.planner.prepare(calls, single) if calls and self.planner.folds else None
        info, factor = self._measured(lambda: self._squares(plan, calls), indices, share)
        if info.stepped:
            if plan is not None:
                plan.step(factor * share)
                self.planner.remember(plan)
            else:
                factor *= share
                folds = {index: self.planner.of(index).optimizer.folds for index in indices}
                calls = [
                    (i, w, grad if folds[i] else times(grad, factor), state)
                    for i, w, grad, state in calls
                ]
                if optimizer.native:
                    self.planner.update_all(calls, factor=factor if any(folds.values()) else 1.0)
                else:
                    self._update_in_python(calls)
            self._keep(calls)
        elif plan is not None:
            plan.release()
        self._report(info)

    def _measured(
        self, sums: Callable[[], NDArray[np.float64]], indices: list[Index], share: float = 1.0
    ) -> tuple[StepInfo, float]:
        """What to do with gradients of these sums of squares, and the factor to do it with.

        They are multiplied by `share` too.
        """
        if self.loss_scaler is None and self.clip_global_norm is None:
            return STEPPED, 1.0
        optimizer = self.optimizer
        return measured(
            sums(),
            indices,
            optimizer.idx2name,
            as_float("rescale_grad", optimizer.rescale_grad) * share,
            self.loss_scaler,
            self.clip_global_norm,
        )

    def _report(self, info: StepInfo) -> None:
        """Keep what a call did."""
        vars(self)["_info"] = info  # past the checks of other attributes
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=info.skipped)

    def _squares(self, plan: Plan | None, calls: Sequence[Call]) -> NDArray[np.float64]:
        """Sum of the squares of each gradient."""
        return squares(calls) if plan is None or plan.in_order else plan.squares()

    def _update_in_python(self, calls: Sequence[Call]) -> None:
        """Update by a class that overrides ``update()``."""
        optimizer = self.optimizer
        if len(calls) > 1:
            optimizer.check_calls(calls)
        for call in calls:
            index, weight, grad, state = call
            if type(optimizer).update_multi_precision is not Optimizer.update_multi_precision:
                optimizer.update_multi_precision(index, weight, grad, state)
            else:
                copy = self.planner.copies.get(index)
                optimizer.update_in_python(index, weight, grad, state, copy)
            self._keep([call])  # even if code of the user's fails at the next one

    def _keep(self, calls: Sequence[Call]) -> None:
        """Keep the states of weights that have been updated."""
        for index, _, _, state in calls:
            dict.__setitem__(self.states, index, state)
            dict.__setitem__(self.states_synced, index, True)
            self.optimizer.masters_given.pop(index, None)

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Calls with states, which are created for new indices once all arrays are checked."""
        return self._with_states(self._checked_entries(indices, grads, weights))

    def _checked_entries(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Entry]:
        """Indices, weights and gradients that fit together."""
        optimizer = self.optimizer
        checked = []
        for index, grad, weight in zip(indices, grads, weights, strict=True):
            words = label(index, optimizer.idx2name)
            grad = check(words, weight, grad, self.planner.copies.get(index))
            if isinstance(grad, RowSparse) and not optimizer.native:
                grad = optimizer.dense_gradient(index, weight, grad)
            checked.append((index, weight, grad))
        return checked

    def _with_states(self, checked: Sequence[Entry]) -> list[Call]:
        """Calls with states, which are created for new indices."""
        states: dict[Index, Any] = {}
        for index, weight, grad in checked:
            if index not in states:
                states[index] = self._state(index, weight, isinstance(grad, RowSparse))
        return [(index, weight, grad, states[index]) for index, weight, grad in checked]

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """State of `index` on its weight's device, created for a new index."""
        if index not in self.states:
            optimizer = self.planner.of(index).optimizer
            state = optimizer.create_state_multi_precision(index, weight)
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
        set_master(self.planner.of(index).optimizer, index, array, self.states.get(index))

    def state_as(self, index: Any, dtype: Any = np.float32) -> Any:
        """Copy of the state of a parameter in another precision.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        dtype : dtype_like
            Floating-point type of the copies. Default float32.

        Returns
        -------
        None, numpy.ndarray, tuple or list
            The state as `states` has it, with an array of the weight's shape for each slot, also
            where that is in 8 bits. A master is copied as it is.

        Raises
        ------
        KeyError
            The parameter has no state yet.
        TypeError
            `dtype` is not a floating-point type, the state is on a device, or the optimizer updates
            by Python code.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.Adam(state_dtype="int8", state_min_size=1))
        >>> updater(0, np.array([1.0, -0.5], np.float32), np.zeros(2, np.float32))
        >>> codes, scales = updater.states[0][0]
        >>> codes
        array([127, -64], dtype=int8)
        >>> updater.state_as(0)[0].round(4)
        array([ 0.1   , -0.0504], dtype=float32)
        """
        index, dtype = check_index(index), np.dtype(dtype)
        if not (np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"):
            raise TypeError(f"dtype must be a floating-point type, got {dtype}")
        with self.optimizer.lock:
            of = self.planner.of(index).optimizer
            return mapped_slots(of, index, self.states[index], lambda _, slot: slot.astype(dtype))

    def set_state_dtype(self, state_dtype: Literal["bfloat16", "int8"] | None) -> None:
        """Keep states in another precision from now on; those that exist are converted.

        Parameters
        ----------
        state_dtype : str or None
            As :class:`~fastopt.optimizer.Optimizer` takes it. It becomes the optimizer's, and that
            of groups that do not have one of their own.

        Raises
        ------
        ValueError, TypeError
            There is no such precision, the rule has no slot that 8 bits can hold, a state is on a
            device, or the optimizer updates by Python code. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(momentum=0.9))
        >>> updater(0, np.ones((64, 64), np.float32), np.ones((64, 64), np.float32))
        >>> updater.set_state_dtype("int8")
        >>> [(array.dtype.name, array.shape) for array in updater.states[0]]
        [('int8', (64, 64)), ('float32', (64, 1))]
        """
        optimizer = self.optimizer
        with optimizer.lock, uninterrupted:
            before = optimizer.state_dtype
            optimizer.state_dtype = state_dtype
            try:
                optimizer.check_together()
                if self.planner.groups is not None:
                    self.planner.groups.generation()
                states = {
                    index: in_dtype_of(
                        self.planner.of(index).optimizer,
                        index,
                        state,
                        self.planner.updated.get(index),
                    )
                    for index, state in self.states.items()
                }
            except BaseException:
                optimizer.state_dtype = before
                raise
            dict.update(self.states, states)
            self._forget_plans()

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
        self.planner.set_copy(check_index(index), array)

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
            if self._averages is not None:
                self._averages.check_free()
            words = label(index, optimizer.idx2name)
            last = latest(self.planner.updated.get(index)) if weight is None else weight
            last = as_weight(last)
            if last is None:
                raise ValueError(f"{words}: flush needs the weight, which was not updated yet")
            state = self._state(index, last) if index in self.states else None
            self.planner.of(index).flush(index, last, state)
            if index in self.states:
                dict.__setitem__(self.states, index, state)
                dict.__setitem__(self.states_synced, index, True)

    # Averages of the weights

    @property
    def averages(self) -> dict[Index, Any]:
        """Average of each index, an array of float32, or of float64 for float64 weights.

        Empty without `average`. The arrays are those that updates write to.
        """
        return {} if self._averages is None else dict(self._averages.arrays)

    @contextmanager
    def averaged(self, weights: Mapping[Any, Any] | None = None) -> Iterator[None]:
        """Context in which the weights hold their averages.

        At its end, also by an exception, they hold again what they held; what was written to them
        inside is lost. Half-precision copies (:meth:`set_copy`) follow. It takes memory for a copy
        of the weights. Updates, :meth:`flush`, loads and another ``averaged()`` are errors inside.
        Weights of frozen groups keep their values.

        Without `average` they hold the averages that the optimizer's own state has: ASGD and the
        Schedule-Free optimizers have some. :meth:`save` is an error then.

        With `average` :meth:`save` inside writes averages and what the weights held: after a load
        of such a file call :meth:`restore_weights`, whatever was saved of the weights.

        Parameters
        ----------
        weights : mapping of index to array, optional
            Weights that were not updated yet by this updater, as after a load. Default: all that
            have an average are those that were last updated.

        Raises
        ------
        RuntimeError
            Neither updater nor optimizer has averages, or the weights hold them already.
        ValueError
            The weight of an index that has an average is not known, an index of `weights` has no
            average, or a weight has another shape than its average.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> sgd = fastopt.optimizer.SGD(learning_rate=1.0)
        >>> updater = fastopt.Updater(sgd, average=fastopt.EMA(decay=0.5))
        >>> weight = np.zeros(1)
        >>> updater(0, np.array([-1.0]), weight)
        >>> with updater.averaged():
        ...     print(weight)
        [0.5]
        >>> weight
        array([1.])
        """
        before, entered = self._averages, False
        averages = self._require_averages() if before or not self._evaluates else Averages(None)
        try:
            with self.optimizer.lock, uninterrupted:
                averages.check_free()
                if before is None:
                    averages.arrays = self._leading()
                needed = {i: a for i, a in averages.arrays.items() if not self._is_frozen(i)}
                targets = self._targets(averages, needed, weights)
                if before is None:
                    averages.arrays = self._evaluated(targets)
                entered = True
                vars(self)["_averages"] = averages
                averages.swap_in(targets)
                vars(self)["_plans"] = {}  # every call is checked
            yield
        finally:
            if entered:
                with self.optimizer.lock, uninterrupted:
                    averages.swap_out()
                    vars(self)["_averages"] = before
                    vars(self)["_plans"] = self.planner.plans

    @property
    def _evaluates(self) -> bool:
        """Whether an optimizer has other weights to evaluate than those that it updates."""
        groups = self.planner.groups
        return self.optimizer.evaluates or (groups is not None and groups.evaluates)

    def _inner_state(self, index: Index, weight: Any) -> tuple[Any, list[Any]]:
        """Exact parts of a weight, and the arrays of its state besides."""
        of = self.planner.of(index).optimizer
        words, weight, state = label(index, of.idx2name), header(weight), self.states[index]
        if has_master(of, weight):
            exact, state = split_state(of, words, weight, state)
        else:
            exact = (weight,)
        return exact, [host(header(array)) for array in leaves(state)]

    def _leading(self) -> dict[Index, Any]:
        """Last array of each state from which weights to evaluate are found; it has their shape."""
        return {
            index: leaves(state)[-1]
            for index, state in self.states.items()
            if self.planner.of(index).optimizer.evaluates
        }

    def _evaluated(self, targets: Mapping[Index, Sequence[Any]]) -> dict[Index, Any]:
        """Weights to evaluate, by index."""
        found = {}
        for index, (weight, *_) in targets.items():
            exact, state = self._inner_state(index, weight)
            of = self.planner.of(index).optimizer
            found[index] = of.evaluated(host(exact_copy(exact)), state)
        return found

    def restore_weights(self, weights: Mapping[Any, Any]) -> None:
        """Write what weights held when their averages were swapped in, and the state was saved.

        Parameters
        ----------
        weights : mapping of index to array
            The weights of the checkpoint; they are written to.

        Raises
        ------
        RuntimeError
            The updater has not loaded what :meth:`save` wrote inside of :meth:`averaged`.
        ValueError
            A weight is missing, or does not fit. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> def make():
        ...     sgd = fastopt.optimizer.SGD(learning_rate=1.0)
        ...     return fastopt.Updater(sgd, average=fastopt.EMA(decay=0.5))
        >>> old, new, weight = make(), make(), np.zeros(1)
        >>> old(0, np.array([-1.0]), weight)
        >>> with old.averaged():
        ...     _ = new.load_states_dict(old.states_dict())
        ...     copy = weight.copy()
        >>> new.restore_weights({0: copy})
        >>> copy
        array([1.])
        """
        with self.optimizer.lock, uninterrupted:
            averages = self._require_averages()
            if averages.held is None or averages.inside:
                raise RuntimeError(
                    "restore_weights() is for a state that was saved inside of averaged()"
                )
            targets = self._targets(averages, averages.held, weights)
            averages.restore({index: arrays[0] for index, arrays in targets.items()})

    def _is_frozen(self, index: Index) -> bool:
        """Whether the group of an index is frozen."""
        return self.planner.groups is not None and self.planner.groups.is_frozen(index)

    def _require_averages(self) -> Averages:
        if self._averages is None:
            raise RuntimeError("the updater has no average: Updater(optimizer, average=EMA())")
        return self._averages

    def _targets(
        self, averages: Averages, needed: Mapping[Index, Any], weights: Mapping[Any, Any] | None
    ) -> dict[Index, list[Any]]:
        """Weight of each index, with its half-precision copy if it has one."""
        if not isinstance(weights, Mapping | None):
            raise TypeError(f"weights must map indices to arrays, got {brief(weights)}")
        own = {check_index(index): weight for index, weight in (weights or {}).items()}
        names = self.optimizer.idx2name
        for index in [each for each in own if each not in needed and not self._is_frozen(each)]:
            raise ValueError(f"{label(index, names)}: the updater has no average of it")
        targets = {}
        for index in needed:
            weight = own.get(index, self.planner.updated.get(index))
            if weight is None:
                raise ValueError(
                    f"{label(index, names)}: its weight was not updated yet by this updater; pass "
                    "it in weights={index: array}"
                )
            averages.check_target(label(index, names), index, header(weight))
            copy = self.planner.copies.get(index)
            targets[index] = [weight] if copy is None else [weight, copy]
        return targets

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


@constructs(Updater)
def get_updater(
    optimizer: Optimizer | str,
    loss_scaler: LossScaler | None = None,
    clip_global_norm: float | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    accumulate: int = 1,
    average: Average | None = None,
    clip_adaptive: float | None = None,
    clip_adaptive_eps: float = 1e-3,
) -> Updater:
    """Return an :class:`Updater` for an optimizer.

    Parameters
    ----------
    optimizer : Optimizer or str
        The optimizer or its name.
    loss_scaler, clip_global_norm, groups, accumulate, average, clip_adaptive, clip_adaptive_eps
        Arguments of :class:`Updater`, with the same errors.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater("adam", clip_global_norm=1.0)
    >>> updater
    Updater(Adam(learning_rate=0.001), clip_global_norm=1.0, states=0)
    """
    return Updater(
        optimizer,
        loss_scaler,
        clip_global_norm,
        groups,
        accumulate,
        average,
        clip_adaptive,
        clip_adaptive_eps,
    )


def _are(weights: Any, known: Sequence[Any], listed: bool) -> bool:
    """Whether the weights of a call are those of its plan."""
    if not listed:
        return weights is known[0]
    if type(weights) not in (list, tuple) or len(weights) != len(known):
        return False
    return all(map(is_, weights, known))
