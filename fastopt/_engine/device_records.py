"""Records of parameters whose arrays are on CUDA devices, and the calls that are made of them.

A record has a table for each form of the gradient, which is created with full validation. A call
joins the tables of its parameters by optimizer, device, stream and layout, so that a list of any
length is a few launches (:mod:`~fastopt._engine.device_call`), and is kept by its indices. Each
call reads the headers of all weights and gradients, compares them with the form, and enters
addresses that have changed (:mod:`fastopt._kernels.cuda_arrays`): the objects may be others than
before. Overlaps are found from the ranges of all written arrays. A list that was not seen before is
joined from records without further checks. Then the step is counted and its hyper-parameters are
computed (:mod:`~fastopt._engine.device_hyper`), and what has changed is uploaded before the
launches (:mod:`fastopt._kernels.cuda_table`). Calls that Python checks first are in
:mod:`~fastopt._engine.device_updates`.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from fastopt._engine.averaging import AveragingStep
from fastopt._engine.contract import Batches, OptimizerLike, batches_of
from fastopt._engine.device_call import DeviceCall, Part, disjoint
from fastopt._engine.device_tables import table_of_parameter
from fastopt._engine.hyper import hyper_of
from fastopt._engine.parameters import Call, Parameter, Parameters, compiling
from fastopt._engine.per_index import Index
from fastopt._engine.validate import check, is_fixed
from fastopt._interrupts import uninterrupted
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.cuda_table import launch as launch_tables
from fastopt._kernels.devices import header, readings
from fastopt._kernels.layout import kind_of
from fastopt.sparse import RowSparse

CALLS = 64
"""Number of lists whose tables are kept together."""

KINDS = {int, str}
"""Types of indices."""

NOTHING = np.zeros((2, 0), np.uint64)
"""Memory ranges of no arrays."""

FORMS = 4
"""Number of forms of a parameter's gradient that are kept."""


class Record(NamedTuple):
    """A parameter on a device."""

    optimizer: OptimizerLike
    state: Any
    tables: dict[Any, CudaTable]
    """Tables by form of the gradient."""


class DeviceRecords:
    """Records of the parameters of an updater that are on devices.

    Parameters
    ----------
    parameters : Parameters
        The parameters of the updater.

    Attributes
    ----------
    calls : dict
        Calls by index, or by tuple of indices for lists.
    known : dict
        Records by index, of parameters whose states have been stored.
    folds : bool
        :attr:`Parameters.folds`, after :meth:`follow`.
    captured : list of DeviceCall
        Calls that are part of graphs, which may be replayed at any time.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.calls: dict[Any, DeviceCall] = {}
        self.known: dict[Index, Record] = {}
        self.captured: list[DeviceCall] = []
        self.version = self.mode_version = -1
        self.mode: Any = None
        self.folds = False

    def forget(self) -> None:
        """Drop all records, since something besides the arguments of calls has changed."""
        self.calls, self.known = {}, {}
        self.version = self.mode_version = -1

    def follow(self) -> None:
        """Follow the changes of the attributes of optimizers."""
        parameters, optimizer = self.parameters, self.parameters.optimizer
        if self.version == optimizer.version:
            return
        if parameters.groups is not None:
            parameters.groups.sync()
        if self.mode_version != optimizer.mode_version:
            mode = parameters.modes()
            if mode != self.mode or any(each.rule_by_index for each in parameters.optimizers()):
                self.forget()
            self.mode, self.mode_version = mode, optimizer.mode_version
        self.folds = parameters.folds
        self.version = optimizer.version

    def drop(self, index: Index) -> None:
        """Drop the record of a parameter, and the calls with it."""
        if self.known.pop(index, None) is not None:
            calls = self.calls.items()
            self.calls = {key: call for key, call in calls if index not in call.indices}

    # Calls

    def has(self, index: Any) -> bool:
        """Whether the first parameter of a call is known to have a record."""
        if not self.known or (not index and type(index) in (list, tuple)):
            return False
        first = index[0] if type(index) in (list, tuple) else index
        return type(first) in KINDS and first in self.known

    def call_of(self, index: Any, grad: Any, weight: Any) -> DeviceCall | None:
        """Return the call for arguments that have not been checked, with their arrays entered.

        If the result is None, nothing has changed, and the arguments must be checked.
        """
        if self.version != self.parameters.optimizer.version:
            self.follow()
        single = type(index) not in (list, tuple)
        key = index if single else tuple(index)
        if not (type(key) in KINDS if single else {*map(type, key)} <= KINDS):
            return None
        call = self.calls.get(key)
        if call is not None and call.enter(grad, weight):
            return call
        if single:
            grad, weight, key = [grad], [weight], (index,)
        return self._assembled(key, grad, weight, single)

    def _assembled(
        self, indices: tuple[Index, ...], grads: Any, weights: Any, single: bool
    ) -> DeviceCall | None:
        """Return a new call of parameters that have records, with its arrays entered."""
        lists = type(grads) in (list, tuple) and type(weights) in (list, tuple)
        if not (lists and 0 < len(indices) == len(grads) == len(weights)):
            return None
        known = [self.known[index] for index in indices if index in self.known]
        averages = self.parameters.averages
        if len(known) < len(indices) or (averages is not None and averages.average.alternates):
            return None
        calls = [
            (index, weight, grad, record.state)
            for index, weight, grad, record in zip(indices, weights, grads, known, strict=True)
        ]
        tables = [self._known_table(call, averages is not None) for call in calls]
        if None in tables:
            return None
        call = self.prepare(calls, single, tables=tables)
        self.keep(call)
        return call

    def prepare(
        self,
        calls: Sequence[Call],
        single: bool = False,
        keep: bool = True,
        tables: Sequence[Any] = (),
    ) -> DeviceCall:
        """Return a call of arrays that have been checked, without counting it.

        With `keep` False, its tables are not those of other calls. `tables` are those of records,
        if their arrays have been entered already.

        Raises
        ------
        TypeError, ValueError
            The arrays do not match.
        """
        self.follow()
        parameters, indices = self.parameters, [index for index, *_ in calls]
        averages = parameters.averages
        averaging = averages.step(parameters.optimizer, indices) if averages else None
        own = self._parameters_of(indices)
        optimizers = [*dict.fromkeys(of.optimizer for of in own)]
        several = len(optimizers) > 1
        again = keep and len(set(indices)) == len(indices)
        ordered = not again or (several and _in_order(optimizers, indices))
        ordered |= len(calls) > 1 and any(
            each.rates_before_count and each.lr_scheduler is not None for each in optimizers
        )
        states = [state for *_, state in calls]
        listed = list(zip(own, calls, strict=True))
        records: dict[Index, Record] | None = {} if again else None
        if not (tables and again):
            tables = [self._table(of, call, averaging, records) for of, call in listed]
        if again and not disjoint(tables):  # an error is reported in words, or the list is ordered
            ordered, averaging = (
                True,
                averages.step(parameters.optimizer, indices) if averages else None,
            )
            tables = [self._table(of, call, averaging, None) for of, call in listed]
        again = again and not ordered and all(map(is_fixed, states))
        again = again and all(table.direct and table.after is None for table in tables)
        if ordered:
            parts: list[Part] = [
                (of.optimizer, [k], [(tables[k], [0])]) for k, of in enumerate(own)
            ]
        else:
            parts = _parts([of.optimizer for of in own], tables)
        call = DeviceCall(parameters, indices, states, parts, single, averaging, again)
        call.records = records or {}
        return call

    def _parameters_of(self, indices: Sequence[Index]) -> list[Parameter]:
        """Return the parameters of a call."""
        groups = self.parameters.groups
        for each in groups.optimizers() if groups is not None else ():
            vars(each)["unchecked"] = False  # multipliers are checked by the updater's
        found = [self.parameters.of(index) for index in indices]
        if groups is not None:
            groups.sync()  # new indices may have changed multipliers
        return found

    def keep(self, call: DeviceCall) -> None:
        """Keep a call for later ones; drop the oldest one if there are too many."""
        averages = self.parameters.averages
        alternates = averages is not None and averages.average.alternates
        if not call.again or alternates:  # the next step may need other tables
            return
        key = call.indices[0] if call.single else tuple(call.indices)
        self.calls.pop(key, None)
        if len(self.calls) >= CALLS and not call.single:
            lists = [each for each in self.calls if isinstance(each, tuple)]
            if len(lists) >= CALLS:
                del self.calls[lists[0]]
        self.calls[key] = call

    def remember(self, call: DeviceCall, weights: Sequence[Any]) -> None:
        """Finish the first step of a call, and keep it."""
        if call.averaging is not None:
            call.averaging.keep()
        call.release()
        self.known.update(call.records)
        self.note(call, weights)
        self.keep(call)

    def note(self, call: DeviceCall, weights: Sequence[Any]) -> None:
        """Keep the weights of a call in place of those of earlier calls, and a captured call."""
        if call.captured and call not in self.captured:
            self.captured.append(call)
        self.parameters.note(call.indices, weights)

    def update_all(
        self,
        calls: Sequence[Call],
        single: bool,
        factor: float = 1.0,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Update tensors with states that the caller keeps, and gradients times `factor`.

        `between` is called when everything has been counted, before anything is launched.
        """
        if (batches := batches_of(self.parameters.optimizer)) is not None:
            self._accumulate_all(batches, calls, between)
            return
        indices, weights, grads, states = ([call[k] for call in calls] for k in range(4))
        call = None
        if all(map(self._keeps, indices, states)):
            lists: list[Any] = [indices, grads, weights]
            call = self.call_of(*[each[0] for each in lists] if single else lists)
        if call is not None:
            call.step(factor, between)
            self.note(call, weights)
            return
        call = self.prepare(calls, single)
        call.step(factor, between)
        self.remember(call, weights)

    def _accumulate_all(
        self, batches: Batches, calls: Sequence[Call], between: Callable[[], None] | None
    ) -> None:
        """Update with an optimizer that sums the gradients of several calls."""
        parameters, optimizer = self.parameters, self.parameters.optimizer
        before, tables = optimizer.snapshot(), list[CudaTable]()
        with uninterrupted:
            try:
                for index, weight, grad, state in calls:
                    of = parameters.of(index)
                    grad = check(of.context, weight, grad, of.copy)
                    total, adding = batches.add(of.context, index, grad, weight)
                    tables += adding
                    if total is None:
                        optimizer._get_lr(index), optimizer._get_wd(index)  # as an update checks
                        optimizer._update_count(index)
                    else:
                        one = self.prepare([(index, weight, total, state)], keep=False)
                        tables += one.count()
                if between is not None:
                    between()
                with compiling(optimizer, calls[0][0]):
                    launch_tables(tables)
                parameters.note([call[0] for call in calls], [call[1] for call in calls])
            except BaseException:
                if not (tables and tables[-1].done):
                    optimizer.put_back(before)
                raise

    def _keeps(self, index: Index, state: Any) -> bool:
        """Whether a state is that of the parameter's record."""
        record = self.known.get(index)
        return record is not None and keeps(record.state, state)

    # Tables

    def _table(
        self,
        of: Parameter,
        call: Call,
        averaging: AveragingStep | None,
        records: dict[Index, Record] | None,
    ) -> CudaTable:
        """Return the table of a tensor, that of its record if there is one, with its arrays.

        A new record is added to `records`; if this is None, the table is that of no other call.
        """
        index, weight, grad, state = call
        averages = averaging is not None
        record = self.known.get(index)
        same = record is not None and record.optimizer is of.optimizer
        if record is not None and not (same and keeps(record.state, state)):
            self.drop(index)
            record = None
        if record is not None and records is not None:
            found: CudaTable | None = self._known_table(call, averages)
            if found is not None:
                return found
        check = self.parameters.check
        made: CudaTable = table_of_parameter(of, check, weight, grad, state, averaging)
        if records is not None and made.direct and made.after is None and is_fixed(state):
            if record is None:  # kept with the state, once the call has succeeded
                record = records[index] = Record(of.optimizer, state, {})
            if len(record.tables) >= FORMS:
                record.tables.clear()
            record.tables[form_of(of.by_row(grad), averages)] = made
        return made

    def _known_table(self, call: Call, averages: bool) -> Any:
        """Return the table of a record, with the arrays of a call entered; None if none fits.

        Whether the arrays overlap is not checked.
        """
        index, weight, grad, _ = call
        record, of = self.known[index], self.parameters.of(index)
        try:
            grad = of.by_row(grad)
            table = record.tables.get(form_of(grad, averages))
        except (AttributeError, KeyError, TypeError, ValueError):  # the checks report it
            return None
        if isinstance(grad, RowSparse) and grad.shape != header(weight).shape:
            return None
        if table is None or not table.given.take_weights([weight], table.table):
            return None
        if not table.given.take_grads([grad], table.table, NOTHING, True):
            return None
        if table.rows is not None:
            table.list_rows(of.context, grad)
        return table


def keeps(known: Any, state: Any) -> bool:
    """Whether a state is the one of a record, or a tuple of its arrays."""
    if known is state:
        return True
    pair = type(known) is tuple and type(state) is tuple and len(known) == len(state)
    return pair and all(map(is_, known, state))


def form_of(grad: Any, averages: bool) -> Any:
    """Return what the table of a gradient depends on."""
    if isinstance(grad, RowSparse):
        return RowSparse, kind_of(header(grad.values).dtype), averages
    return readings([grad]).kinds[0], averages


def _in_order(optimizers: Sequence[Any], indices: Sequence[Index]) -> bool:
    """Whether the tensors of several optimizers must be updated one after the other."""
    if any(hyper_of(each).shares for each in optimizers):
        return True
    if not any(each.lr_scheduler is not None for each in optimizers):
        return False
    counts, start = optimizers[0]._index_update_count, optimizers[0].begin_num_update
    return len({counts.get(index, start) for index in indices}) > 1


def _parts(optimizers: Sequence[Any], tables: Sequence[CudaTable]) -> list[Part]:
    """Return the tables of each optimizer; tables of equal layouts are joined."""
    parts: list[Part] = []
    for optimizer in dict.fromkeys(optimizers):
        places = [k for k, each in enumerate(optimizers) if each is optimizer]
        shares = hyper_of(optimizer).shares
        kinds: dict[Any, list[int]] = {}
        run, last = 0, None
        for within, k in enumerate(places):
            table = tables[k]
            kind: Any = k if table.alone else (table.device, table.stream, table.layout)
            if shares and kind != last:
                run, last = run + 1, kind
            kinds.setdefault((run, kind), []).append(within)
        groups = []
        for own in kinds.values():
            of = [tables[places[within]] for within in own]
            groups.append((CudaTable.joined(of) if len(of) > 1 else of[0], own))
        parts.append((optimizer, places, groups))
    return parts
