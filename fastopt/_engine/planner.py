"""What an updater knows of its parameters besides records."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from fastopt._engine.averaging import Averages
from fastopt._engine.batches import sums_batches
from fastopt._engine.device_records import DeviceRecords
from fastopt._engine.hyper import hyper_of
from fastopt._engine.per_index import Index
from fastopt._engine.records import Records
from fastopt._engine.validate import check, check_like, label
from fastopt._kernels.devices import header
from fastopt._structure import Structures
from fastopt.amp import StepInfo
from fastopt.kernels.rule import Rule
from fastopt.sparse import HALVES, RowSparse

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
            sums_batches(optimizer),
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

    def stepped(self, info: StepInfo, indices: Sequence[Index]) -> StepInfo:
        """Return the outcome of a call of parameters whose updates may only have been counted."""
        batches = self.optimizer.batches
        if batches is not None and batches.active:
            updated = any(map(batches.completes, indices))
        else:
            updated = not self.skips
        return info if updated else info._replace(stepped=False)

    @property
    def skips(self) -> bool:
        """Whether updates are only counted now."""
        return all(each.skips() for each in self.optimizers())

    def by_row(self, grad: Any) -> Any:
        """Return the gradient; if decay is deferred per row, row-sparse with all rows indexed."""
        keeps = self.optimizer.sparse_decay != "touched"
        if not keeps or isinstance(grad, RowSparse) or not grad.shape:
            return grad
        return RowSparse(grad, np.arange(len(grad)), grad.shape)

    @contextmanager
    def compiling(self, index: Index) -> Iterator[None]:
        """Context that raises compilation errors with the reason why a rule cannot be compiled."""
        try:
            yield
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
