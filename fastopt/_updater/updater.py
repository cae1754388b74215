"""The updater: holds the state of each parameter and passes calls to records."""

import copy
import inspect
from collections import ChainMap
from collections.abc import Callable, KeysView, Mapping, Sequence, ValuesView
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter, is_
from threading import RLock
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self, TypeVar, overload

import numpy as np

from fastopt._advice import Advice
from fastopt._arrays import Gradient, Weight
from fastopt._engine.averaging import Averages, exact_copy
from fastopt._engine.backend import WHOLE, Backend
from fastopt._engine.clip import LIMITS, STEPPED, UNCHANGED, Settings, times
from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.contract import batches_of
from fastopt._engine.devices import settle
from fastopt._engine.extras import check_given, extras_at, update_with
from fastopt._engine.flush import flush
from fastopt._engine.mixed_precision import set_master
from fastopt._engine.owner import clip, measure
from fastopt._engine.parameters import Call, DeviceRecord, Given, Parameters
from fastopt._engine.records import Records
from fastopt._engine.slow_calls import SlowCallCounter
from fastopt._engine.state_dtype import in_dtype_of, mapped_slots
from fastopt._engine.tracked import Tracked, weakly
from fastopt._engine.validate import (
    as_lists,
    check,
    check_index,
    check_known,
    check_like,
    is_listed,
    label,
    leaves,
    naming,
    real_views,
    repeated,
    selected,
)
from fastopt._foreign import as_gradient, as_real, as_weight, owner_of
from fastopt._interrupts import between_updates, uninterrupted
from fastopt._kernels import record_words as w
from fastopt._kernels.device_memory import allocated_together, host, placed
from fastopt._kernels.devices import header, is_cuda, mark_written
from fastopt._kernels.numpy_abi import warn_of_layouts
from fastopt._kernels.pages import small_pages
from fastopt._kernels.record_words import DONE, EXPECTED, MOVED, OK, REPEATS, UNKNOWN
from fastopt._kernels.threads import start_locks
from fastopt._notices import warn_user
from fastopt._structure import Structures, as_given, copies
from fastopt._updater import averaged
from fastopt._updater.resizing import checked_rows, resized
from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import (
    Checked,
    Descriptions,
    Instance,
    Integer,
    OrNone,
    brief,
    constructs,
    flag,
    without_address,
)
from fastopt.averages import Average, check_average
from fastopt.checkpoint.foreign.mxnet import described_by_mxnet
from fastopt.checkpoint.format.errors import read_from
from fastopt.checkpoint.format.files import PathLike, write_atomically
from fastopt.checkpoint.format.tree import chunks, dumps, loads
from fastopt.checkpoint.restore.describe import copied, describe, describe_states
from fastopt.checkpoint.restore.parameters import Skipped
from fastopt.checkpoint.restore.restore import restore, restore_states
from fastopt.checkpoint.restore.shards import read_whole
from fastopt.optimizer.accumulation import Entry, Windows, incomplete
from fastopt.optimizer.groups import Groups, check_averaged
from fastopt.optimizer.optimizer import Array, Index, Optimizer, create, reject_reentrant
from fastopt.sparse import HALVES, REALS, RowSparse

T = TypeVar("T")

OURS = {np.ndarray}
"""Type of arrays that are used without a view, if their numbers are real."""

KIND = attrgetter("dtype.kind")

OF_OPTIMIZER = ("lr", "learning_rate")
"""Attributes that belong to the optimizer and cannot be set on an updater."""

DEFAULTS = {
    **dict.fromkeys(("loss_scaler", "clip_global_norm")),
    "accumulate": 1,
    "average": None,
    "clip_adaptive_eps": 1e-3,
    "clip_adaptive": None,
}
"""Settings that do nothing."""

OF_OBJECT = ("name", "lr_mult", "wd_mult")
"""Attributes that an optimizer uses of the objects in its `param_dict`."""

FOLLOWED = {"states": "_follow_states", "states_synced": "_forget_records"}
"""What follows a change inside of these attributes."""

CHANGING = frozenset({"optimizer", "groups", *FOLLOWED, *DEFAULTS, "_windows", "_averages"})
"""Attributes that records depend on."""


class Updater(Checked):
    """Update weights in place with an optimizer, and hold its state for each index.

    Parameters
    ----------
    optimizer : Optimizer or str
        The optimizer, or the registered name of a class, which is created with its defaults. If
        another updater has the optimizer, this one has a copy that has made no updates: counts,
        the clock of a schedule and numbers that an optimizer keeps belong to an updater, while an
        argument that is set in one of them (``optimizer.lr = 0.1``) is set in all.
    loss_scaler : fastopt.amp.LossScaler, optional
        Divides gradients by the scale that the loss was multiplied by. A call with a non-finite
        gradient updates nothing and reduces the scale.
    clip_global_norm : float, optional
        Maximum norm of all gradients of a call, concatenated, rescaled and divided by the loss
        scale; gradients with a larger norm are scaled down to it, 0 zeroes them. A call with a
        non-finite gradient updates nothing, also with ``inf``, which measures the norm alone.
        Default None: no limit.
    groups : dict of str to dict, optional
        Hyper-parameters of groups of weights, by regular expression: a weight belongs to the first
        group whose pattern ``re.search`` finds in its name, which is the entry of ``idx2name`` or
        the index. A group may override any argument of the optimizer and set ``lr_mult`` and
        ``wd_mult``. With ``"frozen": True`` its weights are not updated, and their gradients may
        be None or missing. With ``"optimizer"`` it uses another optimizer, given as an object or
        by name, which shares update counts, names and `rescale_grad` with `optimizer` but has its
        own multipliers. Default: no groups.
    accumulate : int
        Number of calls per update of an index, which uses the mean of their gradients. Default 1.
        See :doc:`accumulation </accumulation>`.
    average : EMA, SWA or Lookahead, optional
        Average of the weights to maintain, see :attr:`averages` and :meth:`averaged`. Default
        None.
    clip_adaptive : float, optional
        Maximum ratio of the gradient norm of a unit to its weight norm; larger gradients are scaled
        down to it. Units are the slices along the first axis, or the whole weight if it has fewer
        than two dimensions. Default None: no limit. See
        :doc:`clipping </clipping>`.
    clip_adaptive_eps : float
        Lower bound of the weight norm of a unit in this ratio. Default 1e-3.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer.
    info : fastopt.amp.StepInfo
        Outcome of the last call: whether it updated the weights, the global norm (with a loss
        scaler or `clip_global_norm`), and the names of parameters with non-finite gradients; and
        the number of calls that took the slow path through Python, with reasons.
    groups : mapping or None
        The groups, read-only; assign a new mapping to change them.
    states : dict
        State of each index that has been updated, as created by ``create_state``. Removing an item
        also forgets the updates of its parameter.
    states_synced : dict
        Whether the state of an index is on its weight's device.

    Raises
    ------
    TypeError
        `optimizer` is not an :class:`Optimizer`, or `loss_scaler` is not a LossScaler; a group has
        a hyper-parameter that its optimizer lacks, or one of the wrong type; `average` has the
        wrong type, an optimizer does not support it because it overrides ``update()`` or counts
        updates differently, or only some of the optimizers have averages in their own state.
    ValueError
        `clip_global_norm`, `clip_adaptive` or `clip_adaptive_eps` is negative or NaN, or one of the
        last two infinite; `accumulate` is less than 1; a pattern is not a regular expression, or a
        hyper-parameter of a group is out of range; or no class is registered under the name
        `optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1))
    >>> weight = np.ones(3, np.float32)
    >>> updater.step(np.full(3, 2, np.float32), weight)
    >>> weight
    array([0.8, 0.8, 0.8], dtype=float32)

    Groups of weights:

    >>> groups = {r"bias$|norm": {"wd_mult": 0.0}, r"^embed": {"frozen": True}}
    >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1, wd=0.5), groups=groups)
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
        settings = locals()
        warn_of_layouts()
        optimizer = create(optimizer)
        if not hasattr(optimizer, "idx2name"):
            raise TypeError(f"{type(optimizer).__name__}.__init__ must call super().__init__()")
        self._start()
        self.optimizer = optimizer
        for name, default in DEFAULTS.items():
            if settings[name] is not default:
                setattr(self, name, settings[name])
        if groups is not None:
            self.groups = groups

    optimizer: Optimizer
    loss_scaler: LossScaler | None
    clip_global_norm: float | None
    accumulate: int
    groups: Mapping[str, Mapping[str, Any]] | None = None
    average: Average | None
    clip_adaptive: float | None
    clip_adaptive_eps: float
    parameters: Parameters
    settings: Settings
    states: dict[Index, Any]
    states_synced: dict[Index, bool]
    records: Records
    takes_extra: bool = False
    """Whether a call has extra arrays, which are in the states now."""
    _info: StepInfo
    _windows: Windows | None = None
    _averages: Averages | None = None
    _slow: SlowCallCounter | None = None
    lock: Any
    """Lock that is held during calls and changes of settings, by one thread at a time."""

    backend: Backend = WHOLE
    """Where the tensors of calls are whole."""
    structures: Structures
    """Paths of the nested structures that have been updated."""
    runs_updates: bool = True
    """Whether updates run the optimizer's ``update()``, which a class may override."""
    arguments: ClassVar[Descriptions] = {
        "loss_scaler": OrNone(Instance(LossScaler, "a LossScaler (weights are arguments of step)")),
        "accumulate": Integer(most=None),
        "average": check_average,
        **LIMITS,
    }
    attribute_advice = Advice("UPDATER_ATTRIBUTES")
    argument_names = Advice("UPDATER_NAMES")
    argument_advice = Advice("UPDATER_ARGUMENTS")
    unlisted = Checked.unlisted | {
        *("backend", "forget", "lock", "parameters", "records", "runs_updates"),
        *("settings", "structures"),
        "takes_extra",
    }

    def __repr__(self) -> str:
        attributes, arguments = vars(self), inspect.signature(type(self).__init__).parameters
        settings = ""
        for name, parameter in list(arguments.items())[2:]:
            value = attributes.get(name)
            if value is not None and value != parameter.default:
                settings += f"{name}={_shown(value)}, "
        number = len(attributes.get("states", ()))
        return f"{type(self).__name__}({attributes.get('optimizer')!r}, {settings}states={number})"

    def _start(self) -> None:
        """Initialize all attributes but the optimizer."""
        start_locks(self)
        vars(self).update(DEFAULTS, settings=Settings(), _info=UNCHANGED)
        for name in FOLLOWED:
            self._track(name, {})

    def _start_locks(self) -> None:
        vars(self)["lock"] = RLock()

    @property
    def info(self) -> StepInfo:
        """Outcome of the last call, and the number of slow calls so far."""
        self._settle()
        sums, info, slow = self.optimizer.step_sums, self._info, self._slow
        if slow is not None:
            info = info._replace(slow=slow.calls)
        return info if sums is None else info._replace(d=sums.d)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_OPTIMIZER:
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{missing} to set; set updater.optimizer.learning_rate")
        if name == "optimizer":
            # Before this lock: it may wait for another's.
            value = create(value).claimed(self, assigned="optimizer" in vars(self))
        if name not in CHANGING:
            super().__setattr__(name, value)
            return
        # No call of another thread, nor a handler of Ctrl-C, may see records of other settings.
        with self.lock, uninterrupted:
            try:
                self._change(name, value)
            finally:
                self.forget()

    def _change(self, name: str, value: Any) -> None:
        """Set an attribute that records depend on."""
        if name == "groups":
            self._group(value, self.parameters, self.optimizer)
            if self._windows is not None:
                self._windows.freeze(self._is_frozen)
        elif name == "optimizer":
            if value is not vars(self).get(name):
                self._plan_with(value)
        elif name in FOLLOWED:
            self._track(name, value)
            if name == "states":
                self._follow_states()
        else:
            if name == "loss_scaler" and self._windows is not None and self._windows.calls:
                raise ValueError(
                    "loss_scaler cannot change while gradients with its scale wait for their "
                    "update: call finish() or reset() before"
                )
            if name == "accumulate":
                vars(self)["_windows"] = Windows.changed(self._windows, value)
            elif name == "average":
                self._average(self.arguments[name](name, value))
            super().__setattr__(name, value)
            self.parameters.averages, ratio = self._averages, self.clip_adaptive
            units = None if ratio is None else UnitClip(ratio, self.clip_adaptive_eps)
            made = Settings(self.loss_scaler, self.clip_global_norm, units, self.accumulate)
            vars(self)["settings"] = made

    def _track(self, name: str, items: Mapping[Index, Any]) -> None:
        """Set the states or `states_synced` to a dictionary that records follow."""
        vars(self)[name] = Tracked(items, weakly(getattr(self, FOLLOWED[name])))

    def _plan_with(self, optimizer: Optimizer) -> None:
        """Switch to another optimizer; nothing changes if the groups do not match it."""
        parameters, before = Parameters(optimizer), vars(self).get("parameters")
        if before is not None:
            parameters.follow(before)
        self._group(vars(self).get("groups"), parameters, optimizer)
        vars(self).update(
            optimizer=optimizer,
            parameters=parameters,
            records=Records(parameters),
            structures=Structures(),
        )

    def _group(self, groups: Any, parameters: Parameters, main: Optimizer) -> None:
        """Set the groups of `parameters`."""
        new = None if groups is None else Groups(groups, main)
        if new is not None:
            self.backend.check([main, *new.optimizers()])
            if (average := vars(self).get("average")) is not None:
                new.check_average(average)
        for index, known in self.states_synced.items():  # of a load they are checked in the call
            if known and not (new is not None and new.is_frozen(index)):
                after = main if new is None else new.of(index)
                before = self.parameters.optimizer_of(index)
                after.check_takes_over(before, index, self.states.get(index))
        parameters.groups = new
        vars(self)["groups"] = None if new is None else new.given
        if new is not None:
            new.main.unchecked = True  # patterns are checked with the names of multipliers

    def _average(self, average: Average | None) -> None:
        """Go on with another average, or start one; nothing changes if it does not fit."""
        if average is not None:
            check_averaged(self.optimizer, average)
            if self.parameters.groups is not None:
                self.parameters.groups.check_average(average)
        now = self._averages
        if average is not None and now is not None and type(now.average) is type(average):
            now.average = average
        else:
            if now is not None:
                now.check_free()
            vars(self)["_averages"] = None if average is None else Averages(average)

    def _forget_records(self, *indices: Index) -> None:
        """Discard the records of some parameters, or of all, since their states may be others."""
        with self.lock, uninterrupted:
            if not indices:
                self.forget()
            for index in indices:
                self.records.drop(index)

    def _serve(self, backend: Backend) -> None:
        """Update the tensors of a backend from now on, such as slices of those of several ranks."""
        groups = self.parameters.groups
        if groups is not None:
            backend.check([self.optimizer, *groups.optimizers()])
        with self.lock, uninterrupted:
            vars(self).update(backend=backend, records=Records(self.parameters))

    def _has_records(self) -> bool:
        """Whether updates have checked all states, so that others of their form need no check."""
        records = self.records
        plain = self.parameters.groups is None and self._windows is None and self._averages is None
        plain = plain and type(self).sync_state_context is Updater.sync_state_context
        known = plain and records.mode_version == self.optimizer.mode_version
        known = known and records.devices is None
        return known and all(records.key_of(index) in records.slots for index in self.states)

    def _put_states(self, states: dict[Index, Any], alike: bool) -> None:
        """Replace all states by those of a checkpoint, with `alike` by others of their form."""
        if not alike:
            self.states_synced = dict.fromkeys(states, False)
            self.states = states
            return
        with self.lock, uninterrupted:
            self._track("states", states)
            self._track("states_synced", dict.fromkeys(states, False))
            self._follow_states(*states)
            self.records.follow_load(self.states_synced)

    def _follow_states(self, *indices: Index) -> None:
        """Follow other states of some parameters, or of all.

        Parameters whose state was removed have made no updates.
        """
        with self.lock, uninterrupted:
            states, records, synced = self.states, self.records, self.states_synced
            for index in indices:
                if index in states:
                    records.relink(index, states[index])
                else:
                    records.drop(index)
            if not indices:
                self.forget()
            if removed := {i for i in indices or synced if i in synced and i not in states}:
                if self._windows:
                    self._windows.calls = self._windows.without(removed)
                if self._averages is not None:
                    self._averages.restarted |= removed
                for index in removed:
                    dict.pop(synced, index)
                for optimizer in self.parameters.optimizers():
                    optimizer.restart(removed)

    def __getstate__(self) -> dict[str, Any]:
        """Attributes; states on a device are copied to the host until their next update."""
        with between_updates(self.lock, "a copy of the updater"):
            return self._attributes()

    def _attributes(self) -> dict[str, Any]:
        self._settle()
        hidden = {"backend", "parameters", "records", "structures", "settings"}
        hidden |= {"lock", "_slow"}
        synced = {
            index: bool(known) and not any(map(is_cuda, leaves(self.states.get(index))))
            for index, known in self.states_synced.items()
        }
        kept = {name: value for name, value in vars(self).items() if name not in hidden}
        if self.groups is not None:  # a read-only view, which cannot be pickled
            kept["groups"] = {pattern: dict(settings) for pattern, settings in self.groups.items()}
        if objects := self.optimizer.param_dict:  # a copy has their multipliers
            kept["param_dict"] = {
                index: SimpleNamespace(**{k: getattr(of, k) for k in OF_OBJECT if hasattr(of, k)})
                for index, of in objects.items()
            }
        return {**kept, "states": host(dict(self.states)), "states_synced": synced}

    def __copy__(self) -> Self:
        """Return a copy with states of its own, as of an array."""
        return copy.deepcopy(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        optimizer = state["optimizer"]
        self.optimizer = optimizer if optimizer.claim is None else copy.copy(optimizer)
        self.optimizer.param_dict = state.get("param_dict", {})
        rest = [name for name in state if name not in ("optimizer", "param_dict", *FOLLOWED)]
        for name in (*rest, *FOLLOWED):  # states are those of the groups' optimizers
            setattr(self, name, state[name])

    @overload
    def __call__(
        self,
        index: int | str | bytes,
        grad: Gradient,
        weight: Weight,
        extra: Gradient | None = None,
    ) -> None: ...

    @overload
    def __call__(
        self,
        index: Sequence[int | str | bytes] | KeysView[Any],
        grad: Sequence[Gradient] | ValuesView[Gradient],
        weight: Sequence[Weight] | ValuesView[Weight],
        extra: Sequence[Gradient | None] | ValuesView[Gradient | None] | None = None,
    ) -> None: ...

    def __call__(self, index: Any, grad: Any, weight: Any = None, extra: Any = None) -> None:
        """Update `weight` in place.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameter, which selects its state and update count. A list may be any sequence or
            a dictionary view, as in ``updater(w.keys(), g.values(), w.values())``.
        grad : numpy.ndarray or CUDA array, or a list of them
            Gradient with the weight's shape, in any memory order. On the host it may have any real
            floating dtype, and is converted to that of the arithmetic; on a device it has the
            weight's, or float32 for half-precision weights. That of a complex weight is
            ``dL/dRe + 1j * dL/dIm``. A number is a gradient of a weight with one element. It is
            not changed. A row-sparse gradient may be a :class:`~fastopt.sparse.RowSparse`, a pair
            ``(values, indices)``, or a scipy.sparse array in CSR or COO format.
        weight : numpy.ndarray or CUDA array, or a list of them
            float32, float64, float16 or bfloat16 array of any shape and layout, updated in place;
            a complex one is updated as pairs of real numbers, see
            :doc:`complex weights </complex-weights>`. A CUDA array is an object with
            ``__cuda_array_interface__``; its state is created on its device, and its gradient must
            be on the same device. Torch tensors on the CPU, arrays with ``__dlpack__`` and writable
            buffers are updated through NumPy views.
        extra : numpy.ndarray or row-sparse array, or a list of them, optional
            Array for a rule that takes a second one in each call, such as a gradient at other
            weights, in any form of a gradient on the host; see ``extra`` of
            :func:`fastopt.rule`. It is neither rescaled nor clipped. Rows that a row-sparse array
            lacks are 0. In a list, None is for rules that take none.

        Raises
        ------
        TypeError, ValueError
            The arguments do not match. No weight, state or count changes.
        ImportError
            An array is on a CUDA device, and numba-cuda or the driver is missing.
        """
        if extra is not None:
            update_with(self, index, grad, weight, extra)
            return
        with self.lock:
            optimizer, records = self.optimizer, self.records
            if optimizer.updating.locked():
                pass  # reported by the checks
            elif records.direct and records.version == optimizer.version:
                if records.mode.foresees:
                    if type(index) in (list, tuple):  # what a failed call has foreseen may be old
                        records.view[EXPECTED] = 0
                    else:
                        with optimizer.updating:
                            records.foresee(self, index)
                status = records.enter(records.context, index, grad, weight)
                if status == MOVED:
                    records.note(index, weight)
                elif status < UNKNOWN:
                    with optimizer.updating:
                        status = records.resolve(self, status, index, grad, weight)
                if status >= 0:
                    if self._info is not STEPPED:
                        self._info = STEPPED
                    return
            elif self._enter(index, grad, weight):
                return
            self._check_call(index, grad, weight)

    def _check_call(self, index: Any, grad: Any, weight: Any) -> None:
        """Update after all arguments have been checked, or raise."""
        optimizer = self.optimizer
        if weight is None:
            named = isinstance(index, (int, str, bytes))
            prefix = f"{label(index, optimizer.idx2name)}: weight is None; " if named else ""
            raise TypeError(
                f"{prefix}a call takes index, grad and weight; updater.step(grads, weights) takes "
                "nested gradients and weights, named by their paths"
            )
        single = not is_listed(index)
        if single:
            indices, grads, weights = [check_index(index)], [grad], [weight]
            if indices[0] is not index:
                self(indices[0], grad, weight)  # bytes, or a NumPy integer or string
                return
        else:
            keys, grads, weights = as_lists(index, grad, weight)
            indices = [check_index(key) for key in keys]
            lists = all(isinstance(arg, (list, tuple)) for arg in (index, grad, weight))
            if not (lists and all(map(is_, indices, keys))):
                self(indices, grads, weights)  # dictionary views, converted to lists
                return
        groups = self.parameters.groups
        if groups is not None and groups.freezes:
            taken = groups.select(indices)
            if taken is not None:
                self.records.freeze([index for index in indices if groups.is_frozen(index)])
                if indices := taken(indices):
                    self(indices, taken(grads), taken(weights))
                else:
                    self._info = UNCHANGED
                return
        call = Given(indices, grads, weights, single)
        arrays = (*grads, *weights)
        if {*map(type, arrays)} <= OURS and "c" not in map(KIND, arrays):
            self._update(call)
        else:
            self._update_views(call)

    def _enter(self, index: Any, grad: Any, weight: Any) -> bool:
        """Update parameters that have records, with what Python has to do before.

        If the result is False, nothing has changed, and the call must be checked.
        """
        optimizer, records = self.optimizer, self.records
        with optimizer.updating:
            if records.version != optimizer.version:
                records.refresh(self)
            if not records.quick:
                return False
            if records.mode.live and not records.ask(index):
                return False
            if records.version != optimizer.version:
                return False  # the multipliers of the user's objects have changed attributes
            if not records.mode.measures:
                status: int = records.enter(records.context, index, grad, weight)
                if status != OK:
                    status = records.resolve(self, status, index, grad, weight)
                if status >= 0 and self._info is not records.stepped:
                    self._info = records.stepped
                return status >= 0
            with uninterrupted:
                if self._windows is not None:
                    return self._enter_window(self._windows, index, grad, weight)
                info = records.enter_measured(self, (index, grad, weight))
                if info is not None:
                    self._report(info)
                return info is not None

    def _enter_window(self, windows: Windows, index: Any, grad: Any, weight: Any) -> bool:
        """Add gradients to their sums; when these are complete, update."""
        records, listed = self.records, type(index) in (list, tuple)
        indices = index if listed else [index]
        if not indices or not {*map(type, indices)} <= {int, str}:
            return False
        if records.freezes and None in map(records.record_of, indices):
            return False  # sums are those of parameters that are not frozen
        phase, sums = windows.phase(indices), [windows.sums.get(i) for i in indices]
        summed = sums if listed else sums[0]
        adder, last = windows.adders[phase > 0], phase + 1 == windows.every
        status = records.admits(index, grad, weight) if phase >= 0 else UNKNOWN
        complete = index, summed, weight
        if status >= 0 and last:
            status = records.admits(*complete)
        if status < 0 or records.words[REPEATS]:
            return False
        finish = partial(windows.finish, indices, windows.after(indices))
        steady = not last or not records.mode.asks
        before = {} if steady else windows.before(indices)
        share, info = 1 / windows.every, UNCHANGED
        words, added = records.words, adder.records.words
        words[DONE] = added[DONE] = 0
        try:
            if not adder.call_again(index, grad, summed):
                return False
            if last:
                outcome = records.enter_measured(self, complete, share)
                if outcome is None:
                    windows.put_back(before)
                    return False
                info = outcome
            finish()
        except BaseException:
            done = bool(words[DONE] or (added[DONE] and not last))
            if steady and added[DONE] and not done:  # complete the call, which may be skipped
                done = records.enter_measured(self, complete, share) is not None
            if done:
                finish()
            else:
                windows.put_back(before)
            raise
        if last:
            self._report(info)
        else:
            self._info = info
            if status == MOVED:
                records.note(index, weight)
        return True

    def step(
        self,
        grads: Any,
        weights: Any,
        missing: Literal["raise", "skip"] = "raise",
        extra: Any = None,
    ) -> None:
        """Update weights in nested dictionaries, lists, tuples and dataclasses in place.

        The index of a weight is its path: the keys, positions and attributes that lead to it,
        joined by dots, such as ``"hidden.weight"`` or ``"layers.0"``; the index of an array without
        a container is ``""``. Otherwise this equals a call with lists of indices, gradients and
        weights, with the same errors.

        Parameters
        ----------
        grads : dict, list, tuple, named tuple, dataclass instance or array
            Gradients, nested like the weights; container types and the order of keys may differ.
            None inside of a container skips a weight, or all weights of an inner container. A pair
            ``(values, indices)`` at the path of a weight is a row-sparse gradient.
        weights : dict, list, tuple, named tuple, dataclass instance or array
            Weights, nested to any depth. The arrays are updated in place; the containers are not
            changed. Leaves that are arrays in neither structure, such as the name of an
            activation, are left alone, with or without a counterpart in `grads`.
        missing : str
            ``"skip"`` treats gradients that are missing in a container like None. Default
            ``"raise"``.
        extra : dict, list, tuple, named tuple, dataclass instance or array, optional
            Arrays for rules that take a second one in each call, nested like the weights; what is
            missing is None. See :meth:`__call__`.

        Raises
        ------
        ValueError
            A gradient is missing or has no weight, two weights have the same path, or `missing`
            has another value. Nothing changes.
        TypeError
            The gradients are None, the containers do not match, or a weight is a number or an
            object that has arrays as attributes. Nothing changes.

        Warns
        -----
        UserWarning
            Once, if the arguments seem to be swapped: the first gradient is a weight that was
            updated before, or has been the same unchanged array for three steps, each with another
            weight. Once, if several arrays are the first weight in turns, and so share a state.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1))
        >>> weights = {"layers": [np.ones(2), np.ones(1)], "scale": np.ones(1)}
        >>> grads = {"layers": [np.ones(2), np.ones(1)], "scale": None}
        >>> updater.step(grads, weights)
        >>> weights
        {'layers': [array([0.9, 0.9]), array([0.9])], 'scale': array([1.])}
        >>> list(updater.states)
        ['layers.0', 'layers.1']
        """
        paths, flat, arrays = self._leaves(grads, weights, missing)
        if paths:
            grad, structures = flat[0], self.structures
            of = self.parameters.rows.get(paths[0])
            before = None if of is None else of.weight
            if before is not None and (before is not arrays[0] or before is grad):
                repeated = structures.first_gradient == id(grad)
                structures.check_weight(paths[0], grad, arrays[0], before, repeated)
            structures.first_gradient = id(grad)
        if extra is None:
            self(paths, flat, arrays)
        else:
            self(paths, flat, arrays, extras_at(paths, self._leaves(extra, weights, "skip")))

    def updated(self, grads: Any, weights: T, missing: Literal["raise", "skip"] = "raise") -> T:
        """Return updated copies of nested weights; the arguments do not change.

        The state and the update counts are those of the updater, as in :meth:`step`, which has the
        same results. :func:`fastopt.functional` returns the state too.

        Parameters
        ----------
        grads, weights, missing
            See :meth:`step`, also for errors.

        Returns
        -------
        dict, list, tuple, named tuple, dataclass instance or array
            The weights, in new containers of the same types. All arrays are copies, as are those
            without a gradient; subclasses of numpy.ndarray are kept, with what they have beside
            their numbers, and arrays of other libraries on the host become NumPy arrays. A weight
            may be a float or a NumPy scalar, and is one again in the result.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1))
        >>> old = {"weight": np.ones(2), "bias": np.ones(1)}
        >>> new = updater.updated({"weight": np.ones(2), "bias": np.ones(1)}, old)
        >>> old["weight"], new["weight"]
        (array([1., 1.]), array([0.9, 0.9]))
        """
        new = copies(weights)
        self(*self._leaves(grads, new, missing))
        result: T = as_given(new, weights)
        return result

    def _leaves(
        self, grads: Any, weights: Any, missing: str
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """Return paths, gradients and weights of the leaves of a step."""
        flatten, groups = self.structures.flatten, self.parameters.groups
        freezes = groups is not None and groups.freezes
        spares = (groups.is_frozen,) if freezes else ()
        paths, flat, arrays, left = flatten(grads, weights, missing, *spares)
        if left and groups is not None:
            groups.note(left)
        return paths, flat, arrays

    def refresh_graphs(self) -> None:
        """Let CUDA graphs with calls of this updater use the present hyper-parameters.

        A graph repeats its calls with the hyper-parameters of the capture, or of the last call of
        this method. It evaluates a schedule at the update that follows, for which it waits for the
        device. See :doc:`CUDA </cuda>`.

        Examples
        --------
        >>> import fastopt
        >>> updater = fastopt.Updater("adam")
        >>> updater.optimizer.learning_rate = 0.01
        >>> updater.refresh_graphs()  # before the next replay
        """
        with self.lock:
            if self.records.devices is not None:
                self.records.devices.refresh_graphs(self)

    def _settle(self) -> None:
        """Wait for the outcomes of steps that a device has counted."""
        settle(self.optimizer)

    def set_master(self, index: Any, array: Array) -> None:
        """Set the values of the float32 master of a half-precision weight.

        Otherwise a master is initialized from the rounded values of the weight.

        Parameters
        ----------
        index : int, str or bytes
            The parameter; its optimizer must have ``multi_precision=True``.
        array : numpy.ndarray
            The exact float32 values, in the weight's shape; they are copied.

        Raises
        ------
        TypeError, ValueError
            The optimizer keeps no masters, or the array does not match. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(lr=1.0, multi_precision=True))
        >>> exact = np.full(2, 0.1, np.float32)
        >>> updater.set_master("w", exact)
        >>> weight = exact.astype(np.float16)
        >>> updater.step({"w": np.zeros(2, np.float16)}, {"w": weight})
        >>> updater.states["w"][1]
        array([0.1, 0.1], dtype=float32)
        """
        index = check_index(index)
        set_master(self.parameters.optimizer_of(index), index, array, self.states.get(index))
        if index not in self.states:
            vars(self.optimizer)["unchecked"] = True
            self.forget()

    def state_as(self, index: Any, dtype: Any = np.float32) -> Any:
        """Return a copy of the state of a parameter in another precision.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        dtype : dtype_like
            Floating-point type of the copies. Default float32.

        Returns
        -------
        None, numpy.ndarray, tuple or list
            The state, nested like in `states`, with one array of the weight's shape for each slot,
            including 8-bit slots. A master keeps its dtype.

        Raises
        ------
        KeyError
            The parameter has no state yet.
        TypeError
            `dtype` is not a floating-point type, the state is on a device, or the optimizer
            overrides ``update()``.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.Adam(state_dtype="int8", state_min_size=1))
        >>> grad, weight = np.array([1.0, -0.5], np.float32), np.zeros(2, np.float32)
        >>> updater.step({"w": grad}, {"w": weight})
        >>> codes, scales = updater.states["w"][0]
        >>> codes
        array([ 127, -127], dtype=int8)
        >>> updater.state_as("w")[0].round(4)
        array([ 0.1 , -0.05], dtype=float32)
        """
        index, dtype = check_index(index), np.dtype(dtype)
        if not (np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"):
            raise TypeError(f"dtype must be a floating-point type, got {dtype}")
        with self.lock:
            optimizer, state = self.parameters.optimizer_of(index), self.states[index]
            return mapped_slots(optimizer, index, state, lambda k, slots: slots[k].astype(dtype))

    def set_state_dtype(self, state_dtype: Literal["bfloat16", "int8"] | None) -> None:
        """Change the precision of the states; existing states are converted.

        Parameters
        ----------
        state_dtype : str or None
            See :class:`~fastopt.optimizer.Optimizer`. It is set on the optimizer, and applies to
            all groups that do not override it.

        Raises
        ------
        ValueError, TypeError
            `state_dtype` is unknown, the rule has no slot that can be stored in 8 bits, a state is
            on a device, or the optimizer overrides ``update()``. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(momentum=0.9))
        >>> weight = np.ones((64, 64), np.float32)
        >>> updater.step({"w": weight.copy()}, {"w": weight})
        >>> updater.set_state_dtype("int8")
        >>> [(array.dtype.name, array.shape) for array in updater.states["w"]]
        [('int8', (64, 64)), ('float32', (64, 1))]
        """
        with self.lock, uninterrupted:
            optimizer = self.optimizer
            before = optimizer.state_dtype
            optimizer.state_dtype = state_dtype
            try:
                optimizer.check_together()
                of = self.parameters
                if of.groups is not None:
                    of.groups.generation()
                states = {
                    i: in_dtype_of(of.optimizer_of(i), i, state, of.weight_of(i))
                    for i, state in self.states.items()
                }
            except BaseException:
                optimizer.state_dtype = before
                raise
            dict.update(self.states, states)
            self._forget_records()

    def reset(self) -> None:
        """Start again, as with a new updater: states are zero and no update is counted.

        What the updater knows of the form of its parameters stays, so that the next call costs no
        more than any other; use it for the episodes of meta-learning or the trials of a search,
        with the same or other weights of these shapes. Arrays of :attr:`states` are set to zero in
        place. Where states do not start at zero (masters of half-precision weights, averages,
        :meth:`~fastopt.optimizer.Optimizer.create_state` of the user), the next update of an index
        creates its state again from the weight. Schedules start at the first update, but
        :class:`~fastopt.lr_scheduler.PlateauScheduler` keeps its reductions. Incomplete
        sums of `accumulate` and pending deferred decay are dropped: call :meth:`flush` before if
        the weights are still needed. Settings, hyper-parameters, the weights, their half-precision
        copies and the loss scaler do not change.

        Raises
        ------
        RuntimeError
            The call comes from inside an update, for example from a signal handler; or the weights
            hold their averages.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.Adam(lr=0.1))
        >>> for episode in range(2):
        ...     updater.reset()
        ...     weight = np.zeros(2)
        ...     for _ in range(3):
        ...         updater.step(np.array([1.0, -2.0]), weight)
        ...     print(weight.round(6), updater.optimizer.num_update)
        [-0.3  0.3] 3
        [-0.3  0.3] 3
        """
        with between_updates(self.lock, "reset()"), uninterrupted:
            self._reset()

    def _reset(self) -> None:
        """See :meth:`reset`."""
        records = self.records
        self.structures.restart()
        if self._averages is not None:
            self._averages.check_free()
            self._averages.arrays.clear()
        known = {*self.states, *records.known(), *self.optimizer._index_update_count}
        known.update(self._windows.calls if self._windows else ())
        known.update(*(of.masters_given for of in self.parameters.optimizers()))
        for index, state in list(self.states.items()):
            if self._restarts_at_zero(index):
                for array in leaves(state):
                    array.fill(0)
            else:
                dict.pop(self.states, index)
                dict.pop(self.states_synced, index, None)
                records.drop(index)
        if self._windows is not None:
            self._windows.clear()
        for optimizer in self.parameters.optimizers():
            optimizer.restart(known)
        self._info = UNCHANGED

    def _restarts_at_zero(self, index: Index) -> bool:
        """Whether a new state of a parameter consists of zeros in the memory of the present one."""
        record = self.records.record_of(index)
        optimizer = self.parameters.optimizer_of(index)
        if record is None or self._averages is not None or not optimizer.starts_at_zero:
            return False
        if isinstance(record, DeviceRecord):
            return False
        is_half = record.words[w.WEIGHT_CODE] in (w.FLOAT16, w.BFLOAT16)
        return not (optimizer.multi_precision and is_half) and index not in optimizer.row_decay

    def resize(self, index: Any, weight: Array, rows: Any) -> None:
        """Go on with a weight of which rows were added or removed, or have another order.

        State, average and deferred decay of a row that stays go with it; those of a new row begin
        as with a new parameter. Update counts do not change. A parameter without state stays one.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        weight : numpy.ndarray or CUDA array
            The new weight, whose rows are slices along the first axis.
        rows : sequence of int
            For each row of `weight`, the row of the old one that it was, or -1 for a new row.

        Raises
        ------
        TypeError, ValueError
            The arguments do not match each other or the state; the state is not one by rows, since
            the optimizer overrides ``update()``; other parameters have states, and this one has
            none; gradients wait for their update (call :meth:`finish` before); or :meth:`set_copy`
            has set a copy of another shape. Nothing changes.
        RuntimeError
            The call comes from inside an update, for example from a signal handler; or the weights
            hold their averages.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(learning_rate=0.5, momentum=0.9))
        >>> weight = np.zeros((3, 1))
        >>> updater("emb", np.array([[1.0], [2.0], [3.0]]), weight)
        >>> weight = np.vstack([weight[1:], np.zeros((1, 1))])  # without the first row, with a new
        >>> updater.resize("emb", weight, [1, 2, -1])
        >>> updater.states["emb"]
        array([[-1. ],
               [-1.5],
               [ 0. ]])
        """
        with between_updates(self.lock, "resize()"), uninterrupted:
            param = self.parameters.of(check_index(index))
            index, averages = param.index, self._averages
            view = self._viewed(index, weight)
            last = self.parameters.weight_of(index)
            if last is not None and header(last).dtype != (dtype := header(view).dtype):
                raise TypeError(
                    f"{param.context}: weight must have dtype {header(last).dtype}, like the one "
                    f"before, got {dtype}"
                )
            taken = checked_rows(param.context, rows, header(view))
            if averages is not None:
                averages.check_free()
            if not param.optimizer.native:
                kind = type(param.optimizer).__name__
                raise TypeError(f"{param.context}: the state of {kind} is not one by rows")
            if self._windows is not None and index in self._windows.calls:
                raise ValueError(f"{param.context}: gradients wait for their update: call finish()")
            if param.copy is not None and np.shape(header(param.copy)) != header(view).shape:
                raise ValueError(
                    f"{param.context}: its copy has another shape than the weight: call "
                    "set_copy(index, None) before, and set_copy with another one after"
                )
            known, tables, decay = index in self.states, [], param.optimizer.row_decay
            if not known and self.states:
                raise ValueError(
                    f"{param.context} has no state to resize; indices that have one are "
                    f"{brief(list(self.states))}"
                )
            if known:
                fresh = param.optimizer.create_state_multi_precision(index, view)
                state = resized(param, self.states[index], placed(fresh, header(view)), taken)
                tables += [(self.states, state), (self.states_synced, True)]
            if known and averages is not None and index in averages.arrays:
                exact = exact_copy((header(view),))
                mean = resized(param, averages.arrays[index], exact, taken)
                tables.append((averages.arrays, mean))
            if known and index in decay:
                old, total = decay[index]
                lacking = placed(np.full(len(taken), total), header(view))
                tables.append((decay, (resized(param, old, lacking, taken), total)))
            for table, value in tables:
                dict.__setitem__(table, index, value)
            param.weight = view
            self._forget_records(index)

    def set_copy(self, index: Any, array: Array | None) -> None:
        """Set a half-precision copy of a float32 weight, which every update writes too.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        array : numpy.ndarray or None
            The copy, float16 or bfloat16, in the weight's shape. From now on every update writes
            the weight's values to it, rounded to nearest. None removes the copy.

        Raises
        ------
        TypeError, ValueError
            `array` has the wrong type or is read-only; or, at the next update, it does not have
            the weight's shape or shares its memory.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1))
        >>> weight = np.ones(2, np.float32)
        >>> copy = weight.astype(np.float16)
        >>> updater.set_copy("w", copy)
        >>> updater.step({"w": np.ones(2, np.float32)}, {"w": weight})
        >>> copy
        array([0.9, 0.9], dtype=float16)
        """
        key = check_index(index)
        with self.lock:
            if array is not None:
                of = header(array)
                check_like(label(key, self.optimizer.idx2name), "copy", of, HALVES, np.shape(of))
            self.parameters.of(key).copy = array
            vars(self.optimizer)["unchecked"] = True
            self.forget()

    def finish(self, index: Any = None, weight: Any = None) -> None:
        """Update with the gradients that `accumulate` has added so far, such as those of an epoch.

        The parameters whose windows are incomplete are updated in one call, each with the mean of
        its gradients since its last update, in the order of the arguments, else of their first
        gradients, and their next windows start. Schedules, clips, the
        loss scale, averages and :attr:`info` are those of a call with a list of these parameters.
        If no gradients wait, nothing happens, and ``info.stepped`` is False.

        Parameters
        ----------
        index : int, str or bytes, or a list of them, optional
            The parameters; those without waiting gradients are left out. Default: all.
        weight : array, list of arrays, or nested weights, optional
            Their weights, for example after a load; without an index all weights, nested as in
            :meth:`step`. Default: those of the last calls.

        Raises
        ------
        ValueError
            No weight is given, and no call has had one, or the index is of no parameter. Nothing
            changes.
        TypeError, ValueError
            The arguments do not match, or as in a call. Nothing changes.
        RuntimeError
            The call comes from inside an update, for example from a signal handler; or the weights
            hold their averages.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> updater = fastopt.Updater(fastopt.SGD(lr=1.0), accumulate=4)
        >>> weight = np.zeros(1)
        >>> for gradient in range(6):
        ...     updater.step({"w": np.full(1, float(gradient))}, {"w": weight})
        >>> weight, updater.optimizer.num_update
        (array([-1.5]), 1)
        >>> updater.finish()  # with the mean of 4 and 5
        >>> weight, updater.optimizer.num_update
        (array([-6.]), 2)
        """
        with between_updates(self.lock, "finish()"), reject_reentrant(self.optimizer.updating):
            optimizer = self.optimizer
            if self._averages is not None:
                self._averages.check_free()
            windows, names = self._windows, optimizer.idx2name
            waiting = incomplete(optimizer, self._is_frozen, windows, index, weight).items()
            owners = {
                i: self._given(i, of, "finish") for i, of in waiting if not self._is_frozen(i)
            }
            if windows is None or not owners:
                vars(self)["_info"] = UNCHANGED
                return
            indices, calls = list(owners), [windows.calls[i] for i in owners]
            views = [self._viewed(i, array) for i, array in owners.items()]
            of = [label(i, names) for i in indices]
            sums = list(map(windows.total, of, indices, views))
            entries = zip(self._checked_entries(indices, sums, views), calls, strict=True)
            means = [  # all gradients have one factor
                times(total, calls[0] / count) for (*_, total), count in entries
            ]
            finish = partial(windows.finish, indices, windows.without(owners))
            with uninterrupted:
                self._apply(Given(indices, means, views, share=1 / calls[0]), finish)
            mark_written(list(owners.values()))

    def flush(self, index: Any = None, weight: Any = None) -> None:
        """Apply the deferred weight decay to all rows of a parameter, or of all parameters.

        With ``sparse_decay="catch_up"``, call it before using the whole weight: rows that recent
        gradients have not indexed still lack the decay of the steps since their last update.

        Parameters
        ----------
        index : int, str or bytes, or a list of them, optional
            The parameters. Default: all whose decay is deferred.
        weight : array, list of arrays, or nested weights, optional
            Their weights, as in :meth:`finish`. Default: those of the last calls.

        Raises
        ------
        ValueError
            No weight is given and no weight has been updated under an index, or it is unknown.
        TypeError
            The arguments do not match.
        RuntimeError
            The call comes from inside an update, for example from a signal handler; or the weights
            hold their averages.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> adamw = fastopt.AdamW(lr=0.1, wd=0.5, sparse_decay="catch_up")
        >>> updater, weight = fastopt.Updater(adamw), np.ones((2, 1))
        >>> updater.step({"w": (np.ones((1, 1)), np.array([0]))}, {"w": weight})
        >>> updater.flush()
        >>> weight.round(3)
        array([[0.884],
               [0.984]])
        """
        with between_updates(self.lock, "flush()"):
            params = map(self.parameters.of, self.states)
            deferred = [of.index for of in params if of.index in of.optimizer.row_decay]
            weights = selected("flush", index, weight, deferred)
            lasts = {i: self._given(i, array, "flush") for i, array in weights.items()}
            waiting = self._windows.calls if self._windows is not None else {}
            names, counts = self.optimizer.idx2name, self.optimizer._index_update_count
            for i in lasts:
                if not self._is_frozen(i):
                    check_known(i, ChainMap[Any, Any](self.states, names, counts, waiting))
            for i, last in lasts.items():
                self._flush(i, last)

    def _flush(self, index: Index, weight: Any) -> None:
        """See :meth:`flush`; the caller may hold the lock."""
        with self.lock:
            if self._averages is not None:
                self._averages.check_free()
            last = self._viewed(index, weight)
            state = self._state(index, last) if index in self.states else None
            if flush(self, index, last, state):
                self.records.note(index, last)
            if index in self.states:
                self._keep([(index, last, None, state)])

    # Files

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states of all indices as safetensors bytes.

        Parameters
        ----------
        dump_optimizer : bool
            Include the optimizer: hyper-parameters, update counts, schedule, everything except
            ``param_dict``. Without it, update counts are not saved: an updater that loads the
            states keeps its own. Default False.

        Returns
        -------
        bytes
            Argument for :meth:`set_states`.

        Raises
        ------
        TypeError
            A state or an attribute of the optimizer contains something other than None, numbers,
            strings, arrays, tuples, lists and dicts; or `dump_optimizer` is not a bool.
        RuntimeError
            See :meth:`save`.
        """
        dump_optimizer = flag("dump_optimizer", dump_optimizer)
        with between_updates(self.lock, "get_states()"):
            return dumps(describe_states(self, dump_optimizer))

    def set_states(self, states: bytes) -> None:
        """Replace the states by those from :meth:`get_states`, and restore the optimizer if saved.

        An optimizer of the same class is restored in place, another one is replaced; either has no
        ``param_dict`` then. A schedule of the same class stays the same object, as in
        :meth:`load`.

        Parameters
        ----------
        states : bytes
            Result of :meth:`get_states`.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            The bytes are damaged, cannot be read, or do not match the optimizer. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> old, new = (fastopt.Updater(fastopt.Adam()) for _ in range(2))
        >>> weight = np.ones(2)
        >>> old.step({"w": np.ones(2)}, {"w": weight})
        >>> new.set_states(old.get_states())
        >>> new.states["w"]
        (array([0.1, 0.1]), array([0.001, 0.001]))
        """
        restore_states(self, loads(states, self.optimizer))

    def save(self, path: PathLike) -> None:
        """Write a checkpoint from which a later run can continue; see :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file. An existing file is replaced atomically.

        Raises
        ------
        TypeError
            A state or an attribute of the optimizer contains something other than None, numbers,
            strings, arrays, tuples, lists and dicts.
        fastopt.checkpoint.CheckpointError
            The metadata is larger than :meth:`load` accepts.
        OSError
            The file cannot be written. An existing file is unchanged.
        RuntimeError
            The call comes from inside an update, for example from a signal handler.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> import fastopt
        >>> old, new = (fastopt.Updater(fastopt.Adam(wd=wd)) for wd in (0.1, 0.0))
        >>> old.step(np.ones(2), np.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old.save(f"{folder}/adam.safetensors")
        ...     new.load(f"{folder}/adam.safetensors")
        Skipped(nothing)
        >>> new.optimizer.wd, new.optimizer.num_update
        (0.1, 1)
        """
        with between_updates(self.lock, "save()"):
            write_atomically(path, chunks(describe(self)))

    def load(self, path: PathLike, strict: bool = True) -> Skipped:
        """Load a checkpoint of :meth:`save`: states, hyper-parameters, update counts, loss scale.

        The optimizer stays the same object and keeps its ``param_dict``. A schedule of the same
        class, of the optimizer or a group, stays the same object too. Parameters are matched by
        name where names are known, otherwise by index.

        Parameters
        ----------
        path : str or os.PathLike
            File written by :meth:`save` of an updater whose optimizer has the same class, or of a
            :class:`fastopt.distributed.ShardedUpdater`, whose shards are merged.
        strict : bool
            Raise an error if the file lacks parameters of this updater, or if names are known and
            it has additional ones. Otherwise missing parameters start from scratch, and additional
            ones are ignored. Without names, additional ones wait for their first call. Default
            True.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the file, and of the ``extra`` ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            The file is damaged, does not match, or cannot be read. Nothing changes.
        """
        with read_from(path):
            return restore(self, read_whole(self.optimizer, path), strict)

    def states_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint as a dict, with copies of the arrays.

        Raises
        ------
        TypeError, RuntimeError
            See :meth:`save`.
        """
        with between_updates(self.lock, "states_dict()"):
            states: dict[str, Any] = copied(describe(self))
            return states

    def load_states_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Restore the result of :meth:`states_dict`.

        Parameters
        ----------
        states : dict
            Result of :meth:`states_dict`.
        strict : bool
            See :meth:`load`, also for the result and errors.
        """
        return restore(self, states, strict, copies=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint; alias of :meth:`states_dict` with torch's name."""
        return self.states_dict()

    def load_state_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Restore the result of :meth:`state_dict`; alias of :meth:`load_states_dict`.

        Parameters
        ----------
        states, strict
            See :meth:`load_states_dict`, also for the result and errors.
        """
        return self.load_states_dict(states, strict)

    def load_mxnet(
        self, path: PathLike | bytes, strict: bool = True, max_bytes: int | None = None
    ) -> Skipped:
        """Load states that MXNet's ``get_states`` wrote.

        If the file contains the optimizer, those of its attributes that this optimizer also has are
        loaded, except the schedule. Otherwise hyper-parameters and update counts are unchanged.

        Parameters
        ----------
        path : str, os.PathLike or bytes
            The file or its contents.
        strict : bool
            See :meth:`load`, also for the result and errors.
        max_bytes : int, optional
            See :func:`~fastopt.checkpoint.load_mxnet_states`.
        """
        return restore(self, described_by_mxnet(self, path, max_bytes), strict)

    # Averages of the weights

    @property
    def averages(self) -> dict[Index, Any]:
        """Average of each index: a float32 array, or float64 for float64 weights.

        Empty without `average`. The arrays are not copies: updates write to them, and a program
        may; they cannot be replaced. The average of an index begins with its first update; until
        then it is the weight itself, and a KeyError says so.
        """
        return _AveragesByIndex({} if self._averages is None else self._averages.arrays)

    def averaged(self, weights: Any = None) -> AbstractContextManager[None]:
        """Context manager that replaces the values of the weights by their averages.

        On exit, including by an exception, the previous values are restored; changes made inside
        the context are lost. Half-precision copies (:meth:`set_copy`) are swapped too. The context
        needs memory for a copy of the weights. Updates, :meth:`flush`, loads and a nested
        ``averaged()`` raise inside it. Weights of frozen groups keep their values.

        Without `average`, the averages are those in the optimizer's own state, which ASGD and the
        Schedule-Free optimizers have. In that case :meth:`save` raises inside the context.

        With `average`, :meth:`save` inside the context writes both the averages and the replaced
        values of the weights. After loading such a file call :meth:`restore_weights`, no matter
        when the weights themselves were saved.

        Parameters
        ----------
        weights : nested arrays, or mapping of index to array, optional
            Weights that this updater has not updated yet, for example after a load. Default: the
            last updated weight of each index with an average.

        Raises
        ------
        RuntimeError
            Neither the updater nor the optimizer has averages, or the weights already hold them;
            or the call comes from inside an update, for example from a signal handler.
        ValueError
            An index with an average has no known weight, none of `weights` has an average, or a
            weight and its average differ in shape.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> sgd = fastopt.SGD(lr=1.0)
        >>> updater = fastopt.Updater(sgd, average=fastopt.EMA(decay=0.5))
        >>> weight = np.zeros(1)
        >>> updater.step(np.array([-1.0]), weight)
        >>> with updater.averaged():
        ...     print(weight)
        [0.5]
        >>> weight
        array([1.])
        """
        return averaged.context(self, weights)

    def restore_weights(self, weights: Any) -> None:
        """Restore the weights after loading a state that was saved inside :meth:`averaged`.

        Parameters
        ----------
        weights : nested arrays, or mapping of index to array
            The weights, which are overwritten with their values before the averages were swapped
            in. Weights that had no average then are not changed.

        Raises
        ------
        RuntimeError
            No state that was saved inside :meth:`averaged` has been loaded.
        ValueError
            A weight is missing or does not match. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> def make():
        ...     sgd = fastopt.SGD(lr=1.0)
        ...     return fastopt.Updater(sgd, average=fastopt.EMA(decay=0.5))
        >>> old, new, weight = make(), make(), np.zeros(1)
        >>> old.step({"w": np.array([-1.0])}, {"w": weight})
        >>> with old.averaged():
        ...     _ = new.load_states_dict(old.states_dict())
        ...     copy = weight.copy()
        >>> new.restore_weights({"w": copy})
        >>> copy
        array([1.])
        """
        averaged.restore(self, weights)

    # Updates whose arguments Python has checked: first calls, and slow ones

    def forget(self) -> None:
        """Drop all records, between the calls of other threads."""
        with self.lock:
            self.records.forget()

    # Checks

    def _update_views(self, call: Given) -> None:
        """Update arrays of other libraries, and complex ones, through views of real numbers."""
        indices, grads, weights, single, *_ = call
        gradients, views = list(grads), list(weights)
        for k, index in enumerate(indices):
            gradients[k], views[k] = self._views(index, grads[k], weights[k])
        if all(map(is_, views, weights)) and all(map(is_, gradients, grads)):
            for k, index in enumerate(indices):
                gradients[k], views[k] = self._real_views(index, grads[k], weights[k])
            if all(map(is_, views, weights)) and all(map(is_, gradients, grads)):
                self._update(call)
                return
        if single:
            self(indices[0], gradients[0], views[0])
        else:
            self(indices, gradients, views)
        mark_written(weights)

    def _views(self, index: Index, grad: Any, weight: Any) -> tuple[Any, Any]:
        """Return a gradient and its weight, or NumPy views of those of other libraries."""
        try:
            return as_gradient(grad), as_weight(weight)
        except (TypeError, ValueError) as error:
            context = label(index, self.optimizer.idx2name)
            raise type(error)(f"{context}: {error}") from error

    def _real_views(self, index: Index, grad: Any, weight: Any) -> tuple[Any, Any]:
        """Return a gradient and its weight, or the real views of complex ones."""
        clips, names = self.settings.clip_adaptive is not None, self.optimizer.idx2name
        of = self.parameters.optimizer_of(index)
        refused = type(of).__name__ if of.by_row else ""
        return real_views(label(index, names), refused, grad, weight, clips)

    def _update(self, call: Given) -> None:
        """Check the arrays and update, unless the loss scaler or norm clip skips the step."""
        indices, grads, weights, single, *_ = call
        with self.lock, reject_reentrant(self.optimizer.updating):
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
            self.records.admit(optimizer)
            slow = self._slow or SlowCallCounter()
            why = slow.reason(self, call, unchecked)
            with uninterrupted:
                if self._windows is None:
                    self._apply(call)
                else:
                    entries = self._checked_entries(indices, grads, weights)
                    self._add(self._windows, entries, single)
            if why is not None:
                slow.add(self, *why)
                vars(self)["_slow"] = slow

    def _check_names(self, indices: Sequence[Index]) -> None:
        """Warn of multipliers, masters, copies and patterns of groups that no parameter has."""
        optimizer, of = self.optimizer, self.parameters
        if not optimizer.unchecked or not indices:
            return
        waiting = self._windows.calls if self._windows else ()
        masters = {row.index for row in of.rows.values() if row.copy is not None}
        masters.update(*(opt.masters_given for opt in of.optimizers()))
        optimizer.check_multipliers(indices, waiting, grouped=bool(masters or of.groups))
        if optimizer.unchecked:
            return
        if of.groups is not None:
            of.groups.warn_of_unused([*indices, *waiting])
        lost = masters - {*indices, *waiting, *optimizer._index_update_count}
        if names := ", ".join(sorted(repr(i) for i in lost if not self._is_frozen(i))):
            warn_user(f"the master or copy of {names} has no effect: no weight has this index")

    def _checked(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Call]:
        """Check all arrays, then return the calls with states, created for new indices."""
        return self._with_states(self._checked_entries(indices, grads, weights))

    def _checked_entries(
        self, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> list[Entry]:
        """Check that weights and gradients match; return indices, weights and gradients."""
        checked = []
        for index, grad, weight in zip(indices, grads, weights, strict=True):
            param = self.parameters.of(index)
            grad = check(param.context, weight, grad, param.copy)
            if isinstance(grad, RowSparse) and not param.optimizer.native:
                grad = self.parameters.optimizer_of(index).dense_gradient(index, weight, grad)
            checked.append((index, weight, grad))
        return checked

    # States

    def _with_states(self, checked: Sequence[Entry]) -> list[Call]:
        """Return the calls with states, which are created for new indices."""
        states: dict[Index, Any] = {}
        zeros = all(optimizer.starts_at_zero for optimizer in self.parameters.optimizers())
        with allocated_together() if zeros else nullcontext():
            for index, weight, grad in checked:
                if index not in states:
                    states[index] = self._state(index, weight, isinstance(grad, RowSparse))
        return [(index, weight, grad, states[index]) for index, weight, grad in checked]

    def _state(self, index: Index, weight: Array, sparse: bool = False) -> Any:
        """Return the state of `index` on its weight's device, creating it for a new index."""
        if index not in self.states:
            optimizer = self.parameters.optimizer_of(index)
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
            (table, {index: table[index] for index, *_ in calls if index in table})
            for table in (self.states, self.states_synced, self.optimizer.masters_given)
        ]

        def undo() -> None:
            for table, before in known:
                for index, *_ in calls:
                    dict.pop(table, index, None)
                dict.update(table, before)

        try:
            self._keep(calls)
        except BaseException:
            undo()
            raise
        return undo

    def _is_frozen(self, index: Index) -> bool:
        """Whether the group of an index is frozen."""
        return self.parameters.groups is not None and self.parameters.groups.is_frozen(index)

    # Updates

    def _update_in_python(self, calls: Sequence[Call]) -> None:
        """Update with optimizers of which some override ``update()``, in the order of the list."""
        calls = self.backend.owned(self.optimizer, calls)
        optimizers = {call[0]: self.parameters.optimizer_of(call[0]) for call in calls}
        for optimizer in dict.fromkeys(optimizers.values()) if len(calls) > 1 else ():
            optimizer.check_calls([call for call in calls if optimizers[call[0]] is optimizer])
        copies = {index: self.parameters.copy_of(index) for index in optimizers}
        by = lambda call: (optimizers[call[0]], copies[call[0]] is not None)  # noqa: E731
        for (optimizer, _), run in groupby(calls, by):
            entries = list(run)
            if optimizer.native and copies[entries[0][0]] is None:
                optimizer.update_all(entries)
                self._keep(entries)
                continue
            for call in entries:
                index, weight, grad, state = call
                if type(optimizer).update_multi_precision is not Optimizer.update_multi_precision:
                    optimizer.update_multi_precision(index, weight, grad, state)
                else:
                    optimizer.update_in_python(index, weight, grad, state, copies[index])
                self._keep([call])  # in case the user's code raises at the next parameter
        self.records.note([call[0] for call in calls], [call[1] for call in calls])

    def _add(self, windows: Windows, entries: Sequence[Entry], single: bool) -> None:
        """Accumulate gradients, and update the parameters whose sums are complete."""
        optimizer, indices = self.optimizer, [index for index, *_ in entries]
        if (twice := repeated(indices)) is not None:
            context = label(twice, optimizer.idx2name)
            raise ValueError(f"{context}: accumulate={windows.every} takes an index once per call")
        last = [entry for entry in entries if windows.is_last(entry[0])]
        waits = [entry for entry in entries if not windows.is_last(entry[0])]
        before, after = windows.before(indices), windows.after(indices)
        finish = partial(windows.finish, indices, after)
        try:
            windows.add(entries, optimizer.idx2name, single)
            if last:
                complete, weights = [i for i, *_ in last], [weight for _, weight, _ in last]
                sums = [windows.sums[i] for i in complete]
                self._apply(Given(complete, sums, weights, single, 1 / windows.every), finish)
            finish()
        except BaseException:
            if windows.calls is not after:
                windows.put_back(before)
            raise
        if not last:
            self._info = UNCHANGED
        self.records.note([i for i, *_ in waits], [weight for _, weight, _ in waits])

    def _given(self, index: Index, weight: Any, call: str) -> Any:
        """Return the weight that was given to a method, or else that of the last call."""
        owner = owner_of(self.parameters.weight_of(index)) if weight is None else weight
        if owner is None:
            raise ValueError(
                f"{label(index, self.optimizer.idx2name)}: {call} needs the weight, which was in "
                f"no call yet: pass it, {call}(index, weight)"
            )
        return owner

    def _viewed(self, index: Index, weight: Any) -> Any:
        """Return a weight, or the NumPy view of one of another library."""
        context = label(index, self.optimizer.idx2name)
        with naming(context):
            view = as_real(as_weight(weight))
        check_like(context, "weight", of := header(view), REALS, np.shape(of))
        return view

    def _apply(self, call: Given, finish: Callable[[], None] = lambda: None) -> None:
        """Scale and clip gradients, multiply them by a share, and update; then call `finish`."""
        native, records = self.parameters.native, self.records
        indices, grads, weights, *_ = call
        if self.settings.clip_adaptive is not None:
            self.settings.clip_adaptive.check(indices, weights, grads, self.optimizer.idx2name)
        try:
            if native and batches_of(self.optimizer) is None:
                info = records.take(self, call)
            else:
                info = self._apply_in_python(call)
                info = self.parameters.stepped(info, indices) if info.stepped else info
            finish()
        except BaseException:
            if records.words[DONE]:
                finish()
            raise
        self._report(info)

    def _apply_in_python(self, call: Given) -> StepInfo:
        """Clip the gradients in Python, for a user's ``update()`` or a sum of several calls."""
        indices, grads, weights, single, share, _ = call
        self.records.words[DONE] = 0
        checked = [grad for *_, grad in self._checked_entries(indices, grads, weights)]
        clipped = clip(self, indices, weights, checked, share)
        info, factor = measure(self, indices, clipped, share)
        if not info.stepped:
            return info
        if self.parameters.native:
            applied = grads if self.settings.clip_adaptive is None else [*clipped]
            self.records.take(self, Given(indices, applied, weights, single, share, factor))
            return info
        grads = [times(grad, factor * share) for grad in clipped]
        calls = self._with_states(list(zip(indices, weights, grads, strict=True)))
        self._update_in_python(calls)
        self._keep(calls)
        return info

    def _report(self, info: StepInfo) -> None:
        """Record the outcome of a call."""
        vars(self)["_info"] = info  # skips __setattr__
        devices = self.records.devices
        if devices is not None and info is devices.awaited:
            return  # the outcome comes later, for the scaler too
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=info.skipped)


class _AveragesByIndex(dict[Index, Any]):
    def __missing__(self, index: Index) -> Any:
        raise KeyError(
            f"index {index!r} has no average: with average=EMA() or another, it begins with the "
            "first update, until then the weight is its average; indices that have one, such as "
            f"paths of nested weights, are {brief(list(self))}"
        )

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            "updates write the averages: assign elements, updater.averages[index][...] = values; "
            "resize() changes a shape, and without a state in updater.states a weight of another "
            "shape begins another average"
        )

    __setitem__ = __delitem__ = pop = popitem = clear = _refuse
    update = setdefault = __ior__ = _refuse


def _shown(value: Any) -> str:
    """Representation of an argument, without addresses."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(part)}' for key, part in value.items())}}}"
    return without_address(repr(value), value)


@constructs(Updater)
def get_updater() -> None:
    """Return an :class:`Updater` for an optimizer.

    Parameters
    ----------
    optimizer : Optimizer or str
        The optimizer or its name.
    loss_scaler, clip_global_norm, groups, accumulate, average, clip_adaptive, clip_adaptive_eps
        See :class:`Updater`, also for errors.

    Examples
    --------
    >>> import fastopt
    >>> updater = fastopt.Updater("adam", clip_global_norm=1.0)
    >>> updater
    Updater(Adam(learning_rate=0.001), clip_global_norm=1.0, states=0)
    """
