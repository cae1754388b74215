"""Calls of an updater whose weights are on CUDA devices, all or some of a list.

A parameter on a device has a record with its counts and hyper-parameters, like one on the host, and
a table for each form of its gradient, which is created with full validation. A call joins the
tables of its parameters by device, stream and layout, so that a list of any length is a few
launches (:mod:`~fastopt._engine.device_call`), and is kept by its indices. Each call reads the
headers of all weights and gradients, compares them with the form, and enters addresses that have
changed (:mod:`fastopt._kernels.cuda_arrays`): the objects may be others than before. Overlaps are
found from the ranges of all written arrays.

:class:`Devices` stands in the place of the front (:mod:`fastopt._kernels.front`), and returns its
statuses, so that settings, schedules, accumulation and first calls are those of
:class:`~fastopt._engine.records.Records`, whatever the arrays are.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_promises.py``.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from operator import add
from typing import Any
from weakref import ref

import numpy as np

from fastopt._engine.clip import squares, times
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.device_call import DeviceCall, Places, Repeat, sets_of
from fastopt._engine.device_steps import DeviceSteps, Norm, Outcome
from fastopt._engine.device_tables import table_of_parameter
from fastopt._engine.owner import Owner, RecordsLike
from fastopt._engine.parameters import DeviceRecord, Parameter
from fastopt._engine.record_rows import DeferredDecay
from fastopt._engine.validate import is_fixed
from fastopt._interrupts import uninterrupted
from fastopt._kernels import device_front
from fastopt._kernels import record_words as w
from fastopt._kernels.cpu_calls import FACTOR, LENGTH, limit_norm
from fastopt._kernels.cuda_arrays import UNREADABLE, compiled_can_read
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.devices import header, readings, stays
from fastopt._kernels.layout import DONE, KEY, Layout, kind_of, real_of
from fastopt._kernels.noise import index_number
from fastopt._kernels.numpy_abi import address_of, readable
from fastopt.amp import StepInfo
from fastopt.sparse import RowSparse

REPEATS = 4096
"""Number of calls that compiled code makes again, from which they are forgotten."""

LISTS_KEPT = 64
"""Number of lists whose tables are kept together."""

KINDS = {int, str}
"""Types of indices."""

LISTS = (list, tuple)

FORMS = 4
"""Number of forms of a parameter's gradient that are kept."""


class Refused(Exception):
    """The part of a call that is on the host does not fit."""


class Devices:
    """Function that enters a call like the front, for parameters on the host and on devices.

    Parameters
    ----------
    records : Records
        The records of the updater.
    owner : Owner
        The updater.

    Attributes
    ----------
    known : dict
        Parameters on devices, by what stands for their index.
    listed : dict
        Where the records of calls are, by their indices.
    repeats : dict
        Calls whose arrays stay where they are, by first index and length of the list, or -1.
    captured : list of DeviceCall
        Calls that are part of graphs, which may be replayed at any time.
    awaited : StepInfo
        Outcome of the last call whose norm the host does not know yet.
    checks : bool
        Whether the present call may make tables, which checks its arrays.
    adding : list of CudaTable
        What is launched before an update: sums of gradients of several calls.
    between : callable or None
        What updates weights on the host, before the launches.
    version : int
        Number of times that records were dropped.
    noted : tuple of int or None
        Ids of the weights of the last call, if compiled code has made it, and they are noted.
    """

    def __init__(self, records: RecordsLike, owner: Owner) -> None:
        self._records, self._owner = ref(records), ref(owner)
        self.front: Callable[..., int] = records.enter
        self.known: dict[int | str, Parameter] = {}
        self.captured: list[DeviceCall] = []
        self.awaited: StepInfo | None = None
        self.checks = False
        self.adding: list[CudaTable] = []
        self.listed: dict[tuple[Any, ...], Places] = {}
        self.repeats: dict[tuple[int | str, int], Repeat] = {}
        self.between: Callable[[], None] | None = None
        self.version = 0
        self.noted: tuple[int, ...] | None = None
        self._asked: tuple[DeviceCall | None, bool] = (None, False)
        made = device_front.functions()
        self._admit, self._advance = made["admit_call"], made["advance_call"]
        self._repeat = made["repeat_call"]

    @property
    def records(self) -> RecordsLike:
        """The records of the updater, which keep this object."""
        records = self._records()
        assert records is not None
        return records

    @property
    def optimizer(self) -> OptimizerLike:
        """The optimizer of the updater."""
        return self.records.parameters.optimizer

    def forget(self) -> None:
        """Drop all records, since something besides the arguments of calls has changed."""
        self.known, self.listed, self.repeats = {}, {}, {}
        self.version += 1
        self._asked = None, False

    def drop(self, key: int | str) -> None:
        """Drop the record of a parameter, and the calls with it."""
        if self.known.pop(key, None) is not None:
            self.version += 1
            self.listed = {k: places for k, places in self.listed.items() if key not in k}
            self.repeats = {}
            self._asked = None, False

    def enroll(self, of: Parameter, key: int | str, weight: Any) -> None:
        """Create the record of a parameter; its tables are created when they are needed."""
        records, optimizer, index = self.records, of.optimizer, of.index
        rule = of.rule if records.averages is None else records.averages.average.derive(of.rule)
        real = real_of(header(weight).dtype)
        block = np.zeros(w.RECORD + KEY + 1 + len(rule.hyper), np.int64)
        words, fields = block.data, block[w.RECORD + KEY + 1 :].view(real)[: len(rule.hyper)]
        words[w.ROW] = address_of(block) + 8 * w.RECORD
        words[w.FIELDS] = fields.ctypes.data
        words[w.KEYED] = 1
        words[w.NUMBER], words[w.SEED] = index_number(index), index_number(optimizer.seed)
        words[w.COUNT] = optimizer._index_update_count.slot(index, optimizer.begin_num_update)
        if optimizer.carried is not None:
            words[w.CARRIED] = int(optimizer.carried_slots([index])[0])
        shared = records.shared_by(of, Layout(rule, real, (real,), real, ()))
        words[w.HYPER], words[w.INDEX_ID] = shared.address, id(key)
        decay = DeferredDecay() if optimizer.sparse_decay != "touched" else None
        of.record = DeviceRecord(block, words, fields, shared, decay, {}, key)
        self.known[key] = of
        records.slots[key] = address_of(block)

    # Calls

    def __call__(self, context: int, index: Any, grad: Any, weight: Any) -> int:
        """Enter a call; return a status, see :mod:`fastopt._kernels.front`."""
        known, listed = self.known, type(index) in LISTS
        first = index[0] if listed and index else index
        if type(first) not in KINDS or not (listed or first in known):
            return self.front(context, index, grad, weight)
        repeat = self.repeats.get((first, len(index) if listed else -1))
        if repeat is not None and self._prepare(repeat):
            status = self._repeat(context, repeat.address, index, grad, weight)
            if status == w.STALE and repeat.call.steps is not None:
                repeat.call.steps.send(self._norm_numbers())
                status = self._repeat(context, repeat.address, index, grad, weight)
            if status == w.FAILED:
                repeat.raise_error()
            if status == w.OK and self.noted is not repeat.own_ids:
                self.noted = repeat.own_ids
                self.records.note(index, weight)
            if status == w.OK and repeat.measured:
                return self._await(repeat.call.steps)
            if status != w.REFUSED:
                return status
        if not listed:
            return self._enter((index,), (grad,), (weight,), -1)
        if not {*map(type, index)} <= KINDS:
            return self.front(context, index, grad, weight)
        indices = tuple(index)
        there = None if indices in self.listed else [key in known for key in indices]
        if there is not None and True not in there:
            return self.front(context, index, grad, weight)
        lists = type(grad) in LISTS and type(weight) in LISTS
        if not (lists and len(indices) == len(grad) == len(weight)):
            return w.REFUSED
        grads, weights = tuple(grad), tuple(weight)  # another thread may change the lists
        if there is not None and self.records.freezes:
            moving = self.records.moving(indices, grads, weights)
            indices, grads, weights = zip(*moving, strict=True)
            there = [key in known for key in indices]
        if there is None or all(there):
            return self._enter(indices, grads, weights)
        return self._enter_mixed(there, (indices, grads, weights))

    def _prepare(self, repeat: Repeat) -> bool:
        """Prepare for a call that is made again; return whether it is all that is done.

        It need not wait for earlier ones.
        """
        if self.adding or self.between is not None:
            return False
        records = self.records
        if not repeat.measured:
            counts = records.parameters.optimizer._index_update_count
            return not (counts.ahead or counts.graphs)
        steps = repeat.call.steps
        if records.mode.asks or self.checks or records.view[w.EACH] or steps is None:
            return False
        numbers = self._norm_numbers()
        steps.prepare(None)
        if repeat.version != records.version or steps.numbers != numbers:
            steps.send(numbers)
            repeat.version = records.version
        return True

    def _enter_mixed(self, there: Sequence[bool], lists: tuple[Any, Any, Any]) -> int:
        """Enter a list with some of the weights on the host.

        These are updated when those on devices have been counted, before these are launched.
        """
        records, words = self.records, self.records.view
        owner, places = self._owner(), range(len(there))
        assert owner is not None
        here = [tuple([items[k] for k in places if not there[k]]) for items in lists]
        others = [tuple([items[k] for k in places if there[k]]) for items in lists]
        if words[w.CHECKS]:
            status = records.with_room(w.NO_ROOM, (here[0], here[1], here[2]))
            return status if status < 0 else self._enter(others[0], others[1], others[2])
        if records.admits(*here) < 0:
            return w.REFUSED
        if words[w.MEASURE]:
            call = self._call(self._places(others[0]), *others)
            if call is None:
                return w.REFUSED
            sums = iter(call.squares().tolist())
            call.release()
            grads = zip(there, lists[1], strict=True)
            if not self._measured([next(sums) if on else squares([g])[0] for on, g in grads]):
                return w.SKIPPED
            words[w.MEASURE] = 0

        incomplete = records.incomplete

        def between() -> None:
            asked, by_tensor = words[w.ASKED], words[w.EACH]
            words[w.ASKED] = words[w.EACH] = 0
            records.incomplete = [
                flag for flag, on in zip(incomplete, there, strict=False) if not on
            ]
            status = self.front(records.context, *here)
            if status != w.OK:
                status = records.resolve(owner, status, *here)
            words[w.ASKED], words[w.EACH] = asked, by_tensor
            if status < 0:
                raise Refused

        self.between = between
        records.incomplete = [flag for flag, on in zip(incomplete, there, strict=False) if on]
        try:
            status = self._enter(others[0], others[1], others[2])
            return records.resolve(owner, status, *others)
        except Refused:
            return w.REFUSED
        finally:
            self.between, records.incomplete = None, incomplete  # the next plan reads all flags

    def _enter(
        self,
        indices: tuple[Any, ...],
        grads: tuple[Any, ...],
        weights: tuple[Any, ...],
        length: int | None = None,
    ) -> int:
        """Enter a call whose weights are all on devices.

        `length` is that of the list, -1 without one. Default: that of `indices`.
        """
        records, places = self.records, self._places(indices)
        key = indices[0], length or len(indices)
        words, counts = records.view, self.optimizer._index_update_count
        if records.mode.asks and (counts.ahead or counts.graphs):
            counts.settle()
        version = self.version  # a property of an array may run code that drops records
        status = self._admit(records.context, places.address, len(indices), places.found)
        measure, checks = words[w.MEASURE], words[w.CHECKS]
        if status not in (w.OK, w.ASKS) or (status == w.ASKS and not (checks or measure)):
            return status
        call, measured = self._asked if words[w.ASKED] else (None, False)
        self._asked = None, False
        if call is None or call.keys != indices:
            call, measured = self._call(places, indices, grads, weights), False
        elif call.rests != (self._rests(places) or call.rests):  # known only since it was asked
            call = self._call(places, indices, grads, weights)
        if call is None:
            return w.REFUSED
        if checks:
            call.release()
            return w.OK
        if measure and not measured:
            defers = call.defers and not (self.between or words[w.EACH])
            defers = defers and records.mode.folds and not self.checks
            if defers and status == w.ASKS:  # the device needs the rates before it knows the norm
                self._asked = call, False
                return status
            if defers:
                with self._recorded(call, grads, weights) as launches:
                    deferred = self._defer(call, version)
                if deferred:
                    self._keep(call, places, key, (grads, weights), launches, measured=True)
                    return self._end(call, weights, w.AWAITED)
            if not self._measured(call.squares().tolist()):
                call.release()
                return w.SKIPPED
        if status == w.ASKS:  # of a step that is not skipped
            self._asked = call, True
            return status
        factor = records.norm.item(w.FACTOR)
        if factor != 1 and not records.mode.folds:
            of = [self.known[index].optimizer for index in indices]
            pairs = zip(of, grads, strict=True)
            grads = tuple([grad if of.folds else times(grad, factor) for of, grad in pairs])
            call = self._call(places, indices, grads, weights)
            if call is None:
                return w.REFUSED
        # What a graph repeats counts on the device, and so do steps between its replays.
        repeats = call.captured or (call.steps is not None and call.steps.kept)
        repeats = repeats and factor == 1 and not (self.between or words[w.EACH])
        if not (repeats and call.defer()):
            if call.captured:
                call.tables[0].inputs.refuse_capture()
            with self._recorded(call, grads, weights) as launches:
                if not self._step(call, version):
                    return w.REFUSED
            self._keep(call, places, key, (grads, weights), launches)
        return self._end(call, weights, w.OK)

    def _recorded(self, call: DeviceCall, grads: Any, weights: Any) -> Any:
        """Return a context in which launches are noted, if the call may be one that is kept."""
        alone = not self.adding and self.between is None
        if alone and readable() and call.may_repeat(grads, weights):  # else not even lists are read
            return call.tables[0].driver.recorded()
        return nullcontext()

    def _keep(
        self,
        call: DeviceCall,
        places: Places,
        key: tuple[int | str, int],
        arrays: tuple[Any, Any],
        launches: Sequence[Any] | None,
        measured: bool = False,
    ) -> None:
        """Keep a call whose arrays stay where they are, so that compiled code makes it again."""
        if not launches or (reads := call.passes(*arrays)) is None:
            return
        kept, (grads, weights) = self.repeats.get(key), arrays
        others: list[Repeat] = []
        if kept is not None and kept.call is call and kept.measured == measured:
            others = [repeat for repeat in (kept, *kept.others) if not repeat.dead]
            others = [repeat for repeat in others if repeat.own_ids is call.own_ids]
        elif kept is not None and kept.call.rests != call.rests and kept.refused is not call:
            kept.refused = call  # steps that average may come in turns with others
            return
        ids = () if reads else tuple(map(id, grads))
        if ids in [repeat.ids for repeat in others] or not all(map(stays, (*grads, *weights))):
            return
        if any(table.table[:, DONE].any() for table in call.tables):  # some are only counted
            return
        if reads and not compiled_can_read(grads):
            return
        if len(self.repeats) >= REPEATS and key[1] >= 0:
            self.repeats.clear()
        made = Repeat(call, launches, places, key[1] >= 0, measured, grads, weights, reads)
        first, *others = sorted([made, *others], key=lambda repeat: repeat.reads)
        self.repeats[key] = first
        first.follow(others[: sets_of(call.length) - 1])

    def _end(self, call: DeviceCall, weights: tuple[Any, ...], status: int) -> int:
        """End a call that has been launched; return its status.

        Its hyper-parameters serve no other call.
        """
        words = self.records.view
        words[w.DONE], words[w.ASKED], words[w.EACH], words[w.EXPECTED] = 1, 0, 0, 0
        if call.captured and call not in self.captured:
            self.captured.append(call)
        self.noted = None
        if status == w.AWAITED:
            self.records.note(call.indices, weights)
        return max(status, w.MOVED)

    def _step(self, call: DeviceCall, version: int) -> bool:
        """Count a step and launch it; if that fails, nothing has changed.

        Returns False if a property or a handler has dropped records since they were of `version`.
        """
        records, counts, launched = self.records, self.optimizer._index_update_count, False
        with uninterrupted:
            if self.version != version:
                return False
            if counts.ahead or counts.graphs:
                counts.settle()
            kept = [of.carried for of in call.optimizers if of.carried is not None]
            before = [(array, array.copy()) for array in (table.array for table in kept)]
            count = counts.counted.copy()
            steps = np.zeros_like(count)
            try:
                skipped = self._advance(records.context, address_of(call.targets), call.length)
                steps = counts.counted - count
                call.launch(skipped > 0, self.adding, self.between)
                launched = True
            except BaseException:
                if not launched:
                    counts.counted[1:] -= steps[1:]  # the host may have counted its part
                    counts.counted[0] = count[0]
                    for array, numbers in before:
                        array[:] = numbers
                    call.release()
                raise
        return True

    # Norms

    def _measured(self, sums: Sequence[float]) -> bool:
        """Enter the factor of gradients, given their sums of squares; return whether it is finite.

        The sums are added in the order of the list.
        """
        norm = self.records.norm
        values = [*norm[[w.RESCALE_GRAD, w.SCALE, w.LIMIT]].tolist(), 0.0, 0.0]
        limit_norm(reduce(add, sums, 0.0), values)
        norm[w.FACTOR], norm[w.GLOBAL_NORM] = values[FACTOR] * norm[w.SHARE], values[LENGTH]
        return math.isfinite(values[LENGTH])

    def _norm_numbers(self) -> Norm:
        """Return what a device needs to clip or unscale gradients."""
        norm = self.records.norm.data
        return norm[w.RESCALE_GRAD], norm[w.SCALE], norm[w.LIMIT], norm[w.SHARE]

    def _defer(self, call: DeviceCall, version: int) -> bool:
        """Update without waiting for the norm, whose outcome is reported later.

        Returns False, with nothing changed, if the host must know the norm first.
        """
        owner = self._owner()
        assert owner is not None
        outcome = Outcome(self._owner, owner.settings.loss_scaler, self.optimizer.idx2name)
        with uninterrupted:
            if self.version != version or not call.defer(self._norm_numbers(), outcome):
                return False
        self._await(call.steps)
        return True

    def _await(self, steps: DeviceSteps | None) -> int:
        """Follow a step whose outcome comes later; return its status."""
        assert steps is not None
        steps.follow()
        outcome = steps.outcome
        assert outcome is not None
        self.awaited = outcome.awaited
        if (scaler := outcome.scaler) is not None:
            scaler._awaited = partial(settle, self.optimizer)
        return w.AWAITED

    def check_scaler(self, index: Any) -> None:
        """Raise RuntimeError if a call with a loss scaler would become part of a graph.

        It is called before the scale is read, which waits for earlier steps.
        """
        keys = tuple(index) if type(index) in LISTS else (index,)
        places = self.listed.get(keys) if {*map(type, keys)} <= KINDS else None
        for call in places.calls.values() if places is not None else ():
            arrays = call.tables[0].inputs
            if arrays.driver.is_captured(arrays.stream):
                raise RuntimeError(
                    "a loss scaler adapts its scale on the host, which a CUDA graph does not "
                    "reach: call the updater outside of the capture, or scale by a fixed "
                    "rescale_grad"
                )

    def refresh_graphs(self, updater: Owner) -> None:
        """Let graphs use the present hyper-parameters in their next replays."""
        records = self.records
        if records.version != self.optimizer.version:
            records.refresh(updater)
        for call in self.captured:
            for key, of in zip(call.keys, call.parameters, strict=True):
                if key not in self.known:  # settings have changed since
                    self.enroll(of, key, of.weight)
            counts = self.optimizer._index_update_count
            counts.settle()
            largest, places = counts.counted.item(0), self._places(call.keys)
            call.hypers = places.hypers
            arguments = places.address, len(call.indices), places.found
            try:
                if self._admit(records.context, *arguments) == w.ASKS:
                    records.fill(updater, call.indices, {})
            finally:
                counts.counted[0] = largest
            if call.steps is not None:
                call.steps.refresh()

    # Tables

    def _places(self, indices: tuple[Any, ...]) -> Places:
        """Return where the records of a call are."""
        found = self.listed.get(indices)
        if found is None:
            if len(indices) > 1 and len(self.listed) >= LISTS_KEPT:
                lists = [key for key in self.listed if len(key) > 1]
                if len(lists) >= LISTS_KEPT:
                    del self.listed[lists[0]]
            records = [self.known[index].record for index in indices]
            places = np.array([r.address for r in records if type(r) is DeviceRecord])
            hypers, rests = memory = np.zeros((2, len(indices)), np.int64)
            found = Places(places, hypers, rests, address_of(places), address_of(memory), {})
            self.listed[indices] = found
        return found

    def _rests(self, places: Places) -> tuple[int, ...]:
        """Return whether the step does not average each weight; nothing if no step differs."""
        averages = self.records.averages
        alternates = averages is not None and averages.average.alternates
        return tuple(places.rests.tolist()) if alternates else ()

    def _call(
        self,
        places: Places,
        indices: tuple[Any, ...],
        grads: tuple[Any, ...],
        weights: tuple[Any, ...],
    ) -> DeviceCall | None:
        """Return the call of these parameters with its arrays entered, None if they do not fit."""
        rests = self._rests(places)
        call = places.calls.get(rests)
        if call is not None and call.enter(grads, weights):
            return call
        call, kept = self._assembled(indices, grads, weights, rests)
        if call is not None:
            call.hypers = places.hypers
            if kept:
                places.calls[rests] = call
        return call

    def _assembled(
        self,
        indices: tuple[Any, ...],
        grads: tuple[Any, ...],
        weights: tuple[Any, ...],
        rests: tuple[int, ...],
    ) -> tuple[DeviceCall | None, bool]:
        """Return a new call with its arrays entered, and whether it serves later calls."""
        parameters = [self.known[index] for index in indices]
        rest = rests or (0,) * len(indices)
        lists = list(zip(parameters, grads, weights, rest, strict=True))
        once = len(set(indices)) == len(indices)
        tables, kept = list[CudaTable](), once
        for item in lists:
            table, again = self._known_table(*item) if once else None, True
            if table is None:
                if not self.checks:
                    return None, False
                table, again = self._new_table(*item)
            tables.append(table)
            kept = kept and again
        call = DeviceCall(parameters, tables, ordered=not once)
        if not (once and call.apart()):
            if not self.checks:
                return None, False
            tables, kept = [self._new_table(*item, keep=False)[0] for item in lists], False
            call = DeviceCall(parameters, tables, ordered=True)
        call.rests, call.keys = rest, indices
        return call, kept

    def _known_table(self, of: Parameter, grad: Any, weight: Any, rests: int) -> CudaTable | None:
        """Return the table of a form with its arrays entered; None if there is none, or none fits.

        Whether the arrays overlap those of other tables is not checked.
        """
        record = of.record
        assert isinstance(record, DeviceRecord)
        try:
            table = record.tables.get(form_of(of.by_row(grad), rests))
        except UNREADABLE:  # the checks report it
            return None
        fits = table is not None and DeviceCall([of], [table]).enter([grad], [weight])
        return table if fits else None

    def _new_table(
        self, of: Parameter, grad: Any, weight: Any, rests: int, keep: bool = True
    ) -> tuple[CudaTable, bool]:
        """Check the arrays of a tensor; return their table, and whether it serves later calls.

        With `keep`, it does so if no array had to be copied.
        """
        owner, averages, record = self._owner(), self.records.averages, of.record
        assert owner is not None
        assert isinstance(record, DeviceRecord)
        state = owner.states.get(of.index)
        if rests and averages is not None and of.index in averages.arrays:
            averages = None
        table: CudaTable = table_of_parameter(
            of, self.records.parameters.check, weight, grad, state, averages
        )
        keep = keep and table.direct and table.after is None and is_fixed(state)
        if keep:
            if len(record.tables) >= FORMS:
                record.tables.clear()
            checked = self.records.parameters.check(of.context, weight, grad, of.copy)
            record.tables[form_of(of.by_row(checked), rests)] = table
        return table, keep


def form_of(grad: Any, rests: int) -> Any:
    """Return what the table of a gradient depends on."""
    if isinstance(grad, RowSparse):
        return RowSparse, kind_of(header(grad.values).dtype), rests
    return readings([grad]).kinds[0], rests


def settle(optimizer: OptimizerLike) -> None:
    """Wait for the outcomes of steps that a device has counted."""
    counts = optimizer._index_update_count
    if counts.ahead:
        with optimizer.call_lock:
            counts.settle()
