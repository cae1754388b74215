"""Records of parameters: how an updater's calls reach the compiled :mod:`fastopt._kernels.front`.

A record is created when a parameter is first updated, and describes the form of its arrays. Every
later call that the form admits runs in compiled code, whatever objects, order or subset it brings.
Other calls return to Python, which creates missing records, enlarges tables or computes a learning
rate, and enters the call again. Where headers of objects cannot be read, Python writes what
compiled code reads (:mod:`fastopt._engine.reader`).

Tests: ``tests/engine/test_records.py``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from functools import cache, partial
from math import inf
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.averaging import Averages
from fastopt._engine.clip import STEPPED, times
from fastopt._engine.contract import Batches, OptimizerLike, batches_of, check_once
from fastopt._engine.devices import Devices
from fastopt._engine.enrolment import Enrolment
from fastopt._engine.hyper import hyper_of
from fastopt._engine.hyper_rows import Shared, multipliers, rate_at
from fastopt._engine.mode import IDLE, mode_of
from fastopt._engine.overlap import Ranges, bounds
from fastopt._engine.owner import Owner, clip, measure
from fastopt._engine.parameters import DeviceRecord, Given, Parameter, Parameters, Record
from fastopt._engine.per_index import Index
from fastopt._engine.reader import front_of
from fastopt._engine.record_rows import ATTRIBUTES, integer_words
from fastopt._engine.validate import leaves
from fastopt._foreign import as_real
from fastopt._interrupts import uninterrupted
from fastopt._kernels import clipping, front, measuring, strided
from fastopt._kernels import record_words as w
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.compiling import entry_of
from fastopt._kernels.device_memory import assign, host
from fastopt._kernels.devices import header, is_cuda
from fastopt._kernels.lanes import DOWN
from fastopt._kernels.layout import PAIRS, Layout, bfloat16
from fastopt._kernels.numpy_abi import address_of, kind_word
from fastopt._kernels.threads import may_run_parallel, thread_count, turn
from fastopt.amp import StepInfo
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse

Array = np.ndarray[Any, Any]
Words = NDArray[np.int64]

WEIGHT_ID = w.WEIGHT_ID

Arguments = tuple[Any, Any, Any]
"""Index, gradient and weight of a call, or lists of them."""

Step = tuple[int, float, float]
"""Number of the update of a tensor, its learning rate and its weight decay."""

NONE = {"lr": 0.0, "wd": 0.0}
"""Rates that nothing reads."""

ROOM = (w.NO_ROOM, w.NO_CAPACITY, w.IS_LARGE)
"""Statuses of calls that are entered again with more memory or on several threads."""

COUNT, EXPECTED, EXPECTED_TIME, TIMED = w.COUNT, w.EXPECTED, w.EXPECTED_TIME, w.TIMED

RELEASED_FROM = 1 << 24
"""Bytes of scratch memory from which it is released after a call."""


EMPTY = np.empty(0, np.int64)
"""Memory that is allocated when it is needed."""

FEW, WIDEST = 16, 4
"""Numbers of tensors of a call, and of arrays of a state, that there is always memory for."""

ROWS = w.CONTEXT + w.NORM_NUMBERS
SPANS = ROWS + FEW * w.TENSOR
NOTHING = SPANS + 2 * FEW * (1 + WIDEST)
"""Where parts of this memory begin: rows of tensors, their memory ranges, and a record without
elements with its loops and its row."""

LOOPS, ROW = NOTHING + w.RECORD, NOTHING + w.RECORD + w.PASS
INSIDE = [w.SELF, w.NORM, w.TENSORS, w.SPANS, w.NOTHING, NOTHING + w.KERNELS, NOTHING + w.ROW]
"""Words with addresses in this memory."""

FROZEN = np.zeros(w.RECORD, np.int64)
FROZEN[w.FROZEN] = 1
"""The record of parameters that are left out of all calls."""


class Plan(Enum):
    """How a call that the front has refused is entered: each way may fail where the next does not.

    TRUST: arrays are entered as they come, and new parameters have the records of others of their
    form. It fails where an argument is wrong, or of a rare form. CHECKED: every array is checked in
    Python, which reports what is wrong. It fails where arrays of a state have been replaced since
    the record was made. REBUILD: the records of all its parameters are made again.
    """

    TRUST = auto()
    CHECKED = auto()
    REBUILD = auto()


class Records:
    """The records of an updater.

    Parameters
    ----------
    parameters : Parameters
        The parameters of the updater.

    Attributes
    ----------
    version : int
        Version of the optimizer for which hyper-parameters are computed.
    mode : Mode
        What settings and optimizers ask of calls.
    steady : bool
        Whether hyper-parameters change with attributes alone.
    quick : bool
        Whether a call may be entered before it is checked in Python.
    direct : bool
        Whether a call goes straight to compiled code.
    prepared : bool
        Whether Python prepares each call: it sums gradients, or enters extra arrays.
    stepped : StepInfo
        The outcome of a call that measures nothing.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters, self.by_index = parameters, parameters.rows
        self.version = self.mode_version = self.multipliers_version = -1
        self.quick = self.direct = self.steady = self.prepared = False
        self.measure, self.stepped, self.mode = 0, STEPPED, IDLE
        self.rescale: Any = None
        self.averages: Averages | None = None
        self.slots: dict[Index, int] = {}
        self.shared: dict[Any, Shared] = {}
        self.rows: dict[Any, Shared] = {}
        self.asked: dict[Index, tuple[Any, Any]] = {}
        self.counts: Any = EMPTY
        self.counts_view: Any = None
        self.scratch: Any = EMPTY
        self.counting: Words = EMPTY
        self.widest = WIDEST
        self._make_memory()
        self.words[w.SLOTS] = id(self.slots)
        self.freezes = False
        self.aliases: dict[Any, str] = {}
        self.loaded: dict[Index, bool] = {}
        self.translates = False
        """Whether calls have had indices that are neither an int nor a str."""
        self.scheduled: dict[tuple[Any, int], float] | None = None
        """Learning rates of a step that may be tried repeatedly, by optimizer and update."""
        self.incomplete: list[bool] = []
        """Of each tensor of a call, whether its sum is incomplete, so that it is only counted."""
        self.enter: Any = None
        self.devices: Devices | None = None
        """What enters calls with weights on devices, once there is one."""

    def _make_memory(self) -> None:
        """Allocate the context of calls, rows for the tensors of small ones, and NOTHING."""
        memory = blank_memory().copy()
        self.context = address_of(memory)
        whole = memory.data
        for place in INSIDE:
            whole[place] += self.context
        self.words = memory[: w.CONTEXT]
        self.view = whole[: w.CONTEXT]
        self.norm = memory[w.CONTEXT : ROWS].view(np.float64)
        self.tensors, self.spans = memory[ROWS:SPANS], memory[SPANS:NOTHING]

    # Settings

    def key_of(self, index: Any) -> int | str:
        """Return what stands for an index in compiled code: an equal int or str, or a new key."""
        if type(index) is int or type(index) is str:
            return index
        if not self.translates:
            self.translates, enter = True, self.enter

            def translated(context: int, index: Any, grad: Any, weight: Any) -> int:
                listed = type(index) in (list, tuple)
                keys: Any = list(map(self.key_of, index)) if listed else self.key_of(index)
                status: int = enter(context, keys, grad, weight)
                return status

            self.enter = translated
        if isinstance(index, str):
            return str.__str__(index)
        if isinstance(index, Real) and float(index).is_integer():
            return int(float(index))
        return self.aliases.setdefault(index, f"\0{len(self.aliases)}")

    def refresh(self, updater: Owner) -> None:
        """Follow the changes of the attributes of optimizers."""
        parameters, optimizer = self.parameters, updater.optimizer
        if self.steady and self.mode_version == optimizer.mode_version:
            version, same = optimizer.version, self.rescale == optimizer.rescale_grad
            if same and all(shared.follow(optimizer.lr) for shared in self.shared.values()):
                self.version = version
                return
        if parameters.groups is not None:
            parameters.groups.sync()
        version, same = optimizer.version, self.mode_version == optimizer.mode_version
        if not same:
            self._follow(updater)
        if self.mode.usable:
            if self.counts is not EMPTY:
                self._find_slots(optimizer)
            if self.multipliers_version != optimizer.multipliers_version:
                self._share_all(list(self.known()))
                self.multipliers_version = optimizer.multipliers_version
            only_rates = same and self.rescale == optimizer.rescale_grad
            only_rates = only_rates and parameters.groups is None
            for shared in self.shared.values():
                shared.find_skips()
                if self.mode.asks:
                    shared.given = shared.fixed = None
                elif not (only_rates and shared.follow(optimizer.lr)):
                    shared.fill(shared.optimizer.lr, again=only_rates)
        self.words[w.EXPECTED] = 0
        self.stepped = (
            STEPPED if batches_of(optimizer) is not None else parameters.stepped(STEPPED, ())
        )
        changes = self.mode.asks or parameters.groups is not None
        self.steady = self.mode.usable and not changes
        self.admit(optimizer)
        self.rescale, self.mode_version = optimizer.rescale_grad, optimizer.mode_version
        self.version = version  # last, as an exception may come before

    def admit(self, optimizer: OptimizerLike) -> None:
        """Admit calls before they are checked in Python, if the multipliers have been checked."""
        mode = self.mode
        self.quick = mode.usable and not (optimizer.unchecked or self.prepared)
        python = mode.live or mode.measures or self.stepped is not STEPPED
        python = python or self.devices is not None
        self.direct = self.quick and not python

    def _follow(self, updater: Owner) -> None:
        """Follow the changes of attributes besides VALUES."""
        parameters, words = self.parameters, self.words
        mode = mode_of(updater.settings, parameters, updater.runs_updates)
        by_index = any(optimizer.rule_by_index for optimizer in parameters.optimizers())
        if mode.kernels != self.mode.kernels or by_index:
            self.forget()
        self.mode, self.averages = mode, parameters.averages
        if mode.usable and self.enter is None:
            self.enter = updater.backend.entry(self, front_of(self))
        extra = any(shared.layout.rule.extra for shared in self.shared.values())
        self.prepared = mode.batches or extra
        words[w.SCHEDULED], words[w.TIMED] = mode.scheduled, mode.timed
        words[w.ASKING] = mode.asks
        measures, clips = mode.usable and mode.norms, mode.usable and mode.clips
        words[w.MEASURE] = self.measure = entry_of(measuring.measure_call) if measures else 0
        words[w.MEASURE_SHARE] = entry_of(measuring.share_call) if measures else 0
        words[w.CLIP] = entry_of(clipping.share_call) if clips else 0

    def forget(self) -> None:
        """Drop all records, since something besides the arguments of calls has changed."""
        self.slots.clear()
        if self.devices is not None:
            self.devices.forget()
        for parameter in self.by_index.values():
            parameter.record = None
        self.shared, self.rows, self.asked = {}, {}, {}
        self.version = self.mode_version = -1
        self.quick = self.direct = self.steady = self.freezes = False
        self.tensors[:] = 0

    def find_counts(self, optimizer: OptimizerLike) -> None:
        """Enter the positions of counts for the first records."""
        if self.counts is EMPTY:
            self._find_slots(optimizer)

    def _find_slots(self, optimizer: OptimizerLike) -> None:
        """Enter the positions of counts and carried numbers, which may have moved."""
        counts, still = optimizer._index_update_count, True
        for shared in (*self.shared.values(), *self.rows.values()):
            still = still and shared.carried is getattr(shared.optimizer.carried, "array", None)
        if still and self.counts is counts.array:
            return
        if self.counts is not EMPTY:  # else all positions are new
            self._move_slots(counts)
        for shared in (*self.shared.values(), *self.rows.values()):
            shared.find_carried()
        self.words[w.COUNTS] = address_of(counts.array)
        self.counts, self.counts_view = counts.array, counts.array.data

    def _move_slots(self, counts: Any) -> None:
        """Enter the positions of all records in `counts`; drop those that have none."""
        known = self.known()
        for index in [index for index in known if index not in counts]:
            self.drop(index)
            del known[index]
        slots = counts.slots(list(known), 0).tolist()
        for (index, record), slot in zip(known.items(), slots, strict=True):
            record.words[w.COUNT], optimizer = slot, record.shared.optimizer
            if optimizer.carried is not None:
                record.words[w.CARRIED] = optimizer.carried_slots([index])[0]

    def _share_all(self, indices: Sequence[Index]) -> None:
        """Enter the hyper-parameters of records; drop those whose multiplier is no number."""
        for index in indices:
            record = self.record_of(index)
            if record is None:
                continue
            parameter = self.parameters.of(index)
            try:
                shared = self.shared_by(parameter, record.layout)
            except (TypeError, ValueError):  # reported by the next call with this index
                self.drop(index)
                continue
            if shared is not record.shared:  # in an order that may be interrupted and repeated
                record.words[w.HYPER] = shared.address
                parameter.record = record._replace(shared=shared)
            if self.mode.live:
                self.asked[index] = multipliers_of(self.parameters.optimizer.param_dict.get(index))
        known = self.known()
        if len(self.shared) > len(known):
            used = {id(record.shared) for record in known.values()}
            self.shared = {key: shared for key, shared in self.shared.items() if id(shared) in used}
            self.rows = {}

    def ask(self, index: Any) -> bool:
        """Follow the multipliers of the user's objects; return False for unusual indices."""
        asked, objects = self.asked, self.parameters.optimizer.param_dict
        indices = index if type(index) in (list, tuple) else [index]
        if not {*map(type, indices)} <= {int, str}:
            return False
        changed = []
        for key in indices:
            of = objects.get(key)
            try:
                same = asked.get(key) == (of.lr_mult, of.wd_mult)
            except AttributeError:
                same = asked.get(key) == multipliers_of(of)
            if not same:
                changed.append(key)
        if changed:
            self._share_all(changed)
        return True

    def shared_by(self, of: Parameter, layout: Layout) -> Shared:
        """Return the hyper-parameters that a parameter shares with others."""
        optimizer = of.optimizer
        multiplied = multipliers(optimizer, of.index)
        key = optimizer, layout.rule, layout.real, multiplied
        shared = self.shared.get(key)
        if shared is None:
            hyper = hyper_of(optimizer)
            if self.averages is not None:
                hyper = self.averages.hyper(hyper)
            with of.compiling():
                shared = Shared(optimizer, layout, hyper, multiplied)
            shared.find_carried()
            shared.find_skips()
            if not self.mode.asks:
                shared.fill(optimizer.lr)
            self.shared[key] = shared
        return shared

    # Calls

    def on_devices(self, updater: Owner) -> Devices:
        """Return what enters calls with weights on devices, from now on all calls."""
        if self.devices is None:
            self.devices = self.enter = Devices(self, updater)
            self.direct = False
        return self.devices

    def record_of(self, index: Index) -> Record | DeviceRecord | None:
        """Return the record of a parameter, None if it has none."""
        parameter = self.by_index.get(index)
        return None if parameter is None else parameter.record

    def __getitem__(self, index: Index) -> Record | DeviceRecord:
        record = self.by_index[index].record
        if record is None:
            raise KeyError(index)
        return record

    def layouts(self, indices: Iterable[Index]) -> list[Layout]:
        """Return the different layouts of parameters, without a function call for each."""
        known = self.by_index
        layouts = [record.layout for index in indices if (record := known[index].record)]
        return list({id(layout): layout for layout in layouts}.values())

    def known(self) -> dict[Index, Record | DeviceRecord]:
        """Return the records of all parameters that have one."""
        return {i: of.record for i, of in self.by_index.items() if of.record is not None}

    def admits(self, index: Any, grad: Any, weight: Any) -> int:
        """Return the status of a call, with memory for it; nothing is updated."""
        self.words[w.CHECKS] = 1
        try:
            return self.with_room(w.NO_ROOM, (index, grad, weight))
        finally:
            self.words[w.CHECKS] = 0

    def resolve(self, updater: Owner, status: int, index: Any, grad: Any, weight: Any) -> int:
        """Do what a status of a call asks for; return the status in the end."""
        arguments = index, grad, weight
        if status in ROOM:
            status = self.with_room(status, arguments)
        if status == w.ASKS and (self.mode.begins or type(index) in (list, tuple)):
            with uninterrupted:
                status = self._enter_with_rates(updater, arguments)
        elif status == w.ASKS:
            status = self._enter_with_rates(updater, arguments)
        if status == w.MOVED:
            self.note(index, weight)
        if len(self.scratch) >= RELEASED_FROM:
            self._make_room(0)
        return status

    def with_room(self, status: int, arguments: Arguments) -> int:
        """Enter a call again with more memory, or on several threads, if its status asks for it."""
        words = self.words
        while status in ROOM:
            lacks = words[w.NEED] > words[w.ROOM] or words[w.NEED_COUNTED] > words[w.COUNTED]
            if status == w.NO_ROOM and lacks:
                self._make_room(int(words[w.NEED]))
            elif status == w.NO_CAPACITY:
                self._make_capacity(int(words[w.NEED]))
            threads = 0
            if status == w.IS_LARGE:
                threads = thread_count() if may_run_parallel() else 1
            if threads > 1:
                words[w.SPREAD], (words[w.RUN], words[w.UPDATE_SHARE]) = front.spread(), front.run()
            with turn() if threads > 1 else nullcontext():
                words[w.THREADS] = threads
                try:
                    status = self.enter(self.context, *arguments)
                finally:
                    words[w.THREADS] = 0
        return status

    def freeze(self, indices: Sequence[Index]) -> None:
        """Leave parameters out of all calls, with whatever gradient."""
        if self.mode.usable and {*map(type, indices)} <= {int, str}:
            self.freezes = True
            self.slots.update(dict.fromkeys(indices, address_of(FROZEN)))

    def moving(self, index: Any, *lists: Any) -> Sequence[Any]:
        """Return the items of the arguments of a call, in tuples, without frozen parameters."""
        if type(index) not in (list, tuple):
            return [(index, *lists)]
        items: Any = zip(index, *lists, strict=True)
        if not self.freezes:
            return list(items)
        slots, frozen = self.slots, address_of(FROZEN)
        return [item for item in items if slots.get(item[0]) != frozen]

    def note(self, index: Any, weight: Any) -> None:
        """Keep the weights of a call in place of those of earlier calls."""
        known, listed = self.by_index, type(index) in (list, tuple) and not self.freezes
        pairs = zip(index, weight, strict=True) if listed else self.moving(index, weight)
        for key, array in pairs:
            try:
                parameter = known[key]
            except KeyError:
                parameter = self.parameters.of(key)
            parameter.weight = array
            if (record := parameter.record) is not None:  # a signal handler may have dropped it
                record.words[WEIGHT_ID] = id(array)
        if self.loaded:
            for key, _ in self.moving(index, weight):
                if key in self.loaded:
                    dict.__setitem__(self.loaded, key, True)
            if all(self.loaded.values()):
                self.loaded = {}

    def follow_load(self, synced: dict[Index, bool]) -> None:
        """Enter in `synced`, which is all False, the parameters whose loaded states are used."""
        self.loaded = synced
        if self.devices is not None:
            self.devices.noted = None
        for record in map(self.record_of, synced):
            if record is not None:
                record.words[WEIGHT_ID] = 0  # so that the front reports another weight

    def enter_measured(
        self, updater: Owner, arguments: Arguments, share: float = 1.0, factor: float | None = None
    ) -> StepInfo | None:
        """Clip the units of gradients, scale them by `share`, clip their global norm, and update.

        With `factor`, that of gradients that have been measured before, none is measured. If the
        result is None, the call is refused, and nothing has changed.
        """
        index, grad, weight = arguments
        if self.devices is not None and updater.settings.loss_scaler is not None:
            self.devices.check_scaler(index)
        try:
            self._set_norm(updater, share, factor)
            status = self.enter(self.context, index, grad, weight)
            if status != w.OK:
                status = self.resolve(updater, status, index, grad, weight)
        finally:
            self.norm[w.FACTOR], self.words[w.MEASURE] = 1.0, self.measure
        if status < 0:
            return None
        if status == w.AWAITED:
            assert self.devices is not None
            return self.devices.awaited
        if not self.mode.norms or factor is not None:
            return self.stepped
        if status != w.SKIPPED:
            return self.stepped._replace(global_norm=self.norm.item(w.GLOBAL_NORM))
        info, factor = self._skipped(updater, arguments, share)
        if not info.stepped:
            return info
        outcome = self.enter_measured(updater, arguments, share, factor)
        return outcome and outcome._replace(global_norm=info.global_norm)

    def _set_norm(self, updater: Owner, share: float = 1.0, factor: float | None = None) -> None:
        """Enter the numbers that the next call is measured with; `share` multiplies gradients.

        With `factor`, that of gradients that have been measured before, none is measured.
        """
        norm, settings = self.norm, updater.settings
        norm[w.FACTOR] = norm[w.SHARE] = share
        if factor is not None:
            norm[w.FACTOR], self.words[w.MEASURE] = factor * share, 0
        elif self.mode.norms:
            limit = settings.clip_global_norm
            rescale = float(updater.optimizer.rescale_grad)
            norm[w.RESCALE_GRAD] = rescale * share
            norm[w.SCALE] = settings.scale
            norm[w.LIMIT] = inf if limit is None else limit
        if self.mode.clips:
            units, scale = settings.clip_adaptive, settings.scale
            assert units is not None
            norm[w.UNIT_FACTOR] = abs(float(updater.optimizer.rescale_grad) * share * scale)
            norm[w.UNIT_LIMIT], norm[w.UNIT_LEAST] = units.limit, units.least

    def _skipped(
        self, updater: Owner, arguments: Arguments, share: float
    ) -> tuple[StepInfo, float]:
        """Return the outcome of a call whose sum of squares is infinite, and a factor.

        If that is because the squares have overflowed, gradients times the factor are applied.
        """
        indices, grads, weights = zip(*self.moving(*arguments), strict=True)
        weights = tuple(map(as_real, weights))
        checked = list(map(self.checked, indices, grads, weights))
        clipped = clip(updater, indices, weights, checked, share)
        return measure(updater, indices, clipped, share, DOWN)

    def take(self, updater: Owner, call: Given) -> StepInfo:
        """Update tensors that may be new or of a rare form, and return the outcome.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong. Nothing has changed.
        """
        optimizer, indices = updater.optimizer, call.indices
        self.words[w.DONE] = self.words[w.EXPECTED] = 0
        if self.version != optimizer.version:
            self.refresh(updater)
        if self.mode.live:
            self.ask(indices)
        repeats = len(set(indices)) < len(indices)
        info = None if repeats and self.mode.defers else self._take_together(updater, call)
        if info is None:
            for summing in self.mode.sums:
                check_once(summing, indices)
            return self._take_in_turn(updater, call)
        for index in indices if not info.skipped else ():
            optimizer.masters_given.pop(index, None)
        return info

    def _take_together(self, updater: Owner, call: Given) -> StepInfo | None:
        """Update tensors with one call of the front.

        The result is None, and nothing has changed, if a tensor must have been updated before the
        gradient of another one is read, or before the same one has a record of another form.
        """
        optimizer, before = updater.optimizer, None
        self.scheduled = {}
        try:
            batches = batches_of(optimizer)
            if batches is not None:
                checked = [*map(self.checked, *call[:3])]
                if self._reads_written(updater, call):
                    return None
                before = optimizer.snapshot()
                grads = self._sum(updater, batches, call._replace(grads=checked))
                call = call._replace(grads=grads, share=1.0, factor=None)
            for plan in Plan:
                info = self._follow_plan(updater, plan, call)
                if info is not None:
                    return info
            return None  # a repeated index needs records of several forms
        finally:
            self.incomplete, self.scheduled = [], None
            if self.devices is not None:
                self.devices.adding = []
            if before is not None and not self.words[w.DONE]:
                optimizer.put_back(before)

    def _take_in_turn(self, updater: Owner, call: Given) -> StepInfo:
        """Update tensors one by one, like single calls.

        What has changed is put back if one of them fails.
        """
        indices, grads, weights, _, share, factor = call
        checked = Enrolment(self, updater, indices, list(weights)).checked(grads)
        info = self.stepped
        if self.mode.norms and factor is None:
            info, factor = measure(updater, indices, checked, share)
        averages = {} if self.averages is None else self.averages.arrays
        averaged = {index: averages[index] for index in indices if index in averages}
        before = [(optimizer, optimizer.snapshot()) for optimizer in self.parameters.optimizers()]
        arrays = self._written(updater, indices, weights)
        values, known = [np.array(host(array)) for array in arrays], {*updater.states}
        try:
            for index, grad, weight in zip(indices, grads, weights, strict=True):
                if info.stepped:
                    self.take(updater, Given([index], [grad], [weight], True, share, factor))
        except BaseException:
            self.words[w.DONE] = 0
            for array, old in zip(arrays, values, strict=True):
                assign(array, old)
            for optimizer, saved in before:
                optimizer.put_back(saved)
            for index in {*indices} - known:
                dict.pop(updater.states, index, None)
                dict.pop(updater.states_synced, index, None)
                averages.pop(index, None)
                self.drop(index)
            averages.update(averaged)
            raise
        return info

    def _written(
        self, updater: Owner, indices: Sequence[Index], weights: Sequence[Any]
    ) -> list[Any]:
        """Return the headers of the arrays that a call changes, besides states that are new."""
        arrays, states = list(weights), updater.states
        averages = {} if self.averages is None else self.averages.arrays
        batches = batches_of(updater.optimizer)
        for index in indices:
            others = self.parameters.copy_of(index), averages.get(index), states.get(index)
            arrays += leaves(others)
            arrays += () if batches is None else batches.arrays(index)
        decays = [optimizer.row_decay for optimizer in self.parameters.optimizers()]
        arrays += [decay[index][0] for decay in decays for index in indices if index in decay]
        return list(map(header, arrays))

    def _reads_written(self, updater: Owner, call: Given) -> bool:
        """Whether the gradient of one of several tensors may share memory with what is written."""
        indices, grads, weights, *_ = call
        if len(indices) < 2:
            return False
        written = Ranges(*bounds(self._written(updater, indices, weights)))
        whole = [_whole(grad, header(of).shape) for grad, of in zip(grads, weights, strict=True)]
        values = [array.values if isinstance(array, RowSparse) else array for array in whole]
        return written.meets(*bounds(list(map(header, values))))

    def check(self, updater: Owner, index: Index, grad: Any, weight: Any) -> None:
        """Raise unless the arrays of one tensor, with a state, are valid."""
        Enrolment(self, updater, [index], [weight]).checked([grad])

    def _follow_plan(self, updater: Owner, plan: Plan, call: Given) -> StepInfo | None:
        """Enter a call in one of three ways; return None if the front refuses it."""
        (indices, grads, weights, *_), trusts = call, plan is Plan.TRUST
        for index in indices if plan is Plan.REBUILD else ():
            self.drop(index)
        enrolment = Enrolment(self, updater, indices, list(weights))
        self.words[w.APART] = not trusts
        try:
            if self.devices is not None or any(map(is_cuda, weights)):
                self.on_devices(updater).checks = True
            checked = enrolment.as_they_come(grads) if trusts else enrolment.checked(grads)
            info, known = None, plan is not Plan.REBUILD
            served = checked and enrolment.enroll(checked, known)
            if served and enrolment.compile_missing(checked, not trusts):
                entered = call._replace(grads=checked, weights=enrolment.weights)
                info = self._enter_enrolled(updater, entered)
            if info is None and not known and len(set(indices)) == len(indices):
                raise self._refusal(indices)
            return info
        finally:
            self.words[w.APART] = 0
            if self.devices is not None:
                self.devices.checks = False
            if self.words[w.DONE]:
                enrolment.copy_back()
            else:
                enrolment.withdraw()
            enrolment.drop_single()

    def _enter_enrolled(self, updater: Owner, call: Given) -> StepInfo | None:
        """Enter a call whose parameters have records; return None if the front refuses it."""
        if self.version != updater.optimizer.version:  # new indices may have moved the counts
            self.refresh(updater)
        self.find_counts(updater.optimizer)
        lists: Any = call[:3]
        single = call.single and not isinstance(call.indices[0], tuple)  # that would be a list
        arguments = tuple(items[0] for items in lists) if single else lists
        return self.enter_measured(updater, arguments, call.share, call.factor)

    def _sum(self, updater: Owner, batches: Batches, call: Given) -> list[Any]:
        """Return the sums of gradients that an optimizer of several calls per update has so far."""
        sums, factor = [], call.share * (1.0 if call.factor is None else call.factor)
        for index, grad, weight in zip(*call[:3], strict=True):
            context, grad = self.parameters.of(index).context, times(grad, factor)
            total, tables = batches.add(context, index, grad, weight)
            if tables:
                self.on_devices(updater).adding += tables
            self.incomplete.append(total is None)
            sums.append(grad if total is None else total)
        return sums

    def checked(self, index: Index, grad: Any, weight: Any) -> Any:
        """Return the checked gradient of one tensor, as numbers that the update can read."""
        of = self.parameters.of(index)
        return self.parameters.check(of.context, as_real(weight), as_real(grad), of.copy)

    def _refusal(self, indices: Sequence[Index]) -> Exception:
        """Return the reason why a call is refused whose arrays have been checked."""
        rows = self.tensors[w.T_HYPER :: w.TENSOR][: len(indices)].tolist()
        known = {shared.address: shared for shared in (*self.shared.values(), *self.rows.values())}
        for index, address in zip(indices, rows, strict=False):
            if address in known:
                known[address].check(index)
        return RuntimeError(
            f"the call of {list(indices)} was changed while it was made: a schedule, a property or "
            "another thread has replaced arrays or settings; update again"
        )

    def relink(self, index: Index, state: Any) -> None:
        """Follow another state of a parameter: its record has the new arrays, or is dropped."""
        of = self.by_index.get(index)
        if of is None or of.record is None or not of.record.relink(state):
            self.drop(index)

    def drop(self, index: Index) -> None:
        """Drop the record of a parameter."""
        key = self.key_of(index)
        self.slots.pop(key, None)
        if self.devices is not None:
            self.devices.drop(key)
        if index in self.by_index:
            self.by_index[index].record = None
        self.tensors[:] = 0

    # Hyper-parameters that Python computes. What it changes before a step (counts, sums over
    # tensors) is undone unless the step succeeds.

    def _enter_with_rates(self, updater: Owner, arguments: Arguments) -> int:
        """Compute the hyper-parameters of an update, and update."""
        words, counts, index = self.words, self.counts, arguments[0]
        tracked = updater.optimizer._index_update_count  # a schedule may replace their array
        indices = index if type(index) in (list, tuple) else [index]
        if self.freezes:
            indices = [key for (key,) in self.moving(indices)]
        before = counts.item(0)
        undo: list[Callable[[], None]] = []
        scheduled = {} if self.scheduled is None else self.scheduled
        decays: list[tuple[Record | DeviceRecord, Index, Any]] = []
        status: int = w.REFUSED
        try:
            if self.mode.begins:
                self._begin(indices, undo)
            steps, rates = self.fill(updater, indices, scheduled)
            if not self.mode.usable:  # the schedule has changed settings
                return w.REFUSED
            if self.mode.defers:
                if words[w.REPEATS] or None in map(self.record_of, indices):
                    return w.REFUSED  # a schedule may have changed states
                decays = self._defer(index, arguments[2], steps or self._even(indices, rates))
            words[w.ASKED] = 1
            status = self.enter(self.context, *arguments)
            if status in ROOM:
                status = self.with_room(status, arguments)
        finally:
            words[w.ASKED] = words[w.EACH] = 0
            if not words[w.DONE] or status == w.AWAITED:
                tracked.counted[0] = before
            if not words[w.DONE]:
                for action in reversed(undo):
                    action()
            else:
                for record, index, decay in decays:
                    record.shared.optimizer.row_decay[index] = decay
                if self.mode.sums:
                    self._collect(updater.states, indices)
        return status

    def fill(
        self, updater: Owner, indices: Sequence[Index], scheduled: dict[tuple[Any, int], float]
    ) -> tuple[Sequence[Step], dict[Any, float]]:
        """Compute the hyper-parameters of the admitted call.

        `scheduled` has what schedules have returned. Returns the steps of the tensors if they
        differ, and otherwise the learning rates by optimizer.
        """
        words, counts, rates = self.words, self.counts, dict[Any, float]()
        if self.mode.by_tensor or words[w.UNEVEN]:
            return self._fill_each(updater, indices, scheduled), rates
        update = words.item(w.UPDATE_NUMBER)
        alone = self.parameters.groups is None
        for of in (updater.optimizer,) if alone else self._optimizers(indices):
            rates[of] = of.lr
            if of.lr_scheduler is not None and (of, update) in scheduled:
                rates[of] = scheduled[of, update]
            elif of.lr_scheduler is not None:
                counts[0] = update
                rate = of.lr_scheduler(update)
                rates[of] = rate if type(rate) is float else of.scheduled(rate)
                scheduled[of, update] = rates[of]
        if self.version != updater.optimizer.version:
            self.refresh(updater)
        for shared in self.shared.values():
            if shared.optimizer in rates:
                shared.fill(rates[shared.optimizer], words.item(w.TIME), again=True)
        return (), rates

    def foresee(self, updater: Owner, index: Any) -> None:
        """Compute the hyper-parameters of the update that a call with one index should be.

        If it is another one, the front asks for those.
        """
        words, counts, optimizer = self.view, self.counts_view, updater.optimizer
        try:
            record = self.by_index[index].record
        except (KeyError, TypeError):  # the front refuses the call
            return
        if record is None:
            return
        record_words = record.words
        before, time = counts[0], counts[record_words[COUNT]] + 1
        update = before if before > time else time
        rate, schedule = optimizer.lr, optimizer.lr_scheduler
        try:
            if schedule is not None:
                counts[0] = update  # for a schedule or hyper() that asks the optimizer
                rate = schedule(update)
                if type(rate) is not float:
                    rate = optimizer.scheduled(rate)
                if self.version != optimizer.version:  # the schedule has changed settings
                    self.refresh(updater)
                    return
            for shared in self.shared.values():
                if not shared.follow(rate):
                    shared.fill(rate, time, again=True)
        except BaseException:
            optimizer._index_update_count.largest = before  # the schedule may replace their array
            raise
        finally:
            counts[0] = before
        words[EXPECTED], words[EXPECTED_TIME] = update, time if words[TIMED] else 0

    def _even(self, indices: Sequence[Index], rates: Mapping[Any, float]) -> list[Step]:
        """Return the steps of tensors whose update counts are equal, given rates by optimizer."""
        steps = []
        for index in indices:
            record = self[index]
            t, of = self.counts.item(record.words[w.COUNT]) + 1, record.shared.optimizer
            fields = of.rates_at(rates[of], record.shared.multipliers)
            steps.append((t, fields["lr"], fields["wd"]))
        return steps

    def _defer(
        self, indices: Any, weights: Any, steps: Sequence[Step]
    ) -> list[tuple[Record | DeviceRecord, Index, Any]]:
        """Enter the deferred decay of a step; return that of each parameter after it."""
        decays: list[tuple[Record | DeviceRecord, Index, Any]] = []
        incomplete = self.incomplete or [False] * len(steps)
        moving = self.moving(indices, weights)
        for (index, weight), step, skips in zip(moving, steps, incomplete, strict=True):
            record = self[index]
            if record.deferred is not None and not skips:
                of = record.shared.optimizer
                after = record.deferred.begin(of, index, as_real(weight), *step)
                decays.append((record, index, after))
        return decays

    def _begin(self, indices: Sequence[Index], undo: list[Callable[[], None]]) -> None:
        """Begin the step of optimizers that count themselves or sum over the tensors of a step.

        Functions that undo it are added to `undo`.
        """
        for optimizer in self._optimizers(indices):
            if optimizer.per_index:
                undo.append(partial(optimizer.put_back, optimizer.snapshot()))
            sums = optimizer.step_sums
            if sums is not None:
                check_once(optimizer, indices)
                undo.append(partial(sums.put_back, sums.begin(indices)))

    def _collect(self, states: Mapping[Index, Any], indices: Sequence[Index]) -> None:
        """Add the numbers that the tensors of a completed step have kept to its sums."""
        for optimizer in self.mode.sums:
            known = [(index, self[index]) for index in indices]
            kept = {i: r.layout.rule.kept for i, r in known if r.shared.optimizer is optimizer}
            arrays = (leaves(states[index])[-len(names) :] for index, names in kept.items())
            numbers = [[float(host(header(array))) for array in group] for group in arrays]
            if optimizer.step_sums is not None:
                optimizer.step_sums.add(list(kept), numbers)

    def _fill_each(
        self, updater: Owner, indices: Sequence[Index], asked: dict[tuple[Any, int], float]
    ) -> list[Step]:
        """Compute the hyper-parameters of each tensor of a call, in the order of its list.

        `asked` has what schedules have returned. Returns the steps of the tensors.
        """
        words, counts, tensors = self.words, self.counts, self.tensors
        largest, times = counts.item(0), dict[int, int]()
        steps: list[tuple[int, float, int]] = []
        for index in indices:
            record = self[index]
            optimizer, slot = record.shared.optimizer, record.words[w.COUNT]
            times[slot] = t = times.get(slot, counts.item(slot)) + 1
            update = max(t - optimizer.rates_before_count, largest)
            largest = max(update, t)
            rate = 0.0 if optimizer.per_index else rate_at(optimizer, update, asked)
            steps.append((update, rate, t))
        if self.version != updater.optimizer.version:
            self.refresh(updater)
        used: dict[Any, Shared] = {}
        found_steps = list[Step]()
        for k, (index, (update, rate, t)) in enumerate(zip(indices, steps, strict=True)):
            entry = self.record_of(index)
            if entry is None:  # the schedule has changed states, so that the front refuses the call
                return []
            shared, count = entry.shared, -1
            skips = bool(self.incomplete) and self.incomplete[k]
            if shared.optimizer.per_index:
                row = used[k] = self._row(shared, len(used))
                count, of = row.counted(index, entry.words[w.CARRIED])
            else:
                of = NONE
                if self.mode.defers:
                    of = shared.optimizer.rates_at(rate, shared.multipliers)
                key = shared, rate, t, skips
                if key not in used:
                    row = used[key] = self._row(shared, len(used))
                    if words[w.SCHEDULED]:  # hyper() may read the schedule too
                        counts[0] = update
                    row.fill(rate, t, row.version == shared.optimizer.version)
                    row.version = shared.optimizer.version
                row = used[key]
            row.words[w.SKIPS] = shared.words[w.SKIPS] or skips
            place = k * w.TENSOR
            tensors[place + w.T_HYPER], tensors[place + w.T_COUNT] = row.address, count
            found_steps.append((t, of["lr"], of["wd"]))
        words[w.EACH] = 1
        return found_steps

    def _row(self, shared: Shared, number: int) -> Shared:
        """Return hyper-parameters for one tensor of a call, which may have another count or rate.

        They are used again by later calls.
        """
        row: Shared | None = self.rows.get((shared, number))
        if row is None:
            row = Shared(shared.optimizer, shared.layout, shared.hyper, shared.multipliers)
            row.find_carried()
            self.rows[shared, number] = row
        return row

    def _optimizers(self, indices: Sequence[Index]) -> list[Any]:
        """Return the optimizers of a call's parameters, in the order of its list."""
        return list(dict.fromkeys(self[index].shared.optimizer for index in indices))

    # Memory

    def _make_room(self, size: int) -> None:
        """Allocate scratch memory."""
        self.words[w.COPY] = entry_of(strided.copy_call)
        self.scratch = np.empty(size and max(size + 64, 1 << 16), np.uint8)
        self.words[w.SCRATCH] = self.scratch.ctypes.data + (-self.scratch.ctypes.data % 64)
        self.words[w.ROOM] = max(len(self.scratch) - 64, 0)
        if self.words[w.NEED_COUNTED] > self.words[w.COUNTED]:
            self.counting = np.arange(max(2 * self.words[w.NEED_COUNTED], 1024))
            self.words[w.COUNTING] = self.counting.ctypes.data
            self.words[w.COUNTED] = len(self.counting)

    def _make_capacity(self, count: int) -> None:
        """Allocate rows for the tensors of a call, and for the memory ranges that it writes."""
        count = max(2 * count, 16)
        self.tensors = np.zeros(count * w.TENSOR, np.int64)
        self.spans = np.zeros(2 * count * (1 + self.widest), np.int64)
        self.words[w.TENSORS] = self.tensors.ctypes.data
        self.words[w.SPANS], self.words[w.CAPACITY] = self.spans.ctypes.data, count


@cache
def blank_memory() -> Words:
    """Return the memory of records before the first call, with addresses relative to its start."""
    words = np.zeros(ROW + 4, np.int64)
    words[INSIDE] = 8 * np.array([0, w.CONTEXT, ROWS, SPANS, NOTHING, LOOPS, ROW])
    words[w.CONTEXT : ROWS].view(np.float64)[:] = 1.0
    words[NOTHING + w.WEIGHT_COLUMN], words[NOTHING + w.GRAD_COLUMN] = 2, 3
    words[w.LARGE_FROM], words[w.CAPACITY] = PARALLEL_FROM, FEW
    types = np.ndarray, list, tuple, int, np.int64, str, float
    words[w.NDARRAY : w.FLOAT + 1] = list(map(id, types))
    known = [np.float32, np.float64, np.float16]
    words[w.NUMBERS : w.NUMBERS + 3] = list(map(id, known))
    kinds = [*known, bfloat16_or_none(), *PAIRS.values()]
    for place, kind in enumerate(kinds, w.DTYPES):
        words[place] = 0 if kind is None else kind_word(np.dtype(kind))
    words[w.ROW_SPARSE] = id(RowSparse)
    words[w.VALUES_NAME : w.SHAPE_NAME + 1] = list(map(id, ATTRIBUTES))
    words[w.INTEGERS : w.CONTEXT] = integer_words()
    return words


def multipliers_of(parameter: object) -> tuple[Any, Any]:
    """Return the multipliers of the user's object for a parameter, None where it has none."""
    return getattr(parameter, "lr_mult", None), getattr(parameter, "wd_mult", None)


@cache
def bfloat16_or_none() -> Any:
    """Return the dtype of bfloat16 arrays, or None if it is not installed."""
    try:
        return bfloat16()
    except ImportError:
        return None


def _whole(grad: Any, shape: tuple[int, ...]) -> Any:
    """Return a gradient as an array or a RowSparse."""
    if is_row_sparse(grad):
        return as_row_sparse(grad, shape)
    return grad if is_cuda(grad) else np.asarray(grad)
