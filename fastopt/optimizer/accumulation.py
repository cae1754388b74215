"""Gradient accumulation: gradients of several calls are summed and applied as their mean."""

from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from fastopt._engine.accumulate import accumulate, placed_rows, room, sum_of_rows
from fastopt._engine.direct import Unmeasured
from fastopt._engine.parameters import Given, Parameters
from fastopt._engine.records import Records
from fastopt._engine.validate import (
    Grad,
    check_known,
    described,
    label,
    selected,
)
from fastopt._kernels.device_memory import assign, host
from fastopt._kernels.devices import Header, header, is_cuda
from fastopt._kernels.record_words import OK
from fastopt._notices import warn_user
from fastopt.arguments import arg, brief, count
from fastopt.optimizer.optimizer import Array, Index, Optimizer
from fastopt.sparse import RowSparse

Entry = tuple[Index, Any, Any]
"""Index, weight and gradient."""


class Sum(Optimizer):
    """Optimizer that adds gradients to sums, which take the role of the weights.

    Parameters
    ----------
    keep : bool
        Whether to add to the sum; otherwise the gradient starts a new sum.
    """

    rule = accumulate

    keep: bool = arg(default=False, kw_only=True)

    def _initialize(self, arguments: dict[str, Any]) -> None:
        super()._initialize({**arguments, "lazy_update": arguments.get("keep", False)})
        vars(self)["unchecked"] = False  # there are no multipliers


def _as_given(context: str, weight: object, grad: Any, copy: object = None) -> Any:
    """Return a gradient that has been checked, whose dtype may differ from that of its sum."""
    return grad


class Adder(Unmeasured):
    """Updater whose weights are sums of gradients.

    Parameters
    ----------
    keep : bool
        Whether to add to the sums; otherwise gradients start new sums.
    """

    def __init__(self, keep: bool) -> None:
        self.optimizer = Sum(keep=keep)
        self.parameters = Parameters(self.optimizer, check=_as_given)
        self.records = Records(self.parameters)
        self.states, self.states_synced = {}, {}

    def add(self, calls: Sequence[Any], single: bool) -> None:
        """Add gradients to dense sums: ``(index, sum, gradient, None)`` for each."""
        indices, sums, grads = [[call[k] for call in calls] for k in range(3)]
        self.records.take(self, Given(indices, grads, sums, single))

    def call_again(self, index: object, grad: object, sums: object) -> bool:
        """Add gradients to sums that have records; if it returns False, nothing has changed."""
        records = self.records
        if records.version != self.optimizer.version:
            records.refresh(self)
        if not records.quick:
            return False
        status = records.enter(records.context, index, grad, sums)
        if status != OK:
            status = records.resolve(self, status, index, grad, sums)
        return bool(status >= 0)


def incomplete(
    optimizer: Optimizer,
    is_frozen: Callable[[Index], bool],
    windows: "Windows | None",
    index: Any,
    weight: object,
) -> dict[Index, Any]:
    """Return the indices with an incomplete sum, all or of the given ones, with given weights.

    Raises
    ------
    TypeError
        The arguments do not match.
    ValueError
        An index belongs to no parameter.
    """
    calls = windows.calls if windows is not None else {}
    weights = selected("finish", index, weight, calls)
    known = ChainMap[Any, Any](calls, optimizer.idx2name, optimizer._index_update_count)
    for i in weights:
        if not is_frozen(i):
            check_known(i, known)
    return {i: of for i, of in weights.items() if i in calls}


class Windows:
    """Sums of the gradients since the last update of each index.

    Parameters
    ----------
    every : int
        Number of calls of an index per update.

    Attributes
    ----------
    calls : dict
        Number of calls of each index since its last update.
    sums : dict
        Sum of each index, in the precision of the arithmetic; valid only for indices in `calls`.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls: dict[Index, int] = {}
        self.sums: dict[Index, Any] = {}
        self._start()

    def _start(self) -> None:
        self.adders = Adder(keep=False), Adder(keep=True)

    @classmethod
    def changed(cls, present: "Windows | None", every: int) -> "Windows | None":
        """Windows of `every` calls: the present ones if it is theirs, None for 1.

        Raises
        ------
        TypeError, ValueError
            `every` is not an integer of at least 1, or gradients wait for their update.
        """
        every = count("accumulate", every)
        if every == (1 if present is None else present.every):
            return present
        if present is not None and present.calls:
            raise ValueError(
                f"accumulate cannot change while gradients of {list(present.calls)} wait for "
                "their update: call finish() or reset() before"
            )
        return cls(every) if every > 1 else None

    def __getstate__(self) -> dict[str, Any]:
        return {"every": self.every, "calls": dict(self.calls), "sums": self.open_sums()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def open_sums(self) -> dict[Index, Any]:
        """Return the incomplete sums, on the host."""
        return {index: _on_host(self.sums[index]) for index in self.calls}

    def clear(self) -> None:
        """Drop all incomplete sums; their memory is used again."""
        self.calls = {}

    def is_last(self, index: Index) -> bool:
        """Whether the next call of an index updates it."""
        return self.calls.get(index, 0) + 1 >= self.every

    def phase(self, indices: Sequence[Index]) -> int:
        """Return the calls since the last update if equal for all indices, else -1."""
        if len(indices) == 1:
            return self.calls.get(indices[0], 0)
        calls = [self.calls.get(index, 0) for index in indices]
        return calls[0] if calls.count(calls[0]) == len(calls) else -1

    # Sums

    def add(self, entries: Sequence[Entry], names: dict[Any, str], single: bool) -> None:
        """Add validated gradients to their sums, without counting the calls."""
        calls: tuple[list[Any], list[Any]] = [], []
        sums: dict[Index, Any] = {}
        for index, weight, grad in entries:
            context, keep = label(index, names), index in self.calls
            total = self.sums.get(index)
            rows = sum_of_rows(context, total, grad, weight, keep)
            if rows is None:
                sums[index] = room(context, total, weight, keep)
                calls[keep].append((index, sums[index], grad, None))
            else:
                sums[index] = rows
        for adder, some in zip(self.adders, calls, strict=True):
            if some:
                adder.add(some, single)
        self.sums.update(sums)

    def total(self, context: str, index: Index, weight: Array) -> Any:
        """Return the incomplete sum of an index, where its weight is."""
        total, of = self.sums[index], described(context, "weight", weight)
        if of.shape != total.shape:
            raise ValueError(
                f"{context}: weight must have shape {total.shape}, like its gradients so far, got "
                f"{of.shape}"
            )
        if isinstance(total, RowSparse):
            return placed_rows(total, of) if isinstance(of, Header) else total
        return room(context, total, weight, keep=True)

    def without(self, indices: Collection[Index]) -> dict[Index, int]:
        """Return :attr:`calls` without some of the indices."""
        return {index: count for index, count in self.calls.items() if index not in indices}

    def freeze(self, is_frozen: Callable[[Index], bool]) -> None:
        """Drop the incomplete sums of frozen parameters, with a warning."""
        if lost := [index for index in self.calls if is_frozen(index)]:
            self.calls = self.without(lost)
            warn_user(
                f"gradients of {brief(lost)} waited for their update, and are dropped as these are "
                "frozen now: call finish() before"
            )

    def after(self, indices: Sequence[Index]) -> dict[Index, int]:
        """Return :attr:`calls` after one more call of each of the indices."""
        calls = dict(self.calls)
        for index in indices:
            calls[index] = calls.get(index, 0) + 1
            if calls[index] >= self.every:
                del calls[index]
        return calls

    def finish(self, indices: Sequence[Index], after: dict[Index, int]) -> None:
        """Set :attr:`calls` after a call of `indices`; may be repeated."""
        self.calls = after
        for index in indices:
            if index not in after and isinstance(self.sums.get(index), RowSparse):
                del self.sums[index]

    def restore(self, calls: dict[Index, int], sums: dict[Index, Any]) -> None:
        """Restore sums from a checkpoint."""
        self.calls, self.sums = calls, sums
        self._start()

    # Rolling back

    def before(self, indices: Sequence[Index]) -> dict[Index, Any]:
        """Return copies of the incomplete sums of `indices`, for :meth:`put_back`."""
        return {
            index: _on_host(self.sums[index], copy=True) for index in indices if index in self.calls
        }

    def put_back(self, before: dict[Index, Any]) -> None:
        """Restore the sums that :meth:`before` returned."""
        for index, values in before.items():
            total = self.sums[index]
            if isinstance(values, RowSparse) or isinstance(total, RowSparse):
                self.sums[index] = values
            elif isinstance(header(total), Header):
                assign(header(total), values)
            else:
                total[...] = values


def _on_host(total: Grad, copy: bool = False) -> Any:
    """Return a sum on the host; with `copy`, a NumPy array is copied. Rows never change."""
    if isinstance(total, RowSparse):
        return total if copy else RowSparse(host(total.values), total.indices, total.shape)
    return np.array(total, order="K") if copy and not is_cuda(total) else host(total)
