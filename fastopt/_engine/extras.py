"""Calls with an extra array for each gradient, which is a state slot that the caller sets.

Tests: ``tests/optimizer/test_extra.py``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.mixed_precision import arrays_of
from fastopt._engine.owner import Updating
from fastopt._engine.parameters import Call
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Grad, as_lists, check, check_index, is_listed, label, repeated
from fastopt._interrupts import uninterrupted
from fastopt._kernels.devices import is_cuda, mark_written
from fastopt.kernels.rule import Rule
from fastopt.sparse import RowSparse

WithExtra = tuple[Index, Any, Any, Any]
"""Index, gradient, weight and extra array."""

FORM = "updater(index, grad, weight, extra=array), or updater.step(grads, weights, extra=arrays)"


class _Slot(NamedTuple):
    """The slot of a parameter, the rows that an update reads (None: all), and its old values."""

    array: Any
    rows: NDArray[np.int64] | None
    before: Any

    def put(self, extra: Grad) -> None:
        """Set the numbers that an update reads; rows that a row-sparse `extra` lacks are 0."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if not isinstance(extra, RowSparse):
                self.array[self._read] = extra if self.rows is None else extra[self.rows]
                return
            self.array[self._read] = 0
            extra = extra.coalesce()
            if self.rows is not None:
                extra = extra.retain(self.rows)
            self.array[extra.indices] = extra.values

    def restore(self) -> None:
        """Set the old values."""
        self.array[self._read] = self.before

    @property
    def _read(self) -> Any:
        return ... if self.rows is None else self.rows


def update_with(updater: Updating, index: object, grad: object, weight: object, extra: Any) -> None:
    """Update with an extra array for each gradient, or with one array for a single index."""
    if is_listed(index):
        indices, grads, weights = as_lists(index, grad, weight)
        if not is_listed(extra) or len(extra) != len(indices):
            got = f"{len(extra)}" if is_listed(extra) else type(extra).__name__
            raise TypeError(
                f"a list of {len(indices)} indices needs a list of as many extras, got {got}; "
                "None is the extra of a rule that takes none"
            )
        extras = list(extra)
    else:
        indices, grads, weights, extras = [index], [grad], [weight], [extra]
    indices = [check_index(key) for key in indices]
    before = list(weights)
    for k, key in enumerate(indices):
        view = partial(updater._real_views, key)
        extras[k], _ = view(*updater._views(key, extras[k], weights[k]))
        grads[k], weights[k] = view(*updater._views(key, grads[k], weights[k]))
    optimizer = updater.optimizer
    with optimizer.call_lock, uninterrupted:
        _update(updater, list(zip(indices, grads, weights, extras, strict=True)))
    if any(old is not new for old, new in zip(before, weights, strict=True)):
        mark_written(before)


def _update(updater: Updating, entries: Sequence[WithExtra]) -> None:
    """Set the slots and update; if that does not happen, states are as before."""
    optimizer, groups = updater.optimizer, updater.parameters.groups
    moving = [entry for entry in entries if groups is None or not groups.is_frozen(entry[0])]
    _check_call(updater, moving)
    calls = updater._checked(*_lists(moving))
    slotted = [_checked(updater, call, entry[3]) for call, entry in zip(calls, moving, strict=True)]
    counts = optimizer._index_update_count
    before = {index: counts.get(index) for index, *_ in moving}
    undo = updater._stored(calls)
    slots: list[_Slot] = []
    try:
        for slot, extra in filter(None, slotted):
            slots.append(slot)
            slot.put(extra)
        vars(updater)["takes_extra"] = True
        updater(*_lists(entries))
    finally:
        vars(updater).pop("takes_extra", None)
        if all(counts.get(index) == count for index, count in before.items()):
            for slot in slots:
                slot.restore()
            undo()


def _lists(entries: Sequence[WithExtra]) -> tuple[list[Index], list[Any], list[Any]]:
    """Return indices, gradients and weights."""
    return [e[0] for e in entries], [e[1] for e in entries], [e[2] for e in entries]


def _check_call(updater: Updating, entries: Sequence[WithExtra]) -> None:
    """Raise unless each rule gets what it takes, once."""
    names, twice = updater.optimizer.idx2name, repeated([index for index, *_ in entries])
    if updater.settings.accumulate > 1:
        raise ValueError(
            "accumulate averages gradients of several calls, and no call has their mean extra: "
            "add up both in your code, and use accumulate=1"
        )
    if twice is not None:
        raise ValueError(f"{label(twice, names)}: a call with extras takes an index once")
    for index, _, weight, extra in entries:
        context = label(index, names)
        opt = updater.parameters.optimizer_of(index)
        rule = opt.rule_for(index) if opt.native else None
        if extra is not None and not (rule and rule.extra):
            takes = f"rule {rule.name}" if rule else f"an update() in Python ({type(opt).__name__})"
            raise TypeError(
                f"{context}: {takes} takes no extra; pass None for this index, or declare "
                "rule(extra=...)"
            )
        if extra is None and rule and rule.extra:
            raise TypeError(_missing(context, rule))
        if extra is not None and is_cuda(weight):
            raise TypeError(
                f"{context}: an extra is for weights on the host, got a weight on a device"
            )


def _checked(updater: Updating, call: Call, extra: Any) -> tuple[_Slot, Any] | None:
    """Return the slot of a call and the checked array; None without an extra."""
    if extra is None:
        return None
    index, weight, grad, state = call
    parameter = updater.parameters.of(index)
    rule, optimizer = parameter.rule, parameter.optimizer
    extra = check(parameter.context, weight, extra, parameter.copy, "extra")
    arrays = arrays_of(optimizer, parameter.context, rule, weight, state, parameter.copy, True)[1]
    slot = arrays[rule.slots.index(rule.extra)]
    lazy = isinstance(grad, RowSparse) and optimizer.lazy_update
    rows = np.unique(grad.indices) if lazy else None
    return _Slot(slot, rows, slot.copy() if rows is None else slot[rows]), extra


def extras_at(
    paths: Sequence[str], extras: tuple[Sequence[str], Sequence[Any], Sequence[Any]]
) -> list[Any]:
    """Return the extras of the paths of gradients, given paths and arrays of the extras."""
    left = dict(zip(*extras[:2], strict=True))
    result = [left.pop(path, None) for path in paths]
    if left:
        raise ValueError(f"extras of {', '.join(map(repr, left))} have no gradient")
    return result


def check_given(updater: Updating, indices: Sequence[Index]) -> None:
    """Raise TypeError if the rule of an index takes an extra, and the call has none."""
    if updater.takes_extra:
        return
    checked = set()
    for index in indices:
        optimizer = updater.parameters.optimizer_of(index)
        if optimizer in checked:
            continue
        rule = optimizer.rule_for(index) if optimizer.native else None
        if rule and rule.extra:
            raise TypeError(_missing(label(index, optimizer.idx2name), rule))
        if not optimizer.rule_by_index:
            checked.add(optimizer)


def _missing(context: str, rule: Rule) -> str:
    return f"{context}: rule {rule.name} takes an array {rule.extra!r} in each call: {FORM}"


def refuse_extra(optimizers: Sequence[Any], kind: str) -> None:
    """Raise TypeError if a rule takes an extra, which updaters of this kind do not pass."""
    for optimizer in optimizers:
        rule = optimizer.rule if optimizer.native else None
        if rule and rule.extra:
            raise TypeError(
                f"rule {rule.name} takes an array {rule.extra!r} in each call, which {kind} does "
                "not pass: sum gradients and extras over the ranks, and call an Updater on each"
            )
