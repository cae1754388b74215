"""From a call to launches: checks, masters and copies, counts, and the records of a step."""

import math
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba.core.errors import NumbaError

from fastopt.kernels import noise
from fastopt.kernels.layout import kind_of, real_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Table, launch
from fastopt.optimizer.border import (
    admit,
    check,
    check_like,
    check_state,
    is_half,
    label,
    leaves,
)
from fastopt.optimizer.rates import Array, Index, Rates
from fastopt.sparse import HALVES, RowSparse

__all__ = ["TRANSIENT", "Planner"]

COMPILING = (NumbaError, TypeError, KeyError)
"""What comes out of a launch when a rule cannot be compiled, before anything has run."""


TRANSIENT = ("lock", "_known", "copies", "_warned")
"""Attributes that serve the present process only, or are arrays of the user's."""


@dataclass(frozen=True, slots=True)
class Known:
    """The table of one index, and the objects that it was made of."""

    table: Table
    weight: Array
    state: Any
    copy: Array | None

    def made_of(self, rule: Rule, weight: Any, state: Any, copy: Any) -> bool:
        """Whether these are the same objects."""
        return (
            self.table.layout.rule is rule
            and self.weight is weight
            and self.state is state
            and self.copy is copy
        )


class Planner(Rates):
    """Abstract base of :class:`~fastopt.optimizer.Optimizer`, which documents the arguments."""

    native: ClassVar[bool]
    multi_precision: bool
    lazy_update: bool
    sparse_decay: str
    master: str
    rounding: str
    seed: int
    state_dtype: str | None
    rule: Any
    hyper: Callable[[int, float, float], Mapping[str, float]]
    decay: Callable[[int, float, float], float]
    _record: Callable[[Rule, float, float, Mapping[str, float]], tuple[float, ...]]
    row_decay: dict[Index, tuple[Array, float]]
    masters_given: dict[Index, Array]

    _rounded_sums: ClassVar[bool] = False
    """Whether the passes of a rule see a weight with a master as it was rounded."""

    _master_last: ClassVar[bool] = False
    """Whether the state is nested as (state, master) instead of (master, state)."""

    def _forget(self) -> None:
        """Start without what serves the present process only."""
        self.lock = threading.RLock()  # for threads that share the optimizer
        self._known: dict[Index, Known] = {}
        self.copies: dict[Index, Array] = {}
        self._warned = False

    # What subclasses may say otherwise; Optimizer documents the public ones

    def _rule_of(self, index: Index) -> Rule | None:
        """Rule of one parameter, for classes that treat some of them differently."""
        rule: Rule | None = self.rule
        return rule

    def _count_and_rates(self, index: Index) -> tuple[float, float]:
        """Count one update, then look up rate and decay."""
        self._update_count(index)
        return self._get_lr(index), self._get_wd(index)

    def _hyper_of(self, index: Index, lr: float, wd: float) -> Mapping[str, float]:
        """Fields of one parameter, for rules whose fields depend on more than ``t, lr, wd``."""
        return self.hyper(self._index_update_count[index], lr, wd)

    # Steps

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update `weight` and `state` in place.

        Parameters
        ----------
        index : int or str
            The parameter; counts and multipliers belong to it.
        weight : numpy.ndarray
            The weight: float32, float64, float16 or bfloat16.
        grad : numpy.ndarray or RowSparse
            Gradient of the weight's shape and dtype; float32 too for half-precision weights. It
            is not changed.
        state : None, numpy.ndarray or tuple
            What :meth:`create_state` returned.

        Raises
        ------
        TypeError, ValueError
            The arrays do not fit, or the rate is not a number of at least 0. Nothing changes.
        """
        self._step(index, weight, grad, state, masters=False)

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update a weight that may have a float32 master.

        Takes what :meth:`update` does, with the state that :meth:`create_state_multi_precision`
        returned.
        """
        if self.native:
            self._step(index, weight, grad, state, masters=True)
            return
        words, copy = label(index, self.idx2name), self.copies.get(index)
        if copy is not None:
            self._check_copy(words, weight, copy)
            self.update(index, weight, _widened(grad), state)
            _round_into(copy, weight)
        elif self._has_master(weight):
            exact, inner = self._unnested(words, weight, state)
            if len(exact) != 2 or exact[0].dtype != np.float32:
                raise TypeError(f"{words}: an update() in NumPy needs master='float32'")
            self.update(index, exact[0], _widened(grad), inner)
            _round_into(weight, exact[0])
        else:
            self.update(index, weight, grad, state)

    def update_all(self, calls: Sequence[tuple[Index, Array, Any, Any]]) -> None:
        """Update several parameters; a class with a rule checks all of them before any changes.

        Parameters
        ----------
        calls : sequence of (index, weight, grad, state)
            Arguments of :meth:`update_multi_precision`, in order.

        Raises
        ------
        TypeError, ValueError
            As :meth:`update` does.
        """
        if not self.native:
            for call in calls:
                self.update_multi_precision(*call)
            return
        with self.lock:
            saved = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(self).items()}
            repeated = len({index for index, *_ in calls}) < len(calls)
            tables: list[Table] = []
            try:
                for call in calls:
                    tables.extend(self._plan(*call))
                    if repeated:  # the next call for this index needs a table of its own
                        self._known.clear()
            except BaseException:
                self.__dict__.update(saved)
                raise
            try:
                launch(tables)
            except COMPILING as error:
                self.__dict__.update(saved)
                raise self._uncompiled(calls[0][0], error) from error

    def _step(self, index: Index, weight: Array, grad: Any, state: Any, masters: bool) -> None:
        with self.lock:
            before = self._index_update_count.get(index), self.num_update
            decayed = self.row_decay.get(index)
            tables = self._plan(index, weight, grad, state, masters)
            try:
                launch(tables)
            except COMPILING as error:
                self._reset_count(index, *before)
                if decayed:
                    self.row_decay[index] = decayed
                raise self._uncompiled(index, error) from error

    def _plan(
        self, index: Index, weight: Array, grad: Any, state: Any, masters: bool = True
    ) -> Sequence[Table]:
        """Count one update and return what to launch for it, in order."""
        rule = self._rule_of(index)
        if rule is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a rule nor an update()")
        table = self._table(index, rule, weight, grad, state, masters)
        self._advance(index, table)
        return (table,)

    def _table(
        self, index: Index, rule: Rule, weight: Array, grad: Any, state: Any, masters: bool = True
    ) -> Table:
        """Table of this index; that of the last call where it still holds."""
        known, copy = self._known.get(index), self.copies.get(index)
        if known is not None and not known.made_of(rule, weight, state, copy):
            known = None
        dense = type(grad) is np.ndarray
        if known is not None and dense and not known.table.layout.sparse:  # noqa: SIM102
            if known.table.take(grad) < 0:
                return known.table
        words = label(index, self.idx2name)
        grad = self._by_row(check(words, weight, grad, copy))
        table = known.table if known is not None else None
        if table is None or not (isinstance(grad, RowSparse) and self._serves(table, grad)):
            exact, arrays = self._parts(words, rule, weight, state, copy, masters)
            table = admit(
                words, rule, exact, grad, arrays, **self._options(rule, exact, grad, copy)
            )
            if table.arrays[0] is exact[0] and not isinstance(state, list):
                self._known[index] = Known(table, weight, state, copy)
        if isinstance(grad, RowSparse):
            table.list_rows(words, grad)
        return table

    def _by_row(self, grad: Any) -> Any:
        """The gradient, with all its rows listed where decay is kept by row."""
        if self.sparse_decay == "touched" or isinstance(grad, RowSparse) or not grad.ndim:
            return grad
        return RowSparse(grad, np.arange(len(grad)), grad.shape)

    def _serves(self, table: Table, grad: RowSparse) -> bool:
        """Whether a table that was made for a gradient that listed rows still holds for `grad`."""
        layout = table.layout
        return (
            layout.sparse
            and layout.lazy == (self.lazy_update and layout.rule.row is None)
            and layout.grad == kind_of(grad.dtype)
            and table.take() < 0
        )

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

    def _parts(
        self, words: str, rule: Rule, weight: Array, state: Any, copy: Array | None, masters: bool
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The exact weight with its copy or remainder, and the arrays of the rule's state."""
        exact: tuple[Array, ...] = (weight,)
        if copy is not None:
            self._check_copy(words, weight, copy)
            exact = (weight, copy)
        if masters and self._has_master(weight):
            exact, state = self._unnested(words, weight, state)
        arrays = leaves(state)
        check_state(words, rule, weight, _state_dtypes(weight), arrays)
        return exact, arrays

    # Masters and copies

    def set_master(self, index: Index, array: Array, state: Any) -> None:
        """See :meth:`Updater.set_master <fastopt.optimizer.Updater.set_master>`."""
        words = label(index, self.idx2name)
        if not self.multi_precision:
            raise ValueError(f"{words}: a master needs an optimizer with multi_precision=True")
        check_like(words, "master", array, ("float32",), np.shape(array), written=False)
        if state is None:
            self.masters_given[index] = array.copy()
            return
        if self.master == "split" or not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ValueError(
                f"{words}: a split or missing master cannot be set after the first update"
            )
        held = state[self._master_last]
        check_like(words, "state's master", held, ("float32",), array.shape)
        held[...] = array

    def set_copy(self, index: Index, array: Array | None) -> None:
        """See :meth:`Updater.set_copy <fastopt.optimizer.Updater.set_copy>`."""
        with self.lock:
            if array is None:
                self.copies.pop(index, None)
                return
            check_like(label(index, self.idx2name), "copy", array, HALVES, np.shape(array))
            self.copies[index] = array

    def _check_copy(self, words: str, weight: Array, copy: Array) -> None:
        if weight.dtype != np.float32:
            raise TypeError(f"{words}: only a float32 weight has a copy, got {weight.dtype}")
        check_like(words, "copy", copy, HALVES, weight.shape)

    def _has_master(self, weight: Array) -> bool:
        return self.multi_precision and is_half(weight)

    def _nested(self, inner: Any, master: Array) -> Any:
        """State of a weight with a master."""
        return (inner, master) if self._master_last else (master, inner)

    def _unnested(self, words: str, weight: Array, state: Any) -> tuple[tuple[Array, ...], Any]:
        """The master with the weight, or the weight with its remainder; and the inner state."""
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ValueError(
                f"{words}: the state of a weight with a master must be a pair of master and state, "
                f"got {type(state).__name__}"
            )
        inner, master = state if self._master_last else state[::-1]
        check_like(words, "master", master, ("float32", "uint16"), weight.shape)
        if master.dtype == np.float32:
            return (master, weight), inner
        if weight.dtype.name != "bfloat16":
            raise TypeError(f"{words}: only a bfloat16 weight has a split master")
        return (weight, master), inner

    # Counts and records

    def _advance(self, index: Index, table: Table) -> None:
        """Count one update and fill the table's record for it; all or nothing."""
        count, num_update = self._index_update_count.get(index), self.num_update
        try:
            lr, wd = self._count_and_rates(index)
            rule = table.layout.rule
            fields = self._record(rule, lr, wd, self._hyper_of(index, lr, wd))
            table.fill(fields, self._key(index) if table.layout.keyed else 0)
            if table.layout.catch_up:
                self._pay(index, table, lr, wd)
        except BaseException:
            self._reset_count(index, count, num_update)
            raise

    def _pay(self, index: Index, table: Table, lr: float, wd: float) -> None:
        """Add the decay of this step to the total that each row is to come to."""
        amount = self.decay(self._index_update_count[index], lr, wd)
        if not amount < 1:
            raise ValueError(
                f"{label(index, self.idx2name)}: sparse_decay={self.sparse_decay!r} needs rate "
                f"times decay below 1, got {amount}"
            )
        rows = len(table.arrays[0])
        paid, before = self.row_decay.get(index, (None, 0.0))
        if paid is None:
            paid = np.zeros(rows)
        elif len(paid) != rows:
            raise ValueError(
                f"{label(index, self.idx2name)}: decay is kept for {len(paid)} rows, the weight "
                f"has {rows}"
            )
        after = before + math.log1p(-amount)
        table.pay(paid, before, after, at_once=self.sparse_decay == "dense")
        self.row_decay[index] = paid, after

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
            words, known = label(index, self.idx2name), self._known.get(index)
            if weight is None and known is None:
                raise ValueError(f"{words}: flush needs the weight, which was not updated yet")
            weight = known.weight if weight is None and known is not None else weight
            rule = self._rule_of(index)
            if index not in self.row_decay or rule is None or weight is None:
                return
            empty = np.empty((0, *weight.shape[1:]), weight.dtype)
            nothing = RowSparse(empty, np.empty(0, np.int64), weight.shape)
            table = self._table(index, rule, weight, nothing, state)
            paid, total = self.row_decay[index]
            table.pay(paid, total, total, at_once=False)
            table.settle()
            table.give_back()

    def _key(self, index: Index) -> int:
        number = zlib.crc32(index.encode()) if isinstance(index, str) else int(index)
        return noise.key(self.seed, number, self._index_update_count.get(index, 0))

    def _uncompiled(self, index: Index, error: Exception) -> TypeError:
        """Error in words for a rule that cannot be compiled; nothing has run then."""
        rule = self._rule_of(index)
        words = f"{label(index, self.idx2name)}: rule {rule.name if rule else ''}"
        if isinstance(error, KeyError):
            return TypeError(f"{words} reads h.{error.args[0]}, which its hyper=(...) lacks")
        told = [m[1] for m in re.finditer(r"Error: (?!Failed in)(.+)", str(error))]
        return TypeError(f"{words} cannot be compiled: {told[-1] if told else error}")


def _state_dtypes(weight: Array) -> tuple[str, str]:
    return np.dtype(real_of(weight.dtype)).name, "bfloat16"


@np.errstate(all="ignore")
def _round_into(target: Array, exact: Array) -> None:
    """Write `exact`, rounded; what is beyond the range becomes infinite without a warning."""
    target[...] = exact


def _widened(grad: Any) -> Any:
    """The gradient in float32."""
    return grad.astype(np.float32) if isinstance(grad, RowSparse) else np.asarray(grad, np.float32)
