"""The table of each parameter, remembered from call to call, and the decay of its rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastopt.interrupts import uninterrupted
from fastopt.kernels.device_memory import like, placed
from fastopt.kernels.devices import header
from fastopt.kernels.layout import OFFSET, kind_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Table
from fastopt.optimizer.border import (
    admit,
    check,
    check_like,
    described,
    is_fixed,
    is_half,
    label,
)
from fastopt.optimizer.masters import Masters
from fastopt.optimizer.rates import Array, Index
from fastopt.sparse import REALS, RowSparse

__all__ = ["Tables"]


@dataclass(frozen=True, slots=True)
class Known:
    """The table of one index, and the objects that it was made of."""

    table: Table
    weight: Array
    state: Any
    copy: Array | None
    mode: tuple[Any, ...]

    def made_of(self, rule: Rule, weight: Any, state: Any, copy: Any, mode: Any) -> bool:
        """Whether these are the same objects, to be treated alike."""
        return (
            self.table.layout.rule is rule
            and self.weight is weight
            and self.state is state
            and self.copy is copy
            and self.mode == mode
        )


class Tables(Masters):
    """Abstract base of :class:`~fastopt.optimizer.Optimizer`, which documents the arguments."""

    rule: Any
    lazy_update: bool
    sparse_decay: str
    rounding: str
    row_decay: dict[Index, tuple[Array, float]]
    decay: Callable[[int, float, float], float]

    def _forget(self) -> None:
        super()._forget()
        self._known: dict[Index, Known] = {}
        self.updated: dict[Index, Array] = {}  # the weight that was last seen
        self.offsets: dict[Index, int] = {}  # of weights that are slices, in the whole tensor

    def _rule_of(self, index: Index) -> Rule | None:
        """Rule of one parameter, for classes that treat some of them differently."""
        rule: Rule | None = self.rule
        return rule

    def _table(
        self, index: Index, rule: Rule, weight: Array, grad: Any, state: Any, masters: bool = True
    ) -> Table:
        """Table of this index; that of the last call where it still holds."""
        known, copy = self._known.get(index), self.copies.get(index)
        mode = masters, *self._modes()
        if known is not None and not known.made_of(rule, weight, state, copy, mode):
            known = None
        seen = grad if type(grad) is np.ndarray else self._described(index, grad)
        dense = isinstance(seen, np.ndarray)
        if known is not None and dense and not known.table.layout.sparse:  # noqa: SIM102
            if known.table.take(seen) < 0:
                return known.table
        words = label(index, self.idx2name)
        grad = self._by_row(check(words, weight, grad, copy))
        table = known.table if known is not None else None
        if table is None or not (isinstance(grad, RowSparse) and self._serves(table, grad)):
            lead = header(weight)
            exact, arrays = self._parts(words, rule, lead, state, copy, masters)
            options = self._options(rule, exact, grad, copy)
            table = admit(words, rule, exact, grad, arrays, lead, **options)
            table.entry[0, OFFSET] = self.offsets.get(index, 0)
            if table.direct and is_fixed(state):
                self._known[index] = Known(table, weight, state, copy, mode)
        if isinstance(grad, RowSparse):
            table.list_rows(words, grad)
        self.updated[index] = weight
        return table

    def _described(self, index: Index, grad: Any) -> Any:
        return described(label(index, self.idx2name), "gradient", grad)

    def _modes(self) -> tuple[Any, ...]:
        """Attributes that decide about layouts; they may be changed between calls."""
        return self.multi_precision, self.rounding, self.lazy_update, self.sparse_decay

    def _by_row(self, grad: Any) -> Any:
        """The gradient, with all its rows listed where decay is kept by row."""
        if self.sparse_decay == "touched" or isinstance(grad, RowSparse) or not grad.shape:
            return grad
        return RowSparse(grad, np.arange(len(grad)), grad.shape)

    def _serves(self, table: Table, grad: RowSparse) -> bool:
        """Whether a table that was made for a gradient that listed rows still holds for `grad`."""
        layout = table.layout
        return layout.sparse and layout.grad == kind_of(grad.dtype) and table.take() < 0

    def _options(
        self, rule: Rule, exact: tuple[Array, ...], grad: Any, copy: Array | None
    ) -> dict[str, bool]:
        """Fields of the layout that the arguments of the optimizer decide."""
        lazy = isinstance(grad, RowSparse) and self.lazy_update and rule.row is None
        return {
            "lazy": lazy,
            "catch_up": lazy and self.sparse_decay != "touched",
            "rounded_sums": self._rounded_sums and len(exact) == 2 and copy is None,
            "dither": self.rounding == "stochastic" and is_half(exact[0]) and len(exact) == 1,
        }

    def pay(self, index: Index, table: Table, lr: float, wd: float) -> None:
        """Add the decay of this step to the total that each row is to come to."""
        amount = self.decay(self._index_update_count.get(index, 0), lr, wd)
        if not amount < 1:
            raise ValueError(
                f"{label(index, self.idx2name)}: sparse_decay={self.sparse_decay!r} needs rate "
                f"times decay below 1, got {amount}"
            )
        paid, before = self._paid(index, table.arrays[0])
        after = before + math.log1p(-amount)
        table.pay(paid, before, after, at_once=self.sparse_decay == "dense")
        self.row_decay[index] = paid, after

    def _paid(self, index: Index, weight: Array) -> tuple[Any, float]:
        """What the decay of each row has come to, and that of a row that misses nothing."""
        rows = len(weight)
        paid, total = self.row_decay.get(index) or (like(weight, (rows,), np.float64), 0.0)
        if len(paid) != rows:
            raise ValueError(
                f"{label(index, self.idx2name)}: decay is kept for {len(paid)} rows, the weight "
                f"has {rows}"
            )
        return placed(paid, weight) if isinstance(paid, np.ndarray) else paid, total

    def flush(self, index: Index, weight: Array | None, state: Any) -> None:
        """Give all rows of a parameter the decay that they have missed.

        Parameters
        ----------
        index : int or str
            The parameter.
        weight : numpy.ndarray, optional
            Its weight; the one last updated in this process by default.
        state : None, numpy.ndarray or tuple
            Its state.

        Raises
        ------
        ValueError
            `weight` is not given and not known.
        """
        with self.lock:
            if weight is None:
                weight = self.updated.get(index)
            rule = self._rule_of(index)
            if weight is None:
                words = label(index, self.idx2name)
                raise ValueError(f"{words}: flush needs the weight, which was not updated yet")
            if index not in self.row_decay or rule is None:
                return
            of = header(weight)
            check_like(label(index, self.idx2name), "weight", of, REALS, np.shape(of))
            empty = like(of, (0, *of.shape[1:]), of.dtype)
            nothing = RowSparse(empty, np.empty(0, np.int64), of.shape)
            table = self._table(index, rule, weight, nothing, state)
            paid, total = self._paid(index, of)
            with uninterrupted:  # rows count as paid before copies of the weight are given back
                table.pay(paid, total, total, at_once=False)
                table.settle()
                table.give_back()
                self.row_decay[index] = paid, total  # which may have gone to the weight's device
