"""From a call to launches: counts, the records of a step, and lists."""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from fastopt.interrupts import uninterrupted
from fastopt.kernels import noise
from fastopt.kernels.devices import header, is_cuda
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Table, launch
from fastopt.optimizer.batch import Batch, Call
from fastopt.optimizer.border import is_fixed, label
from fastopt.optimizer.columns import fill
from fastopt.optimizer.counts import Counts
from fastopt.optimizer.rates import Array, Index
from fastopt.optimizer.tables import Tables
from fastopt.sparse import RowSparse

__all__ = ["TRANSIENT", "Planner", "round_into"]

COMPILING = (NumbaError, UnsupportedBytecodeError, TypeError, KeyError, AttributeError)
"""What comes out of a launch when a rule cannot be compiled, before anything has run."""

Snapshot = dict[str, tuple[Any, dict[Any, Any] | None]]
"""Attributes, and the items of those that are dictionaries."""

TRANSIENT = ("lock", "_known", "updated", "_batch", "copies", "_warned", "offsets", "launcher")
"""Attributes that serve the present process only, or are arrays of the user's."""


class Planner(Tables):
    """Abstract base of :class:`~fastopt.optimizer.Optimizer`, which documents the arguments."""

    native: ClassVar[bool]
    alike: ClassVar[bool]
    """Whether equal counts, rates and decays mean equal records."""
    carried: ClassVar[tuple[str, ...]] = ()
    """Attributes besides counts that go on with every update."""
    seed: int
    state_dtype: str | None
    hyper: Callable[[int, float, float], Mapping[str, float]]
    record: Callable[[Rule, float, float, Mapping[str, float]], tuple[float, ...]]

    def _forget(self) -> None:
        super()._forget()
        self._batch: Batch | None = None
        self._warned = False
        self.launcher: Callable[[Sequence[Table]], None] = launch

    def _count_and_rates(self, index: Index) -> tuple[float, float]:
        """Count one update, then look up rate and decay."""
        self._update_count(index)
        return self._get_lr(index), self._get_wd(index)

    def _hyper_of(self, index: Index, lr: float, wd: float) -> Mapping[str, float]:
        """Fields of one parameter, for rules whose fields depend on more than ``t, lr, wd``."""
        return self.hyper(self._index_update_count[index], lr, wd)

    def _skips(self) -> bool:
        """Whether steps are counted but nothing is updated."""
        return False

    @property
    def plain(self) -> bool:
        """Whether an update is one launch of a rule."""
        return self.native and type(self)._plan is Planner._plan

    @property
    def folds(self) -> bool:
        """Whether a factor of all gradients may be put into `rescale_grad`."""
        return self.plain and self.rule is not None and "rescale_grad" in self.rule.hyper

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

        Parameters
        ----------
        index, weight, grad
            As :meth:`update` takes them, with the same errors.
        state : None, numpy.ndarray or tuple
            What :meth:`create_state_multi_precision` returned.
        """
        if self.native:
            self._step(index, weight, grad, state, masters=True)
            return
        words, copy = label(index, self.idx2name), self.copies.get(index)
        if is_cuda(weight) and (copy is not None or self._has_master(header(weight))):
            raise TypeError(f"{words}: an update() in Python has no masters or copies on a device")
        if copy is not None:
            self._check_copy(words, weight, copy)
            self.update(index, weight, _widened(grad), state)
            round_into(copy, weight)
        elif self._has_master(weight):
            exact, inner = self._unnested(words, weight, state)
            if len(exact) != 2 or exact[0].dtype != np.float32:
                raise TypeError(f"{words}: an update() in NumPy needs master='float32'")
            self.update(index, exact[0], _widened(grad), inner)
            round_into(weight, exact[0])
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
        with self.lock:
            batch = self.prepare(calls)
            if batch is not None:
                self.run(batch)
            else:
                self.update_in_turn(calls)

    def update_in_turn(self, calls: Sequence[Call]) -> None:
        """Update tensors that share memory, or of a class that plans for itself, in order.

        Takes what :meth:`update_all` does.
        """
        if not self.native or not calls:
            for call in calls:
                self.update_multi_precision(*call)
            return
        saved = self._snapshot(vars(self))
        repeated = len({index for index, *_ in calls}) < len(calls)
        tables: list[Table] = []
        with uninterrupted:
            try:
                for call in calls:
                    tables.extend(self._plan(*call))
                    if repeated:  # the next call for this index needs a table of its own
                        self._known.clear()
                self._launch(tables, calls[0][0])
            except BaseException:
                self._restore(saved)
                raise

    def _snapshot(self, names: Iterable[str]) -> Snapshot:
        """Attributes, and what is in them; arrays apart."""
        kept = {name: getattr(self, name) for name in names}
        return {
            name: (value, dict(value) if isinstance(value, (dict, Counts)) else None)
            for name, value in kept.items()
        }

    def _restore(self, saved: Snapshot) -> None:
        """Set attributes back; dictionaries stay the objects that others may hold."""
        for name, (value, content) in saved.items():
            setattr(self, name, value)
            if content is not None:
                value.clear()
                value.update(content)

    def _launch(self, tables: Sequence[Table], index: Index) -> None:
        """Launch `tables`; errors of a rule that cannot be compiled are told in words."""
        try:
            self.launcher(tables)
        except COMPILING as error:
            raise self._uncompiled(index, error) from error

    # Lists

    def prepare(self, calls: Sequence[Call]) -> Batch | None:
        """Check a list call and enter its arrays into tables, which are remembered.

        Returns None where tensors share memory and must be updated one after the other, and for
        classes that plan for themselves. Nothing is counted yet.
        """
        self._batch = None
        distinct = len({index for index, *_ in calls}) == len(calls)
        if not (calls and distinct and self.plain):
            return None
        tables = [self._table(index, self._a_rule(index), *rest) for index, *rest in calls]
        counts, begin = self._index_update_count, self.begin_num_update
        mode, copies = self._mode([index for index, *_ in calls]), list(self.copies.values())
        batch = Batch(calls, tables, counts, begin, mode, copies)
        if not (batch.take([grad for _, _, grad, _ in calls]) and batch.disjoint()):
            return None
        if all(is_fixed(state) for *_, state in calls):
            self._batch = batch
        return batch

    def recall(
        self, indices: list[Any], weights: list[Any], grads: list[Any], states: Mapping[Index, Any]
    ) -> Batch | None:
        """Batch of the last list call, with the present gradients, if it still holds."""
        batch, self._batch = self._batch, None
        if batch is None or not batch.matches(indices, weights, states):
            return None
        if batch.counts is not self._index_update_count or batch.mode != self._mode(batch.indices):
            return None
        for place in batch.singles:
            index, weight, state = batch.indices[place], batch.weights[place], batch.states[place]
            table = self._table(index, self._a_rule(index), weight, grads[place], state)
            batch.rows[place] = table, 0
        if not batch.take(grads):
            return None
        self._batch = batch
        return batch

    def _mode(self, indices: Sequence[Index]) -> tuple[Any, ...]:
        """What decides about the layouts, besides the arrays."""
        alike = type(self)._rule_of is Planner._rule_of
        rules = self.rule if alike else [self._rule_of(index) for index in indices]
        return (*self._modes(), rules, [(index, id(copy)) for index, copy in self.copies.items()])

    def run(self, batch: Batch) -> None:
        """Count one update of every tensor of a batch that has been prepared, and launch it."""
        light = batch.slots is not None and self.alike
        if light:  # all that fill() changes, besides counts
            decay = self.row_decay
            saved: Snapshot = {
                "num_update": (self.num_update, None),
                "row_decay": (decay, dict(decay)),
            }
        else:
            saved = self._snapshot(vars(self))
        counted = batch.counts.array[batch.places()] if light else None
        with uninterrupted:
            try:
                if self.alike:
                    fill(self, batch)
                else:
                    for index, (table, row) in zip(batch.indices, batch.rows, strict=True):
                        self._advance(index, table, row)
                if self._skips():
                    batch.let_go()
                else:
                    self._launch(batch.tables, batch.indices[0])
            except BaseException:
                self._restore(saved)
                if counted is not None:
                    batch.counts.array[batch.places()] = counted
                raise

    def _step(self, index: Index, weight: Array, grad: Any, state: Any, masters: bool) -> None:
        if type(self)._plan is not Planner._plan:  # which may launch several tables
            with uninterrupted:
                self._step_once(index, weight, grad, state, masters)
        else:
            self._step_once(index, weight, grad, state, masters)

    def _step_once(self, index: Index, weight: Array, grad: Any, state: Any, masters: bool) -> None:
        with self.lock:
            count, num_update = self._index_update_count.get(index), self.num_update
            decayed = self.row_decay.get(index) if self.row_decay else None
            carried = self._snapshot(self.carried) if self.carried else {}
            tables: Sequence[Table] = ()
            try:
                tables = self._plan(index, weight, grad, state, masters)
                self._launch(tables, index)
            except BaseException:
                if not (tables and tables[-1].done):
                    self._reset_count(index, count, num_update)
                    self._restore(carried)
                    self.row_decay.pop(index, None)
                    if decayed:
                        self.row_decay[index] = decayed
                raise

    def _plan(
        self, index: Index, weight: Array, grad: Any, state: Any, masters: bool = True
    ) -> Sequence[Table]:
        """Count one update and return what to launch for it, in order."""
        rule = self._rule_of(index) or self._a_rule(index)
        table = self._table(index, rule, weight, grad, state, masters)
        self._advance(index, table)
        if self._skips():
            table.let_go()
            return ()
        return (table,)

    def _a_rule(self, index: Index) -> Rule:
        rule = self._rule_of(index)
        if rule is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a rule nor an update()")
        return rule

    # Counts and records

    def _advance(self, index: Index, table: Table, row: int = 0) -> None:
        """Count one update and fill the tensor's record for it."""
        lr, wd = self._count_and_rates(index)
        layout = table.layout
        if layout.catch_up:  # before _hyper_of, which may go on with a schedule
            self.pay(index, table, lr, wd)
        fields = self.record(layout.rule, lr, wd, self._hyper_of(index, lr, wd))
        table.fill(fields, self.key(index) if layout.keyed else 0, row)

    def key(self, index: Index) -> int:
        """Key of the random numbers of this update."""
        number = zlib.crc32(index.encode()) if isinstance(index, str) else int(index)
        return noise.key(self.seed, number, self._index_update_count.get(index, 0))

    def _uncompiled(self, index: Index, error: Exception) -> TypeError:
        """Error in words for a rule that cannot be compiled; nothing has run then."""
        rule = self._rule_of(index)
        words = f"{label(index, self.idx2name)}: rule {rule.name if rule else ''}"
        if isinstance(error, KeyError):
            return TypeError(f"{words} reads h.{error.args[0]}, which its hyper=(...) lacks")
        told = re.findall(r"Error: (?!Failed in)(.+)", str(error))
        told = told or re.findall(r"Failed in .+\n *(?! |No implementation)(.+)", str(error))
        told = told or [f"there is no {call}" for call in re.findall(r">>> (.+\))", str(error))]
        return TypeError(f"{words} cannot be compiled: {told[-1] if told else error}")


@np.errstate(all="ignore")
def round_into(target: Array, exact: Array) -> None:
    """Write `exact`, rounded; what is beyond the range becomes infinite without a warning."""
    target[...] = exact


def _widened(grad: Any) -> Any:
    """The gradient in float32."""
    return grad.astype(np.float32) if isinstance(grad, RowSparse) else np.asarray(grad, np.float32)
