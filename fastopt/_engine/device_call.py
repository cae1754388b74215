"""A call whose arrays are on CUDA devices: its arrays are entered, counted and launched.

:func:`again` makes those of an updater whose parameters have records, all of them or, in a list,
those on devices; with the settings of the updater.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.clip import STEPPED, UNCHANGED, overflow, scale_of
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.device_hyper import Counting
from fastopt._engine.device_steps import DeviceSteps, Finish, Norm
from fastopt._engine.overlap import Ranges
from fastopt._engine.parameters import Parameters, compiling
from fastopt._engine.per_index import Index
from fastopt._engine.validate import check
from fastopt._interrupts import uninterrupted
from fastopt._kernels.cuda_table import CudaTable, launch
from fastopt._kernels.devices import header
from fastopt._kernels.record_words import OK
from fastopt.amp import StepInfo
from fastopt.sparse import RowSparse

Part = tuple[Any, Sequence[int], Sequence[tuple[CudaTable, Sequence[int]]]]
"""An optimizer, the positions of its tensors in a call, their tables with positions in these."""


class DeviceCall:
    """The tensors of a call, in tables whose addresses each call enters.

    Parameters
    ----------
    parameters : Parameters
        The parameters of the updater.
    indices, states : sequence
        Indices of the call, and the states of the tensors.
    parts : sequence of Part
        The tables of each optimizer, in the order of the launches.
    single : bool
        Whether the call passes one index instead of lists.
    averaging : AveragingStep, optional
        Weight averaging of the step.
    again : bool
        Whether the tables may serve later calls.

    Attributes
    ----------
    parts : list of Counting
        Counts and hyper-parameters, by optimizer.
    tables : list of CudaTable
        The tables of all optimizers, in the order of the launches.
    records : dict
        New records of parameters, which are kept once the call has succeeded.
    """

    def __init__(
        self,
        parameters: Parameters,
        indices: Sequence[Index],
        states: Sequence[Any],
        parts: Sequence[Part],
        single: bool,
        averaging: Any = None,
        again: bool = True,
    ) -> None:
        self.indices, self.single, self.averaging = list(indices), single, averaging
        self.length = len(indices)
        self.parameters = parameters
        self.counted = parameters.optimizer._index_update_count
        self.again = again
        self.records: dict[Index, Any] = {}
        self.parts, self.tables = [], list[CudaTable]()
        places: list[list[int]] = []
        for of, own, tables in parts:
            listed = [indices[k] for k in own], [states[k] for k in own]
            self.parts.append(Counting(of, *listed, tables, averaging))
            for table, within in tables:
                self.tables.append(table)
                places.append([own[k] for k in within])
        self.places = places
        everything = list(range(len(indices)))
        self.takes = [
            (table, None if own == everything else _taking(own), own[0])
            for table, own in zip(self.tables, places, strict=True)
        ]
        for table in self.tables:
            table.given.refuse_capture()
        self.follow()
        self.steps: DeviceSteps | None = None
        self.defers = DeviceSteps.supports(self)
        self.capturable = self.defers and not any(table.alone for table in self.tables)

    @property
    def done(self) -> bool:
        """Whether the step has updated; whoever reads it sets it to False before the step."""
        return all(table.done for table in self.tables)

    @done.setter
    def done(self, value: bool) -> None:
        for table in self.tables:
            table.done = value

    @property
    def captured(self) -> bool:
        """Whether the present step becomes part of a graph."""
        return self.defers and self.tables[0].given.captured

    @property
    def settled(self) -> bool:
        """Whether no step computes hyper-parameters in Python."""
        return all(part.settled for part in self.parts)

    @property
    def filled(self) -> bool:
        """Whether no optimizer has changed since its hyper-parameters were computed."""
        return all(part.filled[:1] == (part.optimizer.version,) for part in self.parts)

    # The arrays of a call

    def follow(self) -> bool:
        """Note the memory that is written to; return whether no two arrays share some."""
        versions = [table.given.version for table in self.tables]
        first, last = _joined([table.written() for table in self.tables])
        order = np.argsort(first)
        self.written = np.stack([first[order], last[order]])
        apart = bool((self.written[1, :-1] <= self.written[0, 1:]).all())
        self.versions = versions if apart else []  # last, as Ctrl-C may come before
        return apart

    def enter(self, grad: Any, weight: Any) -> bool:
        """Enter the arrays of a call into the tables; return whether they fit.

        If not, only caches have changed.
        """
        if self.single:
            grad, weight = (grad,), (weight,)
        elif not (_is_list(grad) and _is_list(weight) and len(grad) == len(weight) == self.length):
            return False
        if self._take_weights(weight) and self._take_grads(grad, weight):
            return True
        self.release()
        return False

    def _take_weights(self, weights: Sequence[Any]) -> bool:
        for table, take, _ in self.takes:
            own = weights if take is None else take(weights)
            if not table.given.take_weights(own, table.table):
                return False
        return [table.given.version for table in self.tables] == self.versions or self.follow()

    def _take_grads(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        for table, take, place in self.takes:
            own = grads if take is None else take(grads)
            if not table.given.take_grads(own, table.table, self.written, self.capturable):
                return False
            if table.rows is not None and not self._list_rows(table, place, own[0], weights[place]):
                return False
        return True

    def _list_rows(self, table: CudaTable, place: int, grad: Any, weight: Any) -> bool:
        """Enter the row-sparse gradient of a tensor; return False if it needs another kernel."""
        of = self.parameters.of(self.indices[place])
        if type(grad) is not RowSparse or grad.shape != header(weight).shape:
            try:
                grad = check(of.context, weight, grad, of.copy)
            except TypeError:  # another array library, or an error that the full checks report
                return False
            grad = of.by_row(grad)
        if not (isinstance(grad, RowSparse) and table.serves(grad)):
            return False
        table.list_rows(of.context, grad)
        first, last = table.read()
        return not Ranges(*self.written).meeting(first, last)

    def release(self) -> None:
        """Release the gradients, for a call that ends without a launch."""
        for table in self.tables:
            table.release()

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; non-finite elements propagate."""
        totals = np.zeros(len(self.indices))
        for table, places in zip(self.tables, self.places, strict=True):
            totals[places] = table.squares()
        return totals

    # One step

    def step(self, factor: float = 1.0, between: Callable[[], None] | None = None) -> None:
        """Update with gradients times `factor`, after :meth:`enter`.

        `between` is called when the step has been counted, before it is launched. If it raises an
        error, nothing has changed.
        """
        captured, table = self.captured, self.tables[0]
        there = captured or (self.steps is not None and self.steps.kept)  # in a graph, or beside
        if there and factor == 1 and between is None and self.deferred():
            return
        if captured:
            table.driver.refuse_capture(table.stream)
        with uninterrupted:
            self._step(factor, between)

    def count(self) -> list[CudaTable]:
        """Count a step; return the tables that the caller launches."""
        for part in self.parts:
            part.find_slots()
            part.begin()
        return [table for part in self.parts if not part.skips for table in part.tables]

    def deferred(self, norm: Norm | None = None, finish: Finish | None = None) -> bool:
        """Launch a step whose norm stays on the device; see :meth:`DeviceSteps.step`.

        Returns False, with nothing changed, if the host must know the norm first.
        """
        if not self.defers:
            return False
        if self.steps is None:
            self.steps = DeviceSteps(self)
        return self.steps.step(norm, finish)

    def _step(self, factor: float, between: Callable[[], None] | None) -> None:
        counts = self.counted
        if counts.ahead or counts.graphs:
            counts.settle()
        self.done, largest = False, counts.counted.item(0)
        before: list[Any] = []
        sums: list[Any] = []
        try:
            for part in self.parts:
                if part.sums is not None:
                    sums.append((part, part.begin_sums(self.indices)))
            if any(part.version != part.optimizer.version for part in self.parts):
                for part in (*self.parts, *self.parts):  # a new index moves the counts of all
                    part.find_slots()
            before.extend([part.before() for part in self.parts])
            for part in self.parts:
                part.begin(factor if part.folds else 1.0)
            self._launch(between)
        except BaseException:
            if not self.done:
                self._roll_back(before, sums, largest)
            raise
        finally:
            if self.done:
                self._finish(sums)

    def _finish(self, sums: Sequence[Any]) -> None:
        """Do what follows a step that has been launched."""
        for part in self.parts:
            if part.new:
                part.new = []
        for part, _ in sums:
            part.collect_sums()

    def _launch(self, between: Callable[[], None] | None) -> None:
        """Launch the tables of all parts whose step is not only counted."""
        tables, explained = self.tables, partial(compiling, self.parts[0].optimizer)
        if any(part.skips for part in self.parts):
            tables = [table for part in self.parts if not part.skips for table in part.tables]
            for table in self.tables if not tables else ():
                table.release()
        if between is not None:
            with explained(self.indices[0]):
                for table in tables:
                    table.compile()
            between()
        try:
            launch(tables)
        except Exception:
            with explained(self.indices[0]):
                raise
        self.done = True

    def _roll_back(self, before: Sequence[Any], sums: Sequence[Any], largest: int) -> None:
        """Undo a step that has not been launched."""
        for part, own in reversed(list(zip(self.parts, before, strict=False))):
            part.roll_back(own)
        self.counted.largest = largest
        for part in self.parts:
            part.forget_new()
        for part, own in reversed(sums):
            part.optimizer.step_sums.put_back(own)
        self.release()


def _is_list(values: Any) -> bool:
    return type(values) is list or type(values) is tuple


def _taking(places: Sequence[int]) -> Any:
    """Return a function that selects the items of a list at `places`, as a tuple or list."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


def _joined(ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the start and end addresses of the ranges of several tables."""
    if len(ranges) == 1:
        return ranges[0]
    first, last = zip(*ranges, strict=True)
    return np.concatenate(first), np.concatenate(last)


def disjoint(tables: Sequence[CudaTable]) -> bool:
    """Whether no tensor writes to memory that it or another one reads, or another one writes."""
    written = Ranges(*_joined([table.written() for table in tables]))
    if written.overlapping():
        return False
    return not written.meeting(*_joined([table.read() for table in tables]))


# Calls of an updater whose parameters have records


def again(updater: Any, index: Any, grad: Any, weight: Any) -> bool:
    """Update parameters that have records; if the result is False, nothing has changed.

    The caller holds the lock of the optimizer.
    """
    devices, optimizer = updater.devices, updater.optimizer
    if optimizer.updating.locked() or updater.settings.clip_adaptive is not None:
        return False
    if type(grad) is list and type(weight) is list:
        grad, weight = tuple(grad), tuple(weight)  # another thread may change the lists
    with optimizer.updating:
        if updater.settings.measures:
            devices.follow()
            with uninterrupted:
                return devices.folds and _measured_again(updater, index, grad, weight)
        call = devices.call_of(index, grad, weight)
        if call is None:
            if not _mixed_again(updater, index, grad, weight):
                return False
        else:
            updater._check_names(call.indices)
            call.step()
            devices.note(call, (weight,) if call.single else weight)
        info = STEPPED._replace(stepped=False) if updater.parameters.skips else STEPPED
        if updater._info is not info:
            updater._info = info
    return True


class Refused(Exception):
    """The part of a call that is on the host does not fit."""


def _mixed_again(updater: Any, *arguments: Any) -> bool:
    """Like :func:`again`, for lists with some of the parameters on the host, without a measure."""
    devices, records, index = updater.devices, updater.records, arguments[0]
    if not records.quick or records.live or records.version != updater.optimizer.version:
        return False
    if not all(type(each) in (list, tuple) and len(each) == len(index) for each in arguments):
        return False
    if not {*map(type, index)} <= {int, str}:
        return False
    there = [k for k, each in enumerate(index) if each in devices.known]
    here = [k for k, each in enumerate(index) if each not in devices.known]
    if not (there and here):
        return False
    own = [tuple(each[k] for k in here) for each in arguments]
    others = [tuple(each[k] for k in there) for each in arguments]
    call = devices.call_of(*others) if records.admits(*own) >= 0 else None
    if call is None:
        return False

    def between() -> None:
        status = records.enter(records.context, *own)
        if status != OK:
            status = records.resolve(updater, status, *own)
        if status < 0:
            raise Refused

    try:
        call.step(between=between)
    except Refused:
        return False
    devices.note(call, others[2])
    return True


def _measured_again(updater: Any, index: Any, grad: Any, weight: Any) -> bool:
    """Like :func:`again`, with gradients that are measured or accumulated."""
    devices, windows = updater.devices, updater._windows
    listed = type(index) in (list, tuple)
    indices = index if listed else [index]
    adding, phase, target = None, 0, grad
    if windows is not None:
        if not {*map(type, indices)} <= {int, str}:
            return False
        phase, sums = windows.phase(indices), [windows.sums.get(each) for each in indices]
        if phase < 0:
            return False
        target = sums if listed else sums[0]
        adding = windows.adders[phase > 0].devices.call_of(index, grad, target)
        if adding is None:
            return False
    call = devices.call_of(index, target, weight)
    if call is None:
        return False
    updater._check_names(call.indices)
    if adding is None:
        _step(updater, call)
    else:
        _add_and_step(updater, adding, call, phase)
    devices.note(call, weight if listed else (weight,))
    return True


def _add_and_step(updater: Any, adding: DeviceCall, call: DeviceCall, phase: int) -> None:
    """Add gradients to their sums; when these are complete, update."""
    windows, indices = updater._windows, call.indices
    finish = partial(windows.finish, indices, windows.after(indices))
    last, share = phase + 1 == windows.every, 1 / windows.every
    steady = call.filled and call.settled
    before = {} if steady or not last else windows.before(indices)
    adding.done = call.done = False
    try:
        adding.step()
        if last:
            _step(updater, call, share)
        finish()
    except BaseException:
        if last and steady and adding.done and not call.done:
            _step(updater, call, share)  # no sum was copied: complete the call
        if call.done or (adding.done and not last):
            finish()
        else:
            windows.put_back(before)
        raise
    if not last:
        call.release()
        updater._info = UNCHANGED


def _step(updater: Any, call: DeviceCall, share: float = 1.0) -> None:
    """Update with the arrays that have been entered, and gradients times `share`."""
    if _deferred(updater, call, share):
        return
    sums = lambda down: call.squares()  # noqa: E731
    info, factor = updater.settings.measured(updater.optimizer, call.indices, sums, share)
    if info.stepped:
        call.step(factor * share)
    else:
        call.release()
    updater._report(info)


def _deferred(updater: Any, call: DeviceCall, share: float) -> bool:
    """Update without waiting for the norm, whose outcome is reported later.

    Returns False, with nothing changed, if the host must know the norm first.
    """
    settings, optimizer = updater.settings, updater.optimizer
    scaler, limit = settings.loss_scaler, settings.clip_global_norm
    if scaler is None and limit is None:
        return False
    if scaler is not None and call.captured:
        raise RuntimeError(
            "a loss scaler adapts its scale on the host, which a CUDA graph does not reach: "
            "call the updater outside of the capture, or scale by a fixed rescale_grad"
        )
    indices, names = call.indices, optimizer.idx2name
    awaited = StepInfo(stepped=False, skipped=False)
    own = ref(scaler) if scaler is not None else lambda: None
    owner = ref(updater)  # weakly, like the scaler: both keep the pending step

    def finish(norm: float, sums: Callable[[], Any] | None) -> None:
        info = StepInfo(stepped=True, skipped=False, global_norm=norm)
        if not math.isfinite(norm):
            info = overflow(sums() if sums else np.empty(0), indices, names, norm)
        updater, scaler = owner(), own()
        if updater is not None and updater._info is awaited:
            vars(updater)["_info"] = info
        if scaler is not None:
            scaler.update(overflow=info.skipped)

    rescale_grad = float(optimizer.rescale_grad)
    bound = math.inf if limit is None else limit
    if not call.deferred((rescale_grad * share, scale_of(scaler), bound, share), finish):
        return False
    vars(updater)["_info"] = awaited
    if scaler is not None:
        scaler._awaited = partial(settle, optimizer)
    return True


def settle(optimizer: OptimizerLike) -> None:
    """Wait for the outcomes of steps that a device has counted."""
    counts = optimizer._index_update_count
    if counts.ahead:
        with optimizer.call_lock:
            counts.settle()
