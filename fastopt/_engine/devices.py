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
from itertools import compress
from operator import add
from typing import Any
from weakref import ref

import numpy as np

from fastopt._engine.clip import squares, times
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.device_call import DeviceCall, Places, Repeat, sets_of
from fastopt._engine.device_steps import DeviceSteps, Norm
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

    def drop(self, key: int | str) -> None:
        """Drop the record of a parameter, and the calls with it."""
        if self.known.pop(key, None) is not None:
            self.version += 1
            self.listed = {k: places for k, places in self.listed.items() if key not in k}
            self.repeats = {}

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
        steps.prepare()
        if repeat.version != records.version or steps.numbers != numbers:
            steps.send(numbers)
            repeat.version = records.version
        return True

    def _enter_mixed(self, there: Sequence[bool], lists: tuple[Any, Any, Any]) -> int:
        """Enter a list with some of the weights on the host.

        These are updated when those on devices have been counted, before these are launched.
        """
        records, words, owner = self.records, self.records.view, self._owner()
        assert owner is not None
        sides = [not on for on in there], there
        parts: Any = [[tuple(compress(items, side)) for items in lists] for side in sides]
        here, others = parts
        if words[w.CHECKS]:
            status = self._enter(*others)
            return status if status < 0 else records.admits(*here)
        if records.admits(*here) < 0:
            return w.REFUSED
        if words[w.MEASURE]:
            call = self._call(self._places(others[0]), *others[1:])
            if call is None:
                return w.REFUSED
            sums = iter(call.squares().tolist())
            call.release()
            tensors = zip(there, zip(*lists, strict=True), strict=True)
            if not self._measured(
                [next(sums) if on else squares([records.checked(*of)])[0] for on, of in tensors]
            ):
                return w.SKIPPED
            words[w.MEASURE] = 0
        incomplete = records.incomplete
        flags = [list(compress(incomplete, side)) for side in sides]

        def between() -> None:
            words[w.ASKED] = words[w.EACH] = 0  # they are those of the others
            records.incomplete = flags[0]
            status = self.front(records.context, *here)
            if records.resolve(owner, status, *here) < 0:
                raise Refused

        self.between, records.incomplete = between, flags[1]
        try:
            return records.resolve(owner, self._enter(*others), *others)
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
        status = self._admit(records.context, places.address, len(indices), places.output)
        if status != w.OK and not (status == w.ASKS and words[w.CHECKS]):
            return status
        call = self._call(places, grads, weights)
        if call is None:
            return w.REFUSED
        if words[w.CHECKS]:
            call.release()
            return w.OK
        if words[w.MEASURE]:
            defers = call.defers and records.mode.folds
            if defers and not (self.between or words[w.EACH] or self.checks):
                with self._recorded(call, grads, weights) as launches, uninterrupted:
                    same = self.version == version
                    deferred = same and call.defer(self._owner, self._norm_numbers())
                if deferred:  # the outcome is reported later
                    self._await(call.steps)
                    self._keep(call, key, (grads, weights), launches, measured=True)
                    return self._end(call, weights, w.AWAITED)
            if not self._measured(call.squares().tolist()):
                call.release()
                return w.SKIPPED
        factor = records.norm.item(w.FACTOR)
        if factor != 1 and not records.mode.folds:
            of = [self.known[index].optimizer for index in indices]
            pairs = zip(of, grads, strict=True)
            grads = tuple([grad if of.folds else times(grad, factor) for of, grad in pairs])
            call = self._call(places, grads, weights)
            if call is None:
                return w.REFUSED
        # What a graph repeats counts on the device, and so do steps between its replays.
        repeats = call.captured or (call.steps is not None and call.steps.kept)
        repeats = repeats and factor == 1 and not (self.between or words[w.EACH])
        if not (repeats and call.defer(self._owner)):
            if call.captured:
                call.tables[0].inputs.refuse_capture()
            with self._recorded(call, grads, weights) as launches:
                if not self._step(call, version):
                    return w.REFUSED
            self._keep(call, key, (grads, weights), launches)
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
        is_known = ids in [repeat.ids for repeat in others]
        moves = not all(map(stays, (*grads, *weights))) or (reads and not compiled_can_read(grads))
        skips = any(table.table[:, DONE].any() for table in call.tables)  # some are only counted
        if is_known or moves or skips:
            return
        if len(self.repeats) >= REPEATS and key[1] >= 0:
            self.repeats.clear()
        made = Repeat(call, launches, key[1] >= 0, measured, grads, weights, reads)
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
        counts = self.optimizer._index_update_count
        with uninterrupted:
            if self.version != version:
                return False
            if counts.ahead or counts.graphs:
                counts.settle()
            carried = [of.carried.array for of in call.optimizers if of.carried is not None]
            before = [(array, array.copy()) for array in carried]
            count = counts.counted.copy()
            skipped = self._advance(self.records.context, address_of(call.targets), call.length)
            steps = counts.counted - count
            try:
                call.launch(skipped > 0, self.adding, self.between)
            except BaseException:
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

    def _await(self, steps: DeviceSteps | None) -> int:
        """Follow a step whose outcome comes later; return its status."""
        assert steps is not None
        steps.follow()
        self.awaited = steps.awaited
        if (scaler := steps.scaler()) is not None:
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
            keys = call.where.indices
            for key, of in zip(keys, call.parameters, strict=True):
                if key not in self.known:  # settings have changed since
                    self.enroll(of, key, of.weight)
            counts = self.optimizer._index_update_count
            counts.settle()
            largest = counts.counted.item(0)
            call.where = self._places(keys)._replace(calls={})
            arguments = call.where.address, call.length, call.where.output
            try:
                if self._admit(records.context, *arguments) == w.ASKS:
                    records.fill(updater, call.indices, {})
            finally:
                counts.counted[0] = largest
            if (counted := call.steps) is not None:
                counted.prepare()
                counted.send(counted.numbers)

    # Tables

    def _places(self, indices: tuple[Any, ...]) -> Places:
        """Return where the records of a call are."""
        where = self.listed.get(indices)
        if where is None:
            if len(indices) > 1 and len(self.listed) >= LISTS_KEPT:
                lists = [key for key in self.listed if len(key) > 1]
                if len(lists) >= LISTS_KEPT:
                    del self.listed[lists[0]]
            places = np.array([self.records.slots[index] for index in indices])
            hypers, rests = memory = np.zeros((2, len(indices)), np.int64)
            where = Places(
                indices, places, hypers, rests, address_of(places), address_of(memory), {}
            )
            self.listed[indices] = where
        return where

    def _call(
        self, places: Places, grads: Sequence[Any], weights: Sequence[Any]
    ) -> DeviceCall | None:
        """Return the call of these parameters with its arrays entered, None if they do not fit."""
        key, indices = places.rests.tobytes(), places.indices
        call = places.calls.get(key)
        if call is not None and call.enter(grads, weights):
            return call
        once, rests = len(set(indices)) == len(indices), places.rests.tolist()
        parameters = [self.known[index] for index in indices]
        items = list(zip(parameters, grads, weights, rests, strict=True))
        tables = [self._known_table(*item) if once else None for item in items]
        if None in tables and not self.checks:
            return None
        made = [table or self._new_table(*item) for table, item in zip(tables, items, strict=True)]
        # Without the calls, as a cycle would keep the memory of an updater that is gone.
        where = places._replace(calls={})
        call, apart = DeviceCall(where, rests, parameters, made, ordered=not once), once
        fresh = {*made} - {*tables}
        if once and not (call.enter(grads, weights, fresh) and call.apart()):
            if not self.checks:
                return None
            made, apart = [self._new_table(*item) for item in items], False
            call = DeviceCall(where, rests, parameters, made, ordered=True)
        for table in call.tables:
            if len(table.parts) > 1:  # joined for this call, which a graph cannot repeat yet
                table.inputs.refuse_capture()
        if apart and all(table.kept for table in made):
            places.calls[key] = call
        return call

    def _known_table(self, of: Parameter, grad: Any, weight: Any, rests: int) -> CudaTable | None:
        """Return the table of a form, whatever arrays it has; None if there is none."""
        record = of.record
        assert isinstance(record, DeviceRecord)
        try:
            table = record.tables.get(form_of(of.indexed(grad), rests))
            if table is not None:  # those on one stream are joined
                (table.inputs.stream,) = readings([weight]).streams
        except UNREADABLE:  # the checks report it
            return None
        return table

    def _new_table(self, of: Parameter, grad: Any, weight: Any, rests: int) -> CudaTable:
        """Check the arrays of a tensor; return their table.

        It serves later calls if no array had to be copied.
        """
        owner, averages, record = self._owner(), self.records.averages, of.record
        assert owner is not None
        assert isinstance(record, DeviceRecord)
        state = owner.states.get(of.index)
        if rests and averages is not None and of.index in averages.arrays:
            averages = None
        grad = of.indexed(self.records.parameters.check(of.context, weight, grad, of.copy))
        table = table_of_parameter(of, weight, grad, state, averages)
        table.kept = table.direct and table.after is None and is_fixed(state)
        if table.kept:
            if len(record.tables) >= FORMS:
                record.tables.clear()
            record.tables[form_of(grad, rests)] = table
        return table


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
