"""Update counts and hyper-parameters of a call on a device, for the tensors of one optimizer.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike, check_once
from fastopt._engine.hyper import hyper_of, values_of
from fastopt._engine.hyper_rows import RATES, names_of
from fastopt._engine.lazy_decay import add_decay
from fastopt._engine.parameters import compiling
from fastopt._engine.per_index import Index
from fastopt._engine.rates import StepRates, counted_fields, multipliers
from fastopt._engine.validate import label, leaves
from fastopt._kernels.advance import (
    CARRIED,
    COUNT,
    GROUP,
    NUMBER,
    SEED,
    SLOTS,
    advance_kernel,
)
from fastopt._kernels.compiling import bind
from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import header
from fastopt._kernels.layout import KEY
from fastopt._kernels.noise import index_number

Bases = float | list[float]
"""Learning rates before multipliers: one, or that of each tensor."""

NOT_CARRIED = np.zeros(1)
_multipliers = attrgetter("lr_mult", "wd_mult")


class HyperRows:
    """Hyper-parameters of the tensors of a table, with a row for those that have equal ones.

    Parameters
    ----------
    table : CudaTable
        The table.
    places : sequence of int
        Positions of its tensors among those of `counting`.
    counting : Counting
        The counts of these tensors.
    """

    def __init__(self, table: Any, places: Sequence[int], counting: "Counting") -> None:
        layout, hyper, optimizer = table.layout, counting.hyper, counting.optimizer
        self.table, self.places = table, list(places)
        self.tensors = np.zeros((len(self.places), SLOTS), np.int64)
        if layout.keyed:
            self.tensors[:, NUMBER] = [index_number(counting.indices[k]) for k in places]
            self.tensors[:, SEED] = index_number(optimizer.seed)
        self.names = names = names_of(layout.rule, hyper.extra)
        self.rates = [(name, names.index(name)) for name in RATES if name in names]
        self.corrected: tuple[Any, ...] = None, None, False
        if hyper.correct and not optimizer.per_index:
            dtype = np.dtype((np.record, [(name, np.float64) for name in names]))
            self.corrected = hyper.correct, dtype, hyper.carries
        self.keys: list[Any] = []
        self.given: list[Any] = []
        self.partitioned: Any = None
        self.values = np.zeros((2, 0, len(names) + 1))
        self.entry: Any = None

    def partition(self, keys: Sequence[Any]) -> None:
        """Give tensors with equal keys the same hyper-parameters."""
        own = [keys[place] for place in self.places]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(own))}
        self.keys, self.given = list(numbers), [None] * len(numbers)
        self.tensors[:, GROUP] = [numbers[key] for key in own]
        if self.values.shape[1] != len(numbers):
            self.values = np.zeros((2, len(numbers), len(self.names) + 1))
        self.partitioned = keys  # last, as Ctrl-C may come before

    def fill(
        self,
        row: int,
        optimizer: OptimizerLike,
        rates: Mapping[str, float],
        given: Mapping[str, float],
        again: bool = False,
    ) -> None:
        """Enter the hyper-parameters of a row; see :meth:`Optimizer.record`.

        With `again`, no attribute of the optimizer has changed since the last call.
        """
        if again and given == self.given[row]:  # the usual case under a schedule
            for name, column in self.rates:
                if name not in given:
                    self.values[0, row, column] = rates[name]
            return
        rule = self.table.layout.rule
        self.values[0, row, :-1] = values_of(optimizer, rule, self.names, rates, given)
        immutable = {float, int}.issuperset(map(type, given.values()))
        self.given[row] = given if immutable else None

    def begin(self, counting: "Counting") -> None:
        """Count a step, and write its hyper-parameters to the table."""
        table = self.table
        arrays = table.table, table.fields, self.tensors, counting.counts, self.values
        if self.entry is None:
            layout = table.layout
            kernel = advance_kernel(layout.rule.rescale, layout.keyed, *self.corrected)
            index = counting.indices[0]
            with compiling(counting.optimizer, index):
                self.entry = bind(kernel, *arrays, counting.carried)
        self.entry(*arrays, counting.carried)

    def first(self, indices: Sequence[Index], row: int) -> Index:
        """Return the index of the first tensor that uses a row."""
        return indices[self.places[int(np.argmax(self.tensors[:, GROUP] == row))]]


class Counting:
    """Update counts and hyper-parameters of the tensors of one optimizer in a call.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    indices : sequence of int or str
        Indices of the tensors.
    states : sequence
        Their states.
    tables : sequence of (CudaTable, sequence of int)
        Tables, and the positions of their tensors in `indices`.
    averaging : AveragingStep, optional
        Weight averaging of the step.

    Attributes
    ----------
    rows : list of HyperRows
        Hyper-parameters of each table.
    skips : bool
        Whether the present step is only counted.
    filled : tuple
        What the hyper-parameters in `rows` depend on besides the counts.
    static : tuple
        The version of the optimizer and the factor with which nothing is computed in Python.
    new : list
        Indices whose counts the present step has added, until it has succeeded.
    """

    def __init__(
        self,
        optimizer: OptimizerLike,
        indices: Sequence[Index],
        states: Sequence[Any],
        tables: Sequence[tuple[Any, Sequence[int]]],
        averaging: Any = None,
    ) -> None:
        self.optimizer = optimizer
        self.indices, self.states, self.averaging = list(indices), list(states), averaging
        self.hyper = hyper_of(optimizer)
        if averaging is not None:
            self.hyper = averaging.averages.hyper(self.hyper)
        self.folds, self.sums = bool(optimizer.folds), optimizer.step_sums
        self.scales = self.hyper.constant and not optimizer.per_index
        self.tables = [table for table, _ in tables]
        self.rows = [HyperRows(table, places, self) for table, places in tables]
        self.sparse = any(table.layout.sparse for table in self.tables)
        self.defers = any(table.layout.catch_up for table in self.tables)
        self.params: list[Any] = []
        self.asked: list[Any] | None = None
        self.multipliers: list[tuple[Any, ...]] = []
        self.multipliers_version = self.version = -1
        self.filled: tuple[Any, ...] = ()
        self.counts = self.carried = np.empty(0)
        self.new: list[Index] = []
        self.updates: list[Any] = []
        self.skips = False
        self.static: tuple[Any, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether no step computes hyper-parameters in Python."""
        optimizer = self.optimizer
        return (
            self.hyper.constant
            and self.sums is None
            and optimizer.lr_scheduler is None
            and not optimizer.param_dict
            and not optimizer.per_index
            and not optimizer.unchecked
            and not optimizer.skips()
        )

    # One step

    def find_slots(self) -> None:
        """Look up the positions of update counts and carried numbers; add new indices."""
        optimizer = self.optimizer
        if self.version == optimizer.version:
            return
        counts, carried = optimizer._index_update_count, optimizer.carried
        if counts.ahead or counts.graphs:
            counts.settle()
        if self.counts is counts.counted and (carried is None or self.carried is carried.array):
            self.version = optimizer.version
            return
        self.new += [index for index in dict.fromkeys(self.indices) if index not in counts]
        self.slots = counts.slots(self.indices, optimizer.begin_num_update)
        self.carried_slots = optimizer.carried_slots(self.indices)
        for row in self.rows:
            row.tensors[:, COUNT] = -1 if optimizer.per_index else self.slots[row.places]
            row.tensors[:, CARRIED] = self.carried_slots[row.places]
        self.carried = NOT_CARRIED if carried is None else carried.array
        self.counts = counts.counted  # last, as Ctrl-C may come before
        self.version = optimizer.version

    def before(self) -> tuple[Any, ...]:
        """Return what a step changes, for :meth:`roll_back`."""
        optimizer = self.optimizer
        rows, decay = optimizer.row_decay, {}
        if rows or self.sparse:
            decay = {index: rows.get(index) for index in self.indices}
        carried = self.carried[self.carried_slots] if self.hyper.carries else None
        known = optimizer.snapshot() if optimizer.per_index else None
        return self.counts[self.slots], carried, decay, known

    def begin_sums(self, indices: Sequence[Index]) -> Any:
        """Start a step of tensors whose numbers are summed; return the sums before.

        `indices` are those of all optimizers of the call.
        """
        check_once(self.optimizer, indices)
        self.filled = self.static = ()
        return None if self.sums is None else self.sums.begin(indices)

    def collect_sums(self) -> None:
        """Add the numbers that the tensors have kept in the completed step."""
        if self.sums is None:
            return
        count = len(self.tables[0].layout.rule.kept)
        own = [leaves(state)[-count:] for state in self.states]
        numbers = [[float(host(header(array))) for array in each] for each in own]
        self.sums.add(self.indices, numbers)

    def begin(self, factor: float = 1.0) -> None:
        """Count a step with gradients times `factor`."""
        optimizer = self.optimizer
        if self.static != (optimizer.version, factor):
            if self.filled[:1] != (optimizer.version,):
                self.skips = optimizer.skips()
            self.advance(factor)
            static = self.settled and self.scales and not self.defers
            self.static = (optimizer.version, factor) if static else ()
        for row in self.rows:
            row.begin(self)
            if optimizer.per_index and row.table.layout.keyed:
                numbers = [optimizer.key(self.indices[k]) for k in row.places]
                row.table.table[:, KEY] = numbers

    def roll_back(self, before: tuple[Any, ...]) -> None:
        """Undo what a step has changed, but not the count of all updates."""
        counts, carried, decay, known = before
        optimizer = self.optimizer
        if known is not None:
            optimizer.put_back(known)
            self.find_slots()
        self.counts[self.slots] = counts
        if carried is not None:
            self.carried[self.carried_slots] = carried
        for index, rows in decay.items():
            optimizer.row_decay.pop(index, None)
            if rows is not None:
                optimizer.row_decay[index] = rows

    def forget_new(self) -> None:
        """Remove the counts of indices that this step has added."""
        optimizer = self.optimizer
        for index in self.new:
            optimizer._index_update_count.pop(index, None)
            if optimizer.carried is not None:
                optimizer.carried.pop(index, None)
        self.new, self.version, self.filled, self.static = [], -1, (), ()

    # Hyper-parameters

    def advance(self, factor: float = 1.0) -> None:
        """Compute the hyper-parameters of a step, but for what depends on its count."""
        optimizer = self.optimizer
        if factor != 1 and not self.scales:
            rescale_grad = optimizer.rescale_grad
            optimizer.rescale_grad = float(rescale_grad) * factor
            try:
                self.advance()
            finally:
                optimizer.rescale_grad = rescale_grad
            return
        if optimizer.per_index:
            self._count_each()
            return
        keys: list[Any] = self.multipliers
        rates: Bases = optimizer.lr
        if optimizer.param_dict or self.multipliers_version != optimizer.multipliers_version:
            keys = self._keys()
        if optimizer.lr_scheduler is not None:
            rates = self._scheduled()
        times = None if self.hyper.constant else (self.counts[self.slots] + 1).tolist()
        if not isinstance(rates, float) or (times and len(set(times)) > 1):
            keys = self._each(keys, rates, times)
        filled = optimizer.version, keys, rates, times
        if self.filled != filled:
            for row in self.rows:
                if row.partitioned is not keys:
                    row.partition(keys)
                self._fill(row, rates, times)
            if not isinstance(rates, float):
                self.counts[0] = self.updates[-1]
            self.filled = filled
        for row in self.rows:
            row.values[0, :, -1] = factor
            if row.table.layout.catch_up:
                self._add_decay(row, rates)

    def _scheduled(self) -> Bases:
        """Return the learning rate of a schedule: one, or that of each tensor."""
        optimizer = self.optimizer
        counts = self.counts[self.slots].tolist()
        if counts.count(counts[0]) < len(counts):
            return self._scheduled_each(counts)
        ahead = not optimizer.rates_before_count
        update = self.counts[0] = max(counts[0] + ahead, self.counts.item(0))
        rate = optimizer.lr_scheduler(update)
        found: float = rate if type(rate) is float else optimizer.scheduled(rate)
        return found

    def _scheduled_each(self, counts: Sequence[int]) -> list[float]:
        """Return the learning rate of each tensor before multipliers, for unequal counts."""
        optimizer = self.optimizer
        step = StepRates(int(self.counts[0]))
        self.updates = [step.next(optimizer, count + 1) for count in counts]
        return [step.at(optimizer, update) for update in self.updates]

    def _each(self, keys: list[Any], rates: Bases, times: Any) -> list[Any]:
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
            self.multipliers = [multipliers(optimizer, index) for index in self.indices]
            self.multipliers_version = optimizer.multipliers_version
        return self.multipliers

    def _fill(self, rows: HyperRows, rates: Bases, times: Any) -> None:
        """Compute the uncorrected hyper-parameters for each distinct key."""
        optimizer, given = self.optimizer, self.hyper.given
        base = rates if isinstance(rates, float) else 0.0
        t = times[0] if times else 0
        again = bool(self.filled) and self.filled[0] == optimizer.version
        for row, key in enumerate(rows.keys):
            if key and isinstance(key[0], tuple):
                key, base, t, update = key
                if update:  # hyper() may read the schedule too
                    optimizer._index_update_count.largest = update
            own = optimizer.rates_at(base, key)
            lr, wd = own["lr"], own["wd"]
            if not (0 <= lr < inf and 0 <= wd < inf):
                optimizer.check_rates(rows.first(self.indices, row), lr, wd)
            try:
                values = given(optimizer, t, lr, wd)
            except ValueError as error:
                context = label(rows.first(self.indices, row), optimizer.idx2name)
                raise ValueError(f"{context}: {error}") from error
            rows.fill(row, optimizer, own, values, again)
        rows.values[1, :, -1] = -1

    def _count_each(self) -> None:
        """Handle one tensor at a time, for classes that override counting or learning rates."""
        optimizer = self.optimizer
        of = {place: (rows, row) for rows in self.rows for row, place in enumerate(rows.places)}
        for rows in self.rows:
            rows.partition(range(len(self.indices)))
        for place in sorted(of):
            (rows, row), index = of[place], self.indices[place]
            slot = self.carried_slots[place]
            carried = self.carried[slot : slot + 1]
            t, rates, values = counted_fields(optimizer, self.hyper, index, carried)
            if rows.table.layout.catch_up:
                add_decay(optimizer, index, rows.table, t, rates["lr"], rates["wd"])
            rows.fill(row, optimizer, rates, values)
            rows.values[0, row, -1] = 1

    def _add_decay(self, rows: HyperRows, rates: Bases) -> None:
        """Add the decay of this step to the deferred decay of rows."""
        optimizer = self.optimizer
        for place in rows.places:
            base = rates if isinstance(rates, float) else rates[place]
            t = int(self.counts[self.slots[place]]) + 1
            own = optimizer.rates_at(base, self.multipliers[place])
            add_decay(optimizer, self.indices[place], rows.table, t, own["lr"], own["wd"])
