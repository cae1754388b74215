"""What an updater knows besides records, and the full checks of the arrays of a call."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from fastopt._engine.averaging import Averages, AveragingStep
from fastopt._engine.device_records import DeviceRecords
from fastopt._engine.forms import is_pitched
from fastopt._engine.hyper import hyper_of
from fastopt._engine.lazy_decay import decay_of
from fastopt._engine.mixed_precision import arrays_of
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records
from fastopt._engine.unrecorded import UnrecordedCall
from fastopt._engine.validate import (
    check,
    check_apart,
    check_like,
    check_together,
    is_fortran,
    is_half,
    label,
    roles_of,
)
from fastopt._interrupts import uninterrupted
from fastopt._kernels.compiling import bind
from fastopt._kernels.device_memory import arranged, contiguous, lie_alike, like
from fastopt._kernels.devices import Header, header, is_cuda
from fastopt._kernels.layout import OFFSET, SPLIT, Layout, real_of, state_kind
from fastopt._kernels.numpy_abi import C_ORDER, F_ORDER
from fastopt._kernels.table import Table, launch
from fastopt._structure import Structures
from fastopt.amp import StepInfo
from fastopt.kernels.rule import Rule
from fastopt.sparse import HALVES, REALS, RowSparse

Array = np.ndarray[Any, Any]

Call = tuple[Index, Any, Any, Any]
"""Index, weight, gradient and state."""

COMPILING = (NumbaError, UnsupportedBytecodeError, TypeError, KeyError, AttributeError)
"""Errors raised by a launch if a rule cannot be compiled, before anything has run."""


class Planner:
    """Optimizer and records of an updater, and what the user has set for its parameters.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    masters : bool
        Whether states hold the masters of half-precision weights. Default True.
    check : callable
        Function that checks weight and gradient. Default: :func:`fastopt._engine.validate.check`.

    Attributes
    ----------
    copies : dict
        Half-precision copy of the weight, by index.
    offsets : dict
        Offset of a weight that is a slice of a larger tensor, by index.
    updated : dict
        The weight of the last update, by index.
    measures : bool
        Whether gradients are measured, summed or clipped before an update.
    structures : Structures
        Paths of the nested structures that have been updated.
    groups : fastopt.optimizer.groups.Groups or None
        Parameter groups with other optimizers, each with its own planner.
    averages : Averages or None
        Weight averages that updates maintain.
    """

    def __init__(
        self, optimizer: Any, masters: bool = True, check: Callable[..., Any] = check
    ) -> None:
        self.optimizer, self.masters, self.check = optimizer, masters, check
        self.copies: dict[Index, Any] = {}
        self.offsets: dict[Index, int] = {}
        self.updated: dict[Index, Any] = {}
        self.measures = False
        self.structures = Structures()
        self.groups: Any = None
        self.averages: Averages | None = None
        self.records, self.devices = Records(), DeviceRecords(self)

    def forget(self) -> None:
        """Drop all records, between the calls of other threads."""
        with self.optimizer.call_lock:
            self.records.forget()
            self.devices.forget()

    def mode(self, indices: Sequence[Index]) -> tuple[Any, ...]:
        """Return everything besides the arrays that determines the kernels of these indices."""
        optimizer = self.optimizer
        rules = optimizer.rule
        if optimizer.rule_by_index:
            rules = [optimizer.rule_for(index) for index in indices]
        return (
            rules,
            hyper_of(optimizer),
            optimizer.multi_precision,
            optimizer.rounding,
            optimizer.lazy_update,
            optimizer.sparse_decay,
            optimizer.seed,
            optimizer.in_list_order,
            optimizer.is_accumulating,
            optimizer.rates_before_count and optimizer.lr_scheduler is not None,
            None if self.groups is None else self.groups.generation(),
        )

    def optimizers(self) -> list[Any]:
        """Return the optimizer, and those of groups."""
        return [self.optimizer, *(self.groups.optimizers() if self.groups else ())]

    def modes(self) -> tuple[Any, ...]:
        """Return the :meth:`mode` of all optimizers, whatever the indices."""
        planners = [self, *(self.groups.planners() if self.groups else ())]
        return tuple(planner.mode(()) for planner in planners)

    def of(self, index: Index) -> "Planner":
        """Return the planner for the optimizer of a parameter."""
        if self.groups is None:
            return self
        found: Planner = self.groups.planner_of(index)
        return found

    @property
    def native(self) -> bool:
        """Whether all optimizers have rules: none overrides ``update()``."""
        return all(optimizer.native for optimizer in self.optimizers())

    @property
    def folds(self) -> bool:
        """Whether a factor of all gradients may be folded into `rescale_grad`."""
        return bool(self.optimizer.folds and (self.groups is None or self.groups.folds))

    def rule_of(self, index: Index) -> Rule:
        """Return the rule of a parameter; raise NotImplementedError if it has none."""
        rule: Rule | None = self.optimizer.rule_for(index)
        if rule is None:
            name = type(self.optimizer).__name__
            raise NotImplementedError(f"{name} has neither a rule nor an update()")
        return rule

    def take_over(self, other: "Planner") -> None:
        """Copy the user's settings from another planner."""
        self.copies, self.offsets = other.copies, other.offsets
        self.measures, self.averages = other.measures, other.averages

    def beside(self, optimizer: Any) -> Self:
        """Return a planner of the same weights for the optimizer of a group."""
        made = type(self)(optimizer)
        made.copies, made.offsets = self.copies, self.offsets
        return made

    def update_all(self, calls: Sequence[Call], single: bool = False, factor: float = 1.0) -> None:
        """Update tensors that have no records, with gradients times `factor`."""
        there = [call for call in calls if is_cuda(call[1])]
        if there:
            here = [call for call in calls if not is_cuda(call[1])]
            between = partial(self.update_all, here, factor=factor) if here else None
            self.devices.update_all(there, single, factor, between)
        elif self.optimizer.is_accumulating:
            launch = partial(self.launch, index=calls[0][0])
            self.accumulate_all(calls, lambda one: UnrecordedCall(self, one).count(), launch)
        elif calls:
            call = UnrecordedCall(self, calls)
            call.step(factor)
            call.finish()

    def stepped(self, info: StepInfo, indices: Sequence[Index]) -> StepInfo:
        """Return the outcome of a call of parameters whose updates may only have been counted."""
        if self.optimizer.is_accumulating:
            updated = any(map(self.optimizer.completes, indices))
        else:
            updated = not self.skips
        return info if updated else info._replace(stepped=False)

    @property
    def skips(self) -> bool:
        """Whether updates are only counted now."""
        return all(each.may_skip and each.skips() for each in self.optimizers())

    # Accumulation

    def accumulate_all(
        self,
        calls: Sequence[Call],
        count: Callable[[Sequence[Call]], Sequence[Any]],
        launch: Callable[[Sequence[Any]], None],
    ) -> None:
        """Update with an optimizer that sums the gradients of several calls.

        `count` counts an update with a complete sum, and returns its tables; `launch` launches all.
        """
        optimizer = self.optimizer
        before = optimizer.snapshot()
        tables: list[Any] = []
        with uninterrupted:
            try:
                for index, weight, grad, state in calls:
                    context, copy = label(index, optimizer.idx2name), self.copies.get(index)
                    grad = check(context, weight, grad, copy)
                    total, adding = optimizer.accumulate(context, index, grad, weight)
                    tables += adding
                    if total is None:
                        optimizer.count_only(index)
                    else:
                        tables += count([(index, weight, total, state)])
                launch(tables)
                self.updated.update((index, weight) for index, weight, *_ in calls)
            except BaseException:
                if not (tables and tables[-1].done):
                    optimizer.put_back(before)
                raise

    # Tables

    def table(
        self,
        index: Index,
        weight: Any,
        grad: Any,
        state: Any,
        averaging: AveragingStep | None = None,
    ) -> Any:
        """Check the arrays of one tensor and create its table."""
        optimizer, copy = self.optimizer, self.copies.get(index)
        context, rule = label(index, optimizer.idx2name), self.rule_of(index)
        grad = self.by_row(self.check(context, weight, grad, copy))
        lead = header(weight)
        exact, arrays = arrays_of(optimizer, context, rule, lead, state, copy, self.masters)
        lazy = isinstance(grad, RowSparse) and optimizer.lazy_update and rule.row is None
        after = None
        if averaging is not None:
            averaging.count(index)
            if lazy and averaging.average.alternates:
                after = self._whole(averaging, index, exact, lead)
            else:
                rule, arrays = averaging.derived(index, rule, exact, arrays)
        table = table_of(
            context,
            rule,
            exact,
            grad,
            arrays,
            lead,
            lazy=lazy,
            catch_up=lazy and optimizer.sparse_decay != "touched",
            rounded_sums=optimizer.rounded_sums and len(exact) == 2 and copy is None,
            dither=optimizer.rounding == "stochastic" and is_half(exact[0]) and len(exact) == 1,
        )
        table.after, table.table[0, OFFSET] = after, self.offsets.get(index, 0)
        if isinstance(grad, RowSparse):
            table.list_rows(context, grad)
        return table

    def _whole(
        self, averaging: AveragingStep, index: Index, exact: tuple[Array, ...], lead: Any
    ) -> Any:
        """Return a table that averages all rows of a weight after the indexed rows' update."""
        context, nothing = label(index, self.optimizer.idx2name), _no_rows(lead)
        state = (header(averaging.array(index, exact)),)
        table = table_of(context, averaging.average.alone, exact, nothing, state, lead)
        table.list_rows(context, nothing)
        table.fields[0] = averaging.rate(index)
        return table

    def by_row(self, grad: Any) -> Any:
        """Return the gradient; if decay is deferred per row, row-sparse with all rows indexed."""
        keeps = self.optimizer.sparse_decay != "touched"
        if not keeps or isinstance(grad, RowSparse) or not grad.shape:
            return grad
        return RowSparse(grad, np.arange(len(grad)), grad.shape)

    def compiled(self, index: Index, kernel: Any, *arguments: Any) -> Any:
        """Return a kernel bound to argument types like those of `arguments`."""
        with self.compiling(index):
            return bind(kernel, *arguments)

    @contextmanager
    def compiling(self, index: Index) -> Iterator[None]:
        """Context that raises compilation errors with the reason why a rule cannot be compiled."""
        try:
            yield
        except COMPILING as error:
            raise self.uncompiled(index, error) from error

    def run(self, tables: Sequence[Table]) -> None:
        """Launch the kernels of `tables`."""
        launch(tables)

    def launch(self, tables: Sequence[Table], index: Index) -> None:
        """Launch the kernels of `tables`; a compilation error is raised with its reason."""
        try:
            self.run(tables)
        except COMPILING as error:
            raise self.uncompiled(index, error) from error

    def uncompiled(self, index: Index, error: Exception) -> TypeError:
        """Return an error with the reason why a rule cannot be compiled."""
        rule = self.optimizer.rule_for(index)
        context = f"{label(index, self.optimizer.idx2name)}: rule {rule.name if rule else ''}"
        if isinstance(error, KeyError):
            return TypeError(f"{context} reads h.{error.args[0]}, which its hyper=(...) lacks")
        reasons = re.findall(r"Error: (?!Failed in)(.+)", str(error))
        reasons = reasons or re.findall(r"Failed in .+\n *(?! |No implementation)(.+)", str(error))
        reasons = reasons or [
            f"there is no {call}" for call in re.findall(r">>> (.+\))", str(error))
        ]
        reason = reasons[-1] if reasons else str(error)
        if rule and "tuple index out of range" in reason:
            reason = f"{reason}; its state has the slots {rule.state}"
        return TypeError(f"{context} cannot be compiled: {reason}")

    # Copies and deferred decay

    def set_copy(self, index: Index, array: Any) -> None:
        """See :meth:`Updater.set_copy <fastopt.optimizer.Updater.set_copy>`."""
        with self.optimizer.call_lock:
            if array is not None:
                of = header(array)
                check_like(label(index, self.optimizer.idx2name), "copy", of, HALVES, np.shape(of))
                self.copies[index] = array
            else:
                self.copies.pop(index, None)
            self.forget()

    def flush(self, index: Index, weight: Any, state: Any) -> bool:
        """Apply the deferred decay of all rows of `weight`; return whether there is any."""
        optimizer = self.optimizer
        if index not in optimizer.row_decay or optimizer.rule_for(index) is None:
            return False
        of = header(weight)
        check_like(label(index, optimizer.idx2name), "weight", of, REALS, np.shape(of))
        table = self.table(index, weight, _no_rows(of), state)
        rows, total = decay_of(optimizer, index, of)
        with uninterrupted:  # between marking rows as decayed and copying the weight back
            table.apply_decay(rows, total, total, at_once=False)
            table.flush_decay()
            table.copy_back()
            optimizer.row_decay[index] = rows, total  # moved to the weight's device if needed
        return True


def _no_rows(weight: Array) -> RowSparse:
    """Return a row-sparse gradient without rows."""
    empty = like(weight, (0, *weight.shape[1:]), weight.dtype)
    return RowSparse(empty, np.empty(0, np.int64), weight.shape)


def table_of(
    context: str,
    rule: Rule,
    weight: tuple[Array, ...],
    grad: Any,
    state: tuple[Array, ...],
    lead: Any = None,
    **options: bool,
) -> Any:
    """Create the table of one tensor from arrays that have been checked.

    Parameters
    ----------
    context : str
        Label of the parameter.
    rule : Rule
        The update rule.
    weight : tuple of numpy.ndarray
        The exact weight, and its half-precision copy or low 16 bits if it has one.
    grad : numpy.ndarray or RowSparse
        The gradient.
    state : tuple of numpy.ndarray
        One array for each slot of the rule, each number that the rule keeps for a tensor, and the
        scales of each slot with 8-bit codes.
    lead : numpy.ndarray, optional
        On a device, the array whose stream is used. Default: the exact weight.
    **options
        Further fields of the layout.

    Raises
    ------
    ValueError
        Arrays share memory.
    """
    sparse = isinstance(grad, RowSparse)
    values = header(grad.values if isinstance(grad, RowSparse) else grad)
    arrays = (*weight, *state, values)
    named = {"weight": weight[0], "gradient": values, **dict(roles_of(rule, weight, state))}
    check_together(context, named)
    if sparse:
        del named["gradient"]  # list_rows() copies values that lie in a state
    check_apart(context, named)
    parts = len(weight)
    by_row = sparse and not rule.passes and (options.get("lazy") or rule.row is not None)
    kinds = [state_kind(array.dtype) for array in arrays]
    layout = Layout(
        rule,
        real_of(arrays[0].dtype),
        tuple(kinds[:parts]) if arrays[parts - 1].dtype != np.uint16 else SPLIT,
        kinds[-1],
        tuple(kinds[parts : parts + len(rule.state)]),
        sparse=sparse,
        **options,
    )
    if isinstance(values, Header):
        lead = weight[0] if lead is None else lead
        return _on_device(layout, arrays, parts, lead)
    checked = arrays[:-1] if sparse else arrays
    if by_row and is_pitched(checked):
        layout = replace(layout, pitched=True)
        return Table(layout, arrays[:parts], arrays[parts:-1], arrays[-1])
    if layout.coded and sparse and weight[0].ndim < 2:
        raise TypeError(
            f"{context}: state in 8 bits of a weight of one dimension needs a dense gradient, as "
            "its blocks are not those of rows"
        )
    order, in_place = C_ORDER, not (sparse or layout.keyed or layout.coded)
    if rule.elementwise and in_place and is_fortran(weight[0]):
        order = F_ORDER  # no random draw depends on the position: any common order will do
    if all(map(_in_c_order if order == C_ORDER else _in_f_order, checked)):
        return Table(layout, arrays[:parts], arrays[parts:-1], arrays[-1])
    copies = tuple(np.require(array, None, ("C", "A", "E")) for array in arrays)
    table = Table(layout, copies[:parts], copies[parts:-1], copies[-1])
    table.of_copies(arrays[:-1], arrays[-1], copies[-1])
    return table


def _in_c_order(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def _in_f_order(array: Array) -> bool:
    return array.flags.f_contiguous and array.flags.aligned


def _on_device(layout: Layout, arrays: Sequence[Any], parts: int, lead: Any) -> Any:
    """Create the table of arrays on a CUDA device, with contiguous copies where needed.

    Weight and state whose elements lie in memory in one order are updated as they are, whatever the
    order, if no position matters to the rule.
    """
    from fastopt._kernels.cuda_table import CudaTable

    streams = [lead.stream] * (len(arrays) - 1) + [arrays[-1].stream]
    by_position = layout.sparse or layout.keyed or not layout.rule.elementwise
    if not by_position and lie_alike(arrays[:-1]):
        copies = (*arrays[:-1], arranged(arrays[-1], arrays[0], streams[-1]))
    else:
        copies = tuple(map(contiguous, arrays, streams))
    states, values = copies[parts:-1], copies[-1]
    return CudaTable(layout, copies[:parts], states, arrays[:-1], lead, arrays[-1], values)
