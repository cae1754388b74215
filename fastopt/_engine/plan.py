"""The plan of a call: prepared once, so that later similar calls run one compiled function."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter, is_
from typing import Any
from weakref import proxy

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.hyper import hyper_of
from fastopt._engine.lazy_decay import add_decay
from fastopt._engine.overlap import Ranges
from fastopt._engine.per_index import Index
from fastopt._engine.validate import check, label
from fastopt._interrupts import uninterrupted
from fastopt._kernels import cpu_calls
from fastopt._kernels.advance import CARRIED, COUNT, GROUP, NUMBER, SEED, SLOTS, step
from fastopt._kernels.compiling import bind
from fastopt._kernels.context import context_of
from fastopt._kernels.layout import DONE, KEY
from fastopt._kernels.noise import index_number
from fastopt._kernels.numpy_abi import TYPES
from fastopt._kernels.table import Table
from fastopt.sparse import RowSparse

__all__ = ["Group", "Plan"]

Array = np.ndarray[Any, Any]
Rates = float | list[float]

RATES = ("rate", "lr", "wd")
"""Hyper-parameters that schedules change."""

_NOT_CARRIED = np.zeros(1)
_multipliers = attrgetter("lr_mult", "wd_mult")


class Group:
    """Tensors of a call that share kernel launches, with their hyper-parameters.

    Parameters
    ----------
    table : Table
        Arguments of the kernels.
    places : sequence of int
        Positions of the tensors in the call.
    plan : Plan
        The plan of the call.
    """

    def __init__(self, table: Table, places: Sequence[int], plan: "Plan") -> None:
        rule, hyper = table.layout.rule, plan.hyper
        self.table, self.places = table, list(places)
        table.indices = [plan.indices[k] for k in places]
        self.ids = np.array([(k, id(plan.weights[k])) for k in places], np.uint64).reshape(-1, 2)
        self.tensors = np.zeros((len(self.places), SLOTS), np.int64)
        if table.layout.keyed:
            self.tensors[:, NUMBER] = [index_number(plan.indices[k]) for k in places]
            self.tensors[:, SEED] = index_number(plan.optimizer.seed)
        names = (*rule.hyper, *(name for name in hyper.extra if name not in rule.hyper))
        self.names = names
        self.rates = [(name, names.index(name)) for name in RATES if name in names]
        self.compiled: tuple[Any, ...] = None, None, False
        if hyper.correct and not plan.optimizer.per_index:
            dtype = np.dtype((np.record, [(name, np.float64) for name in names]))
            self.compiled = hyper.correct, dtype, hyper.carries
        self.keys: list[Any] = []
        self.given: list[Any] = []
        self.partitioned: Any = None
        self.values = np.zeros((2, 0, len(names) + 1))
        self.stamps = self.values[1, :, -1]
        self.arrays: tuple[Any, ...] = ()
        self.bound = False
        self.context = np.empty(0, np.uint64)
        self.entry: Any = None
        self.enter: Any = None
        self.checked: tuple[Any, ...] = ()

    def partition(self, keys: Sequence[Any]) -> None:
        """Give tensors with equal keys the same hyper-parameters."""
        own = [keys[place] for place in self.places]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(own))}
        self.keys, self.given = list(numbers), [None] * len(numbers)
        self.tensors[:, GROUP] = [numbers[key] for key in own]
        if self.values.shape[1] != len(numbers):
            self.values = np.zeros((2, len(numbers), len(self.names) + 1))
            self.stamps = self.values[1, :, -1]
            self.bound = False
        self.partitioned = keys  # last, as Ctrl-C may come before

    def fill(
        self,
        row: int,
        optimizer: Any,
        rates: Mapping[str, float],
        given: Mapping[str, float],
        again: bool = False,
    ) -> None:
        """Enter the hyper-parameters of tensors with equal ones; see :meth:`Optimizer.record`.

        With `again`, no attribute of the optimizer has changed since the last call.
        """
        if again and given == self.given[row]:  # the usual case under a schedule
            for name, column in self.rates:
                if name not in given:
                    self.values[0, row, column] = rates[name]
            return
        rule = self.table.layout.rule
        self.values[0, row, :-1] = optimizer.record(rule, self.names, rates, given)
        immutable = {float, int}.issuperset(map(type, given.values()))
        self.given[row] = given if immutable else None

    def bind_enter(self, plan: "Plan") -> None:
        """Bind the kernel that checks and enters the arrays of a call."""
        table = self.table
        self.checked = table.table, table.guards, plan.written, self.ids, TYPES, plan.length
        self.enter = bind(cpu_calls.enter(), *self.checked, 0)

    def bind(self, plan: "Plan") -> None:
        """Write the current arrays to the context of the compiled entry function, and bind it.

        The entry function counts a step and computes its hyper-parameters.
        """
        table = self.table
        arrays = (
            table.table,
            table.fields,
            self.ids,
            table.guards,
            plan.written,
            TYPES,
            self.tensors,
            plan.counts,
            self.values,
            plan.carried,
        )
        self.context, self.arrays, self.bound = context_of(arrays, plan.length), arrays, True
        if self.entry is None:
            layout = table.layout
            rescale = layout.rule.rescale
            kernel = cpu_calls.start(rescale, layout.real, layout.keyed, *self.compiled)
            self.entry = plan.planner.compiled(plan.indices[0], kernel, self.context, 0)


class Plan:
    """The checked tensors of a call, grouped by kernel, with their arrays entered into tables.

    Parameters
    ----------
    planner : Planner
        The planner that keeps it.
    indices : sequence of int or str
        Indices of the call.
    weights, states : sequence
        Weights, as the user passed them, and their states.
    tables : sequence of (Table, sequence of int)
        Tables, and the positions of their tensors in the call.
    single : bool
        Whether the call passes one index instead of lists.
    in_order : bool
        Whether each tensor must be updated before the next, since they share memory or an index.
    averaging : AveragingStep, optional
        Weight averaging of the step.
    """

    def __init__(
        self,
        planner: Any,
        indices: Sequence[Index],
        weights: Sequence[Any],
        states: Sequence[Any],
        tables: Sequence[tuple[Table, Sequence[int]]],
        single: bool,
        in_order: bool = False,
        averaging: Any = None,
    ) -> None:
        optimizer = self.optimizer = planner.optimizer
        self.planner = proxy(planner)  # the planner keeps the plan: avoid a cycle
        self.indices, self.weights, self.states = list(indices), list(weights), list(states)
        self.length = 0 if single else len(self.indices)
        self.in_order = in_order
        self.mode = planner.mode(self.indices)
        self.averaging = averaging
        self.hyper = hyper_of(optimizer)
        if averaging is not None:
            self.hyper = averaging.averages.hyper(self.hyper)
        self.folds = optimizer.folds and not in_order
        self.scales = self.hyper.constant and not optimizer.per_index
        self.tables = [table for table, _ in tables]
        spans = np.concatenate([table.spans() for table in self.tables], axis=1)
        self.written = np.ascontiguousarray(spans[:, np.argsort(spans[0])])
        self.params: list[Any] = []
        self.asked: list[Any] | None = None
        self.multipliers: list[tuple[float, float]] = []
        self.multipliers_version = self.mode_version = self.version = self.counts_version = -1
        self.filled: tuple[Any, ...] = ()
        self.counts = self.carried = np.empty(0)
        self.new: list[Index] = []
        self.updates: list[Any] = []
        self.kept = self.skips = False
        self.key: Any = None
        self.groups = [Group(table, places, self) for table, places in tables]
        self.sparse = [group for group in self.groups if group.table.layout.sparse]

    @property
    def settled(self) -> bool:
        """Whether no step computes hyper-parameters in Python."""
        optimizer = self.optimizer
        return (
            self.hyper.constant
            and optimizer.lr_scheduler is None
            and not optimizer.param_dict
            and not optimizer.per_index
            and not optimizer.unchecked
            and not (optimizer.may_skip and optimizer.skips())
        )

    @property
    def done(self) -> bool:
        """Whether the step has updated; whoever reads it sets it to False before the step."""
        return self.tables[-1].done

    @done.setter
    def done(self, value: bool) -> None:
        self.tables[-1].table[0, DONE] = value

    # Whether a call fits

    def keeps(self, state: Any) -> bool:
        """Whether a state of the only tensor is the one planned for, or a tuple of its arrays."""
        known = self.states[0]
        if known is state:
            return True
        pair = type(known) is tuple and type(state) is tuple and len(known) == len(state)
        return pair and all(map(is_, known, state))

    def fits(self, index: Any, grad: Any, weight: Any) -> bool:
        """Enter a call's gradients into the tables; return whether the plan fits the call."""
        optimizer = self.optimizer
        if self.mode_version != optimizer.mode_version:
            if self.mode != self.planner.mode(self.indices):
                return False
            self.mode_version = optimizer.mode_version
        objects = index, grad, weight
        for group in self.groups:
            if group.enter is None:
                group.bind_enter(self)
            if group.enter(*group.checked, id(objects)) < 0:
                return False
        for group in self.sparse:
            if not self._list_rows(group, grad[group.places[0]] if self.length else grad):
                return False
        return True

    def _take_rows(self, table: Table, place: int, grad: Any) -> bool:
        """Enter the row-sparse gradient of a tensor, unless it needs the checks in Python."""
        if type(grad) is tuple and len(grad) == 2:
            return table.take_rows(*grad, self.written)
        fits = type(grad) is RowSparse and grad.shape == self.weights[place].shape
        return fits and table.take_rows(grad.values, grad.indices, self.written)

    def _list_rows(self, group: Group, grad: Any) -> bool:
        """Enter the row-sparse gradient of a tensor; return False if it needs another kernel."""
        place, table = group.places[0], group.table
        if self._take_rows(table, place, grad):
            return True
        index, weight = self.indices[place], self.weights[place]
        context = label(index, self.optimizer.idx2name)
        if type(grad) is not RowSparse or grad.shape != weight.shape:
            try:
                grad = check(context, weight, grad, self.planner.copies.get(index))
            except TypeError:  # another array library, or an error that the full checks report
                return False
            grad = self.planner.by_row(grad)
        if not (isinstance(grad, RowSparse) and table.serves(grad)):
            return False
        table.list_rows(context, grad)
        first, last = table.read()
        return not Ranges(*self.written).meeting(first, last)

    # One step

    def call_again(self, index: Any, grad: Any, weight: Any) -> bool:
        """Update if the plan fits the call, else return False."""
        if not self.fits(index, grad, weight):
            return False
        self.step()
        return True

    def step(self, factor: float = 1.0, shielded: bool = False) -> None:
        """Update with gradients times `factor`, after :meth:`fits` has entered them.

        Parameters
        ----------
        factor : float
            Factor of the gradients, in addition to ``rescale_grad``.
        shielded : bool
            Whether Ctrl-C is already deferred, which several launches need.
        """
        if not shielded:
            with uninterrupted:
                self.step(factor, shielded=True)
            return
        optimizer = self.optimizer
        for table in self.tables:
            table.table[0, DONE] = 0
        beyond = self._before()
        counts = optimizer._index_update_count
        if counts.ahead or counts.graphs:
            counts.settle()
        largest, before = counts.counted.item(0), None
        try:
            if self.counts_version != optimizer.version:
                self._find_slots()
            carried = self.carried[self.carried_slots] if self.hyper.carries else None
            before = self.counts.item(0), self.counts[self.slots], carried, *beyond
            if optimizer.may_skip and self.filled[:1] != (optimizer.version,):
                self.skips = optimizer.skips()
            for groups in [[group] for group in self.groups] if self.in_order else [self.groups]:
                self._advance(groups, factor)
            if self.skips:
                self.release()
                self.done = True
            else:
                self.planner.launch(self.tables, self.indices[0])
            self.new = []
        except BaseException:
            if before is None:
                self._forget_new(largest)
            elif not self.done:
                self._roll_back(before)
            raise

    def count(self, factor: float = 1.0) -> list[Table]:
        """Count a step with gradients times `factor`; the caller launches, or rolls back."""
        optimizer = self.optimizer
        if self.counts_version != optimizer.version:
            self._find_slots()
        self.skips = optimizer.may_skip and optimizer.skips()
        for groups in [[group] for group in self.groups] if self.in_order else [self.groups]:
            self._advance(groups, factor)
        if self.skips:
            self.release()
        return [] if self.skips else self.tables

    def release(self) -> None:
        """Release the gradients, for a call that ends without a launch."""
        for table in self.tables:
            table.release()

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; non-finite elements propagate."""
        if len(self.groups) == 1:
            return self.tables[0].squares()
        totals = np.zeros(len(self.indices))
        for group in self.groups:
            totals[group.places] = group.table.squares()
        return totals

    # Rolling back

    def _before(self) -> tuple[Any, ...]:
        """Save what a step of several launches changes besides counts and carried numbers."""
        optimizer = self.optimizer
        rows = optimizer.row_decay
        decay = {i: rows.get(i) for i in self.indices} if rows or self.sparse else {}
        return decay, optimizer.snapshot() if optimizer.per_index else None

    def _find_slots(self) -> None:
        """Look up the positions of update counts and carried numbers; add new indices."""
        optimizer = self.optimizer
        counts, carried = optimizer._index_update_count, optimizer.carried
        if counts.ahead or counts.graphs:
            counts.settle()
        if self.counts is counts.counted and (carried is None or self.carried is carried.array):
            self.counts_version = optimizer.version
            return
        self.new = [index for index in dict.fromkeys(self.indices) if index not in counts]
        self.slots = counts.slots(self.indices, optimizer.begin_num_update)
        self.carried_slots = optimizer.carried_slots(self.indices)
        for group in self.groups:
            counted = -1 if optimizer.per_index else self.slots[group.places]
            group.tensors[:, COUNT] = counted
            group.tensors[:, CARRIED] = self.carried_slots[group.places]
            group.bound = False
        self.carried = _NOT_CARRIED if carried is None else carried.array
        self.counts = counts.counted  # last, as Ctrl-C may come before
        self.counts_version = optimizer.version

    def _roll_back(self, before: tuple[Any, ...]) -> None:
        largest, counts, carried, decay, known = before
        optimizer = self.optimizer
        with uninterrupted:
            if known is not None:
                optimizer.put_back(known)
                self._find_slots()
            self.counts[self.slots] = counts
            if carried is not None:
                self.carried[self.carried_slots] = carried
            for index, rows in decay.items():
                optimizer.row_decay.pop(index, None)
                if rows is not None:
                    optimizer.row_decay[index] = rows
            self._forget_new(largest)
            self.release()

    def _forget_new(self, largest: int) -> None:
        """Remove the counts of indices that this step has added."""
        optimizer = self.optimizer
        optimizer._index_update_count.largest = largest
        for index in self.new:
            optimizer._index_update_count.pop(index, None)
            if optimizer.carried is not None:
                optimizer.carried.pop(index, None)
        self.new, self.version, self.filled = [], -1, ()

    # Hyper-parameters

    def _advance(self, groups: Sequence[Group], factor: float = 1.0, starts: bool = True) -> None:
        """Count the step and compute its hyper-parameters.

        With `starts` False, only what does not depend on the count is computed.
        """
        optimizer = self.optimizer
        if factor != 1 and not self.scales:
            rescale_grad = optimizer.rescale_grad
            optimizer.rescale_grad = float(rescale_grad) * factor
            try:
                self._advance(groups)
            finally:
                optimizer.rescale_grad = rescale_grad
            return
        if optimizer.per_index:
            self._refresh_each(groups)
        else:
            keys: list[Any] = self.multipliers
            rates: Rates = optimizer.lr
            if optimizer.param_dict or self.multipliers_version != optimizer.multipliers_version:
                keys = self._keys()
            if optimizer.lr_scheduler is not None:
                slots = self.slots if groups is self.groups else self.slots[groups[0].places]
                counts = self.counts[slots].tolist()
                if counts.count(counts[0]) == len(counts):
                    ahead = not optimizer.rates_before_count
                    update = self.counts[0] = max(counts[0] + ahead, self.counts.item(0))
                    rates = optimizer.lr_scheduler(update)
                    if type(rates) is not float:
                        rates = optimizer.scheduled(rates)
                else:
                    rates = self._scheduled_rates(counts)
            times = None if self.hyper.constant else (self.counts[self.slots] + 1).tolist()
            if not isinstance(rates, float) or self.in_order or (times and len(set(times)) > 1):
                keys = self._each(keys, rates, times)
            filled = optimizer.version, keys, rates, times
            if self.in_order or self.filled != filled:
                for group in groups:
                    if group.partitioned is not keys:
                        group.partition(keys)
                    self._fill(group, rates, times)
                if not isinstance(rates, float):
                    self.counts[0] = self.updates[-1]
                self.filled = filled
            for group in groups:
                group.values[0, :, -1] = factor
                if group.table.layout.catch_up:
                    self._add_decay(group, rates)
        for group in groups if starts else ():
            if not group.bound:
                group.bind(self)
            group.entry(group.context, 0)
            if optimizer.per_index and group.table.layout.keyed:
                numbers = [optimizer.key(self.indices[k]) for k in group.places]
                group.table.table[:, KEY] = numbers

    def _each(self, keys: list[Any], rates: Rates, times: Any) -> list[Any]:
        """Add learning rate and update count to the keys of the tensors."""
        none: list[Any] = [0] * len(keys)
        if isinstance(rates, float):
            return list(zip(keys, [rates] * len(keys), times or none, none, strict=True))
        return list(zip(keys, rates, times or none, self.updates, strict=True))

    def _keys(self) -> list[Any]:
        """Return the learning-rate and weight-decay multipliers of each tensor."""
        optimizer = self.optimizer
        if self.multipliers_version != optimizer.multipliers_version:
            self.params = [optimizer.param_dict.get(index) for index in self.indices]
        if optimizer.param_dict:
            try:
                asked = list(map(_multipliers, self.params))
            except AttributeError:
                asked = [(None, None)] * len(self.params)
            if asked != self.asked or (None, None) in asked:
                self.multipliers_version, self.asked = -1, asked
        if self.multipliers_version != optimizer.multipliers_version:
            lr_mult, wd_mult = optimizer.lr_mult, optimizer.wd_mult
            self.multipliers = [
                (
                    optimizer.multiplier(index, lr_mult, "lr_mult"),
                    optimizer.multiplier(index, wd_mult, "wd_mult"),
                )
                for index in self.indices
            ]
            self.multipliers_version = optimizer.multipliers_version
        return self.multipliers

    def _scheduled_rates(self, counts: Sequence[int]) -> list[float]:
        """Return the learning rate of each tensor before multipliers, for unequal counts."""
        optimizer = self.optimizer
        ahead = not optimizer.rates_before_count
        ahead_of = (count + ahead for count in counts)
        self.updates = list(accumulate(ahead_of, max, initial=self.counts.item(0)))[1:]
        rates: dict[Any, float] = {}
        for update in dict.fromkeys(self.updates):
            self.counts[0] = update
            rates[update] = float(optimizer.learning_rate)
        return [rates[update] for update in self.updates]

    def _fill(self, group: Group, rates: Rates, times: Any) -> None:
        """Compute the uncorrected hyper-parameters for each distinct key of a group."""
        optimizer, given = self.optimizer, self.hyper.given
        base = rates if isinstance(rates, float) else 0.0
        t = times[0] if times else 0
        again = bool(self.filled) and self.filled[0] == optimizer.version
        for row, key in enumerate(group.keys):
            if key and isinstance(key[0], tuple):
                key, base, t, update = key
                if update:  # hyper() may read the schedule too
                    optimizer._index_update_count.largest = update
            lr, wd = base * key[0], optimizer.decay_at(base) * key[1]
            if not (0 <= lr < inf and 0 <= wd < inf):
                optimizer.check_rates(self._first(group, row), lr, wd)
            try:
                values = given(optimizer, t, lr, wd)
            except ValueError as error:
                context = label(self._first(group, row), optimizer.idx2name)
                raise ValueError(f"{context}: {error}") from error
            group.fill(row, optimizer, {"rate": base, "lr": lr, "wd": wd}, values, again)
        group.stamps.fill(-1)

    def _first(self, group: Group, row: int) -> Index:
        """Return the index of the first tensor that uses this row of hyper-parameters."""
        return self.indices[group.places[int(np.argmax(group.tensors[:, GROUP] == row))]]

    def _refresh_each(self, groups: Sequence[Group]) -> None:
        """Handle one tensor at a time, for classes that override counting or learning rates."""
        optimizer = self.optimizer
        of = {place: (group, row) for group in groups for row, place in enumerate(group.places)}
        for group in groups:
            group.partition(range(len(self.indices)))
        for place in sorted(of):
            (group, row), index = of[place], self.indices[place]
            optimizer._update_count(index)
            t = optimizer._index_update_count.get(index, 0)
            lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
            rate = optimizer.learning_rate if self.hyper.carries else lr
            values = {"rate": rate, **optimizer.hyper(t, lr, wd)}
            if self.averaging is not None:
                values = {**self.hyper.given(optimizer, t, lr, wd), **values}
            if self.hyper.carries and self.hyper.correct:
                slot = self.carried_slots[place]
                values = {"lr": lr, "wd": wd, **values}
                values = step(t, values, self.hyper.correct, self.carried[slot : slot + 1])
            if group.table.layout.catch_up:
                add_decay(self.optimizer, index, group.table, t, lr, wd)
            group.fill(row, optimizer, {"rate": rate, "lr": lr, "wd": wd}, values)
            group.values[0, row, -1] = 1

    def _add_decay(self, group: Group, rates: Rates) -> None:
        """Add the decay of this step to the deferred decay of rows."""
        optimizer = self.optimizer
        for place in group.places:
            base = rates if isinstance(rates, float) else rates[0 if self.in_order else place]
            lr_mult, wd_mult = self.multipliers[place]
            t = int(self.counts[self.slots[place]]) + 1
            lr, wd = base * lr_mult, optimizer.decay_at(base) * wd_mult
            add_decay(optimizer, self.indices[place], group.table, t, lr, wd)
