"""Calls that records do not serve: their tensors are updated one after another.

Everything is checked before anything changes, hyper-parameters are computed in Python for each
tensor, and nothing is remembered. It serves rare forms of arrays, such as states with strides, and
every call where kernels are Python functions or the headers of arrays cannot be read.

Tests: ``tests/engine/test_unrecorded.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.hyper import hyper_of, values_of
from fastopt._engine.lazy_decay import add_decay
from fastopt._engine.per_index import Index
from fastopt._engine.rates import Rates, StepRates, counted, multipliers
from fastopt._engine.step_sums import check_once
from fastopt._engine.validate import label, leaves
from fastopt._interrupts import uninterrupted
from fastopt._kernels.advance import step as corrected
from fastopt._kernels.layout import DONE, KEY
from fastopt._kernels.table import Table

Call = tuple[Index, Any, Any, Any]


class UnrecordedCall:
    """A checked call, which :meth:`step` makes.

    Parameters
    ----------
    planner : Planner
        The planner of the updater.
    calls : sequence of (index, weight, gradient, state)
        The tensors of the call.

    Raises
    ------
    TypeError, ValueError
        The arrays do not match.
    """

    def __init__(self, planner: Any, calls: Sequence[Call]) -> None:
        self.planner, self.calls = planner, calls
        self.indices, self.weights = [call[0] for call in calls], [call[1] for call in calls]
        self.planners = [planner.of(index) for index in self.indices]
        averages, optimizer = planner.averages, planner.optimizer
        self.averaging = averages.step(optimizer, self.indices) if averages else None
        pairs = zip(self.planners, calls, strict=True)
        self.tables: list[Table] = [
            own.table(*call, averaging=self.averaging) for own, call in pairs
        ]
        self.rates = StepRates(0)
        self.done = False

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; non-finite elements propagate."""
        return np.concatenate([table.squares() for table in self.tables])

    def release(self) -> None:
        """Release the gradients."""
        for table in self.tables:
            table.release()

    def finish(self) -> None:
        """Keep the new averages, and the weights in place of those of earlier calls."""
        if self.averaging is not None:
            self.averaging.keep()
        self.release()
        self.planner.records.note(self.planner, self.indices, self.weights)

    def step(self, factor: float = 1.0) -> None:
        """Count the step and update, with gradients times `factor`; or change nothing."""
        with uninterrupted:
            undo: list[Callable[[], None]] = [
                partial(each.put_back, each.snapshot()) for each in self._optimizers()
            ]
            self.done = False
            launched: list[Table] = []
            try:
                self._begin(undo)
                launched += self.count(factor)
                if launched:
                    launched[-1].table[0, DONE] = 0
                    self.planner.launch(launched, self.indices[0])
                self.done = True
                self._collect()
            except BaseException:
                self.done = self.done or bool(launched and launched[-1].done)
                if not self.done:
                    for each in reversed(undo):
                        each()
                    self.release()
                raise

    def _begin(self, undo: list[Callable[[], None]]) -> None:
        """Begin the step of optimizers that sum over its tensors."""
        for optimizer in self._optimizers():
            if optimizer.step_sums is not None:
                check_once(optimizer, self.indices)
                before = optimizer.step_sums.begin(self.indices)
                undo.append(partial(optimizer.step_sums.put_back, before))

    def count(self, factor: float = 1.0) -> list[Table]:
        """Count the step and compute its hyper-parameters; return the tables to launch."""
        skips = {each: each.may_skip and each.skips() for each in self._optimizers()}
        launched = []
        for own, index, table in zip(self.planners, self.indices, self.tables, strict=True):
            self._advance(own.optimizer, index, table, factor)
            if not skips[own.optimizer]:
                launched += [table] if table.after is None else [table, table.after]
        return launched

    def _optimizers(self) -> list[Any]:
        return list(dict.fromkeys(own.optimizer for own in self.planners))

    def _advance(self, optimizer: Any, index: Index, table: Table, factor: float) -> None:
        """Count the update of a tensor and enter its hyper-parameters."""
        rule, hyper = table.layout.rule, hyper_of(optimizer)
        if self.averaging is not None:
            hyper = self.averaging.averages.hyper(hyper)
        t, rates = self._counted(optimizer, index)
        lr, wd = rates["lr"], rates["wd"]
        try:
            given = hyper.given(optimizer, t, lr, wd)
        except ValueError as error:
            raise ValueError(f"{label(index, optimizer.idx2name)}: {error}") from error
        names = (*rule.hyper, *(name for name in hyper.extra if name not in rule.hyper))
        values = values_of(optimizer, rule, names, rates, given)
        if hyper.correct is not None:
            slot = optimizer.carried_slots([index])[0]
            carried = optimizer.carried.array[slot : slot + 1] if hyper.carries else np.zeros(1)
            found = corrected(t, dict(zip(names, values, strict=True)), hyper.correct, carried)
            values = [found[name] for name in names]
        if rule.rescale >= 0 and optimizer.folds:
            values[rule.rescale] *= factor
        table.fields[0] = values[: len(rule.hyper)]
        if not optimizer.per_index:
            optimizer._update_count(index)
        if table.layout.catch_up:
            add_decay(optimizer, index, table, t, lr, wd)
        if table.layout.keyed:
            table.table[0, KEY] = optimizer.key(index)

    def _counted(self, optimizer: Any, index: Index) -> tuple[int, Rates]:
        """Return the number of an update, and its learning rate and weight decay.

        Optimizers that override how updates are counted have counted it.
        """
        counts = optimizer._index_update_count
        if optimizer.per_index:
            counts.slots([index], optimizer.begin_num_update)  # also if it is not counted
            return counted(optimizer, index)
        t = counts.get(index, optimizer.begin_num_update) + 1
        self.rates.largest = counts.largest
        rate = self.rates.at(optimizer, self.rates.next(optimizer, t))
        rates = optimizer.rates_at(rate, multipliers(optimizer, index))
        optimizer.check_rates(index, rates["lr"], rates["wd"])
        return t, rates

    def _collect(self) -> None:
        """Add the numbers that the tensors have kept to the sums of the step."""
        for optimizer in self._optimizers():
            if optimizer.step_sums is None:
                continue
            indices, numbers = [], []
            for own, call, table in zip(self.planners, self.calls, self.tables, strict=True):
                count = len(table.layout.rule.kept)
                if own.optimizer is optimizer:
                    indices.append(call[0])
                    numbers.append([array.item() for array in leaves(call[3])[-count:]])
            optimizer.step_sums.add(indices, numbers)
