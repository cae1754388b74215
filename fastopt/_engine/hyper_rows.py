"""Hyper-parameters of records: a row of words, and the numbers that it has the address of.

Tests: ``tests/engine/test_records.py``.
"""

from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.hyper import (
    Hyper,
    check_returned,
    completed,
    hyper_of,
    reads_no_rates,
    values_of,
)
from fastopt._engine.per_index import Index
from fastopt._engine.validate import label
from fastopt._kernels import cpu_addresses
from fastopt._kernels import record_words as w
from fastopt._kernels.advance import step as corrected_fields
from fastopt._kernels.layout import Layout
from fastopt._kernels.numpy_abi import address_of
from fastopt.kernels.rule import Rule

Words = NDArray[np.int64]

Rates = dict[str, float]
"""Learning rate before multipliers ``rate``, after them ``lr``, and weight decay ``wd``.

With them are the fields of :meth:`Optimizer.fields_of`.
"""

RATES = ("rate", "lr", "wd")
"""Hyper-parameters that schedules change."""

READ = {"average_rate", "clip_gradient", "rescale_grad"}
"""Hyper-parameters that are not entered as they are, or not alone."""

IMMUTABLE = {float, int}
"""Types of numbers that can be compared later with those that ``hyper()`` returns then."""


def rate_at(
    optimizer: OptimizerLike, update: int, rates: dict[tuple[OptimizerLike, int], float]
) -> float:
    """Return the rate before multipliers at an update count, which a schedule can ask for.

    `rates` has those that have been asked for, by optimizer and update count.
    """
    if optimizer.lr_scheduler is not None:
        optimizer._index_update_count.largest = update
    if (optimizer, update) not in rates:
        rates[optimizer, update] = float(optimizer.learning_rate)
    return rates[optimizer, update]


def multipliers(optimizer: OptimizerLike, index: Index) -> tuple[Any, ...]:
    """Return a parameter's multipliers of learning rate and weight decay, and its own fields."""
    return (
        optimizer.multiplier(index, optimizer.lr_mult, "lr_mult"),
        optimizer.multiplier(index, optimizer.wd_mult, "wd_mult"),
        *optimizer.fields_of(index).items(),
    )


@cache
def names_of(rule: Rule, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all hyper-parameters of a rule, the `extra` ones last."""
    return (*rule.hyper, *(name for name in extra if name not in rule.hyper))


class Shared:
    """Hyper-parameters of parameters with equal multipliers.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer of the parameters.
    layout : Layout
        The layout of the parameters.
    hyper : Hyper
        How the hyper-parameters are computed.
    multipliers : tuple
        Of learning rate and weight decay, and pairs of the parameters' own fields.
    """

    def __init__(
        self, optimizer: OptimizerLike, layout: Layout, hyper: Hyper, multipliers: tuple[Any, ...]
    ) -> None:
        rule = self.rule = layout.rule
        if optimizer.per_index:
            hyper = hyper._replace(correct=None, extra=())  # see counted()
        self.optimizer, self.hyper, self.multipliers = optimizer, hyper, multipliers
        self.layout, self.version = layout, -1
        self.names = names = names_of(rule, hyper.extra)
        self.rates = [0] * len(RATES)
        """Columns of RATES in `values`, 0 for those that ``hyper()`` computes."""
        memory: Words = np.zeros(w.HYPER_WORDS + 1 + 2 * len(names), np.int64)
        self.words, self.values = memory[: w.HYPER_WORDS], memory[w.HYPER_WORDS :].view(np.float64)
        self.words_view: Any = self.words.data
        self.view: Any = self.values.data
        self.given: Mapping[str, float] | None = None
        self.summed = optimizer.step_sums is not None
        self.columns: dict[str, int] = {}
        """Columns in `values` of what ``hyper()`` returns, 0 for what the rule does not read.

        Empty if some of it is not entered as it is.
        """
        self.checked = frozenset[str]()
        """Names that ``hyper()`` has returned, which are checked once."""
        self.complements: dict[str, int] = {}
        """Columns of 1 minus what ``hyper()`` returns, which it does not return itself."""
        self.fixed: bool | None = None
        """Whether ``hyper()`` reads no rates, so that it need not be called; None if unknown."""
        self.address, words = address_of(memory), self.words_view
        words[w.CARRIES] = int(hyper.carries)
        words[w.AHEAD] = int(not optimizer.rates_before_count)
        words[w.NAMES], words[w.OWN] = len(names), len(rule.hyper)
        words[w.RESCALE] = rule.rescale if optimizer.folds else -1
        words[w.WIDE] = int(layout.real is np.float64)
        words[w.VALUES] = self.address + 8 * w.HYPER_WORDS
        if hyper.correct is not None:
            words[w.PREPARE] = cpu_addresses.prepare(hyper.correct, names)
        self.carried: Any = None
        self.filled = 0.0, 0
        """Learning rate before multipliers and count of the last :meth:`fill`."""

    def find_carried(self) -> None:
        """Enter where the numbers are that parameters carry from step to step."""
        carried = self.optimizer.carried
        if carried is not None:
            self.carried = carried.array
            self.words[w.CARRIED_NUMBERS] = self.carried.ctypes.data

    def find_skips(self) -> None:
        """Enter whether updates are only counted."""
        self.words[w.SKIPS] = self.optimizer.skips()

    def fill(self, rate: float, time: int = 0, again: bool = False) -> None:
        """Compute the hyper-parameters for a learning rate before multipliers, and a count.

        With `again`, only these two can have changed. If an argument is invalid, calls are refused,
        and the full checks report the error.
        """
        optimizer, values = self.optimizer, self.view
        self.words[w.VALID], self.filled = 0, (rate, time)
        rates = optimizer.rates_at(rate, self.multipliers)
        lr, wd = rates["lr"], rates["wd"]
        least = optimizer.least_rate
        if not (least <= lr < inf and least <= wd < inf):
            return
        try:
            if not again:
                self.fixed = None
            if not self.fixed:
                fields = self.hyper.compute(optimizer, time, lr, wd)
                before = self.given if again else None
                if before is None or fields != before:
                    alike = before is not None and fields.keys() == self.columns.keys()
                    if alike and IMMUTABLE.issuperset(map(type, fields.values())):
                        for name, column in self.columns.items():
                            if column:
                                values[column] = fields[name]
                        for name, column in self.complements.items():
                            values[column] = 1 - fields[name]
                        self.given = fields
                    else:
                        self._enter(rates, fields)
                if again and self.fixed is None:
                    self.fixed = self.hyper.constant and reads_no_rates(
                        self.hyper, optimizer, fields
                    )
        except (TypeError, ValueError):
            return
        for column, name in zip(self.rates, RATES, strict=True):
            if column:
                values[column] = rates[name]
        values[0] = -1.0
        self.words[w.VALID] = 1

    def check(self, index: Index) -> None:
        """Raise the error because of which the last :meth:`fill` has failed, if it has.

        Raises
        ------
        TypeError, ValueError
            The learning rate, the weight decay or what ``hyper()`` returns is invalid.
        """
        optimizer, (rate, time) = self.optimizer, self.filled
        if self.words[w.VALID]:
            return
        rates = optimizer.rates_at(rate, self.multipliers)
        optimizer.check_rates(index, rates["lr"], rates["wd"])
        try:
            fields = self.hyper.compute(optimizer, time, rates["lr"], rates["wd"])
        except ValueError as error:
            raise ValueError(f"{label(index, optimizer.idx2name)}: {error}") from error
        values_of(optimizer, self.rule, self.names, rates, fields)
        check_returned(optimizer, self.names, rates, fields)

    def follow(self, rate: float) -> bool:
        """Enter a learning rate before multipliers, if nothing else has changed or depends on it.

        Otherwise return False.
        """
        lr = rate * self.multipliers[0]
        if not self.fixed or not 0 <= lr < inf or not self.words_view[w.VALID]:
            return False
        if self.optimizer.corrected_decay is not None:
            return False
        values, (rate_column, column, _) = self.view, self.rates
        if rate_column:
            values[rate_column] = rate
        if column:
            values[column] = lr
        values[0] = -1.0
        return True

    def _enter(self, rates: Rates, fields: Mapping[str, float]) -> None:
        """Enter all hyper-parameters, from those that ``hyper()`` has returned."""
        values = values_of(self.optimizer, self.rule, self.names, rates, fields)
        if fields.keys() != self.checked:
            check_returned(self.optimizer, self.names, rates, fields)
            self.checked = frozenset(fields)
        self.values[1 : 1 + len(values)] = values
        for k, name in enumerate(RATES):
            plain = name in self.names and name not in fields
            self.rates[k] = 1 + self.names.index(name) if plain else 0
        immutable = IMMUTABLE.issuperset(map(type, fields.values()))
        self.given, self.columns, self.complements = fields if immutable else None, {}, {}
        if READ.isdisjoint(fields):
            for name in fields:
                self.columns[name] = 1 + self.names.index(name) if name in self.names else 0
                other = f"one_minus_{name}"
                if other in self.names and other not in fields:
                    self.complements[name] = 1 + self.names.index(other)
        if self.summed or not immutable:
            self.fixed = False
        self.words[w.RESTS] = fields.get("average_rate") == 0

    def counted(self, index: Index, slot: int) -> tuple[int, Rates]:
        """Count an update with an optimizer that overrides how; return its number and its rates.

        The number that the parameter carries from step to step is at `slot`.
        """
        optimizer, base = self.optimizer, hyper_of(self.optimizer)
        optimizer._update_count(index)
        t = optimizer._index_update_count.get(index, 0)
        lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
        rate = optimizer.learning_rate if base.carries else lr
        rates = {"rate": rate, "lr": lr, "wd": wd, **optimizer.fields_of(index)}
        returned = completed(optimizer, base.extra, optimizer.hyper(t, lr, wd))
        fields: Mapping[str, float] = {**rates, **returned}
        if self.hyper.compute is not base.compute:  # that of an average
            fields = {**self.hyper.compute(optimizer, t, lr, wd), **fields}
        if base.carries and base.correct:
            carried = None if self.carried is None else self.carried[slot : slot + 1]
            fields = corrected_fields(t, fields, base.correct, carried)
        self._enter(rates, fields)
        self.words[w.VALID] = 1
        return t, rates
