"""What an updater keeps of each parameter besides its state, and the optimizers of all of them.

Tests: ``tests/engine/test_parameters.py``, ``tests/optimizer/test_groups.py``.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numpy.typing import NDArray

from fastopt._engine.averaging import Averages
from fastopt._engine.contract import OptimizerLike, batches_of
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.per_index import Index
from fastopt._engine.record_rows import Deferred, DeferredDecay
from fastopt._engine.templates import Template
from fastopt._engine.validate import check, is_fixed, label, leaves
from fastopt._foreign import as_real
from fastopt._kernels import record_words as w
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.layout import Layout
from fastopt._kernels.numpy_abi import DATA, at, readable
from fastopt.amp import StepInfo
from fastopt.kernels.rule import Rule
from fastopt.sparse import RowSparse

Call = tuple[Index, Any, Any, Any]
"""Index, weight, gradient and state."""


class Given(NamedTuple):
    """Arguments of a call in lists, and what its gradients are multiplied by."""

    indices: list[Index]
    grads: list[Any]
    weights: list[Any]
    single: bool = False
    """Whether the arguments are no lists."""
    share: float = 1.0
    factor: float | None = None
    """The factor of gradients that have been measured before, in place of a measurement."""


Words = NDArray[np.int64]

COMPILING = (NumbaError, UnsupportedBytecodeError, TypeError, KeyError, AttributeError)
"""Errors raised by a launch if a rule cannot be compiled, before anything has run."""


class Record(NamedTuple):
    """A record, and what its addresses point to, so that it stays alive."""

    block: Words
    words: memoryview
    """The record, of which Python reads and writes single words faster."""
    layout: Layout
    template: Template
    shared: Shared
    alive: list[Any]
    resting: tuple[Words, Layout] | None = None
    """The record for steps that do not average the weight, with its layout."""
    deferred: Deferred | None = None
    """Deferred decay of the rows, if the optimizer has it."""

    def relink(self, state: Any) -> bool:
        """Enter the arrays of another state of the same form; return whether it has that."""
        template, words = self.template, self.words
        columns, guards, places = template.columns, template.guards, template.leaves
        flat = type(state) is tuple and len(state) == len(places)  # or an item is no array
        slots = state if flat else leaves(state) if is_fixed(state) else ()
        if self.resting is not None or not len(slots) == len(places) == len(columns):
            return False
        arrays = [slots[k] for k in places]
        if not (readable() and all(map(is_alike, arrays, self.alive))):
            return False
        if any(starmap(np.may_share_memory, combinations(arrays, 2))):
            return False
        for column, guard, array in zip(columns, guards, arrays, strict=True):
            words[column], words[guard] = at(id(array), DATA), id(array)
        words[w.CLEAR_WEIGHT] = words[w.CLEAR_GRAD] = 0
        self.alive[: len(arrays)] = arrays
        return True


class DeviceRecord(NamedTuple):
    """What compiled code knows of a parameter on a device: its counts and hyper-parameters."""

    block: Words
    words: memoryview
    """The record; it has no arrays."""
    fields: NDArray[Any]
    """The hyper-parameters of the last step."""
    shared: Shared
    deferred: DeferredDecay | None
    """Deferred decay of the rows, if the optimizer has it."""
    tables: dict[Any, CudaTable]
    """Tables by form of the gradient, whose arrays have been checked."""
    key: int | str
    """What stands for the index in compiled code."""

    @property
    def layout(self) -> Layout:
        """Layout with the rule, whatever the form of the gradient."""
        return self.shared.layout

    def relink(self, state: Any) -> bool:
        """Return False: tables are those of one state."""
        return False


def is_alike(array: Any, other: Any) -> bool:
    """Whether an array may stand for another one in a record."""
    return (
        type(array) is np.ndarray
        and (dtype := array.dtype) == other.dtype
        and dtype.kind == "f"  # scales belong to codes, and are checked with them
        and array.shape == other.shape
        and array.strides == other.strides
        and (flags := array.flags).aligned
        and flags.writeable
    )


@dataclass(slots=True, eq=False)
class Parameter:
    """A parameter of an updater, besides the arrays of its state.

    Attributes
    ----------
    index : int or str
        Its index.
    optimizer : Optimizer
        Its optimizer, which is that of its group.
    masters : bool
        Whether its state holds the master of a half-precision weight.
    copy : numpy.ndarray or None
        Half-precision copy of the weight, which updates write too.
    offset : int
        Position of the weight's first element in a larger tensor that the weight is a slice of.
    weight : numpy.ndarray or None
        The weight of the last update.
    record : Record, DeviceRecord or None
        What compiled code knows of it.
    """

    index: Index
    optimizer: OptimizerLike
    masters: bool = True
    copy: Any = None
    offset: int = 0
    weight: Any = None
    record: Record | DeviceRecord | None = None

    @property
    def context(self) -> str:
        """Label of the parameter in errors."""
        return label(self.index, self.optimizer.idx2name)

    @property
    def rule(self) -> Rule:
        """Rule of the parameter; raises NotImplementedError if it has none."""
        rule: Rule | None = self.optimizer.rule_for(self.index)
        if rule is None:
            name = type(self.optimizer).__name__
            raise NotImplementedError(f"{name} has neither a rule nor an update()")
        return rule

    def indexed(self, grad: Any) -> Any:
        """Return the gradient; if decay is deferred per row, row-sparse with all rows indexed."""
        keeps = self.optimizer.sparse_decay != "touched"
        if not keeps or isinstance(grad, RowSparse) or not grad.shape:
            return grad
        return RowSparse(grad, np.arange(len(grad)), grad.shape)

    def is_indexed(self, grad: Any, weight: Any) -> bool:
        """Whether a gradient is row-sparse, or dense where decay is deferred, with all rows."""
        if isinstance(grad, RowSparse):
            return True
        deferred = self.optimizer.sparse_decay != "touched" and np.ndim(weight) > 0
        return deferred and self.rule.row is None

    def compiling(self) -> Any:
        """Return a context that raises compilation errors with their reason."""
        return compiling(self.optimizer, self.index)


class Parameters:
    """The parameters of an updater, and its optimizers.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer of parameters that are in no group with another one.
    masters : bool
        Whether states hold the masters of half-precision weights. Default True.
    check : callable
        Function that checks weight and gradient. Default: :func:`fastopt._engine.validate.check`.

    Attributes
    ----------
    rows : dict
        The parameters that have been in a call, or that something was set for, by index.
    groups : fastopt.optimizer.groups.Groups or None
        Parameter groups with other optimizers.
    averages : Averages or None
        Weight averages that updates maintain.
    """

    def __init__(
        self, optimizer: OptimizerLike, masters: bool = True, check: Callable[..., Any] = check
    ) -> None:
        self.optimizer, self.masters, self.check = optimizer, masters, check
        self.rows: dict[Index, Parameter] = {}
        self.groups: Any = None
        self.averages: Averages | None = None

    def of(self, index: Index) -> Parameter:
        """Return a parameter, which may be new, with its optimizer of now."""
        parameter, optimizer = self.rows.get(index), self.optimizer_of(index)
        if parameter is None:
            parameter = self.rows[index] = Parameter(index, optimizer, self.masters)
        parameter.optimizer = optimizer
        return parameter

    def optimizer_of(self, index: Index) -> Any:
        """Return the optimizer of a parameter."""
        return self.optimizer if self.groups is None else self.groups.of(index)

    def copy_of(self, index: Index) -> Any:
        """Return the half-precision copy of a weight, or None."""
        parameter = self.rows.get(index)
        return None if parameter is None else parameter.copy

    def weight_of(self, index: Index) -> Any:
        """Return the weight of the last update, or None."""
        parameter = self.rows.get(index)
        return None if parameter is None else as_real(parameter.weight)

    def follow(self, other: "Parameters") -> None:
        """Take over what is known of the parameters of another optimizer."""
        self.averages = other.averages
        for index, row in other.rows.items():
            made = Parameter(index, self.optimizer, self.masters, row.copy, row.offset)
            self.rows[index], made.weight = made, row.weight

    # Optimizers

    def optimizers(self) -> list[Any]:
        """Return the optimizer, and those of groups."""
        return [self.optimizer, *(self.groups.optimizers() if self.groups else ())]

    @property
    def native(self) -> bool:
        """Whether all optimizers have rules: none overrides ``update()``."""
        return all(optimizer.native for optimizer in self.optimizers())

    @property
    def folds(self) -> bool:
        """Whether a factor of all gradients may be folded into `rescale_grad`."""
        return bool(self.optimizer.folds and (self.groups is None or self.groups.folds))

    def stepped(self, info: StepInfo, indices: Sequence[Index]) -> StepInfo:
        """Return the outcome of a call of parameters whose updates may only have been counted."""
        if (batches := batches_of(self.optimizer)) is not None:
            updated = any(map(batches.completes, indices))
        else:
            updated = not all(optimizer.skips() for optimizer in self.optimizers())
        return info if updated else info._replace(stepped=False)


@contextmanager
def compiling(optimizer: OptimizerLike, index: Index) -> Iterator[None]:
    """Context that raises compilation errors with the reason why a rule cannot be compiled."""
    try:
        yield
    except COMPILING as error:  # numba's has a hundred lines, in the end those of the reason
        raise _uncompiled(optimizer, index, error) from None


def _uncompiled(optimizer: OptimizerLike, index: Index, error: Exception) -> TypeError:
    """Return an error with the reason why a rule cannot be compiled."""
    rule = optimizer.rule_for(index)
    context = f"{label(index, optimizer.idx2name)}: rule {rule.name if rule else ''}"
    if isinstance(error, KeyError):
        return TypeError(f"{context} reads h.{error.args[0]}, which its hyper=(...) lacks")
    reasons = re.findall(r"Error: (?!Failed in)(.+)", str(error))
    reasons = reasons or re.findall(r"Failed in .+\n *(?! |No implementation)(.+)", str(error))
    reasons = reasons or [f"there is no {call}" for call in re.findall(r">>> (.+\))", str(error))]
    reason = reasons[-1] if reasons else str(error)
    if rule and "tuple index out of range" in reason:
        reason = f"{reason}; its state has the slots {rule.state}"
    place = ""
    if rule:
        code = rule.fn.__code__
        inside = rf'File ".*{re.escape(Path(code.co_filename).name)}", line (\d+)'
        line = [code.co_firstlineno, *re.findall(inside, str(error))][-1]
        place = f" ({code.co_filename}:{line})"
    return TypeError(f"{context} cannot be compiled: {reason}{place}")
