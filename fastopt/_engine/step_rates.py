"""Hyper-parameters of the steps of records that Python computes: schedules, counts, decay.

What it changes before a step (counts, sums over tensors) is undone unless the step succeeds.

Tests: ``tests/engine/test_records.py``, ``tests/engine/test_records_settings.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastopt._engine.hyper_rows import Shared
from fastopt._engine.parameters import Record
from fastopt._engine.per_index import Index
from fastopt._engine.rates import StepRates
from fastopt._engine.step_sums import check_once
from fastopt._engine.validate import leaves
from fastopt._kernels import record_words as w

Step = tuple[int, float, float]
"""Number of the update of a tensor, its learning rate and its weight decay."""

NONE = {"lr": 0.0, "wd": 0.0}
"""Rates that nothing reads."""

ROOM = (w.NO_ROOM, w.NO_CAPACITY, w.IS_LARGE)
"""Statuses of calls that are entered again with more memory or on several threads."""

COUNT, EXPECTED, EXPECTED_TIME, TIMED = w.COUNT, w.EXPECTED, w.EXPECTED_TIME, w.TIMED


def update_with_rates(records: Any, updater: Any, arguments: tuple[Any, Any, Any]) -> int:
    """Compute the hyper-parameters of an update, and update."""
    words, counts, index = records.words, records.counts, arguments[0]
    tracked = updater.optimizer._index_update_count  # a schedule may replace their array
    indices = index if type(index) in (list, tuple) else [index]
    if records.freezes:
        indices = [each for (each,) in records.moving(indices)]
    before = counts.item(0)
    undo: list[Callable[[], None]] = []
    rates: dict[Any, float] = {}
    found = {} if records.scheduled is None else records.scheduled
    own: Sequence[Step] = ()  # that of each tensor, if they differ
    decays: list[tuple[Record, Index, Any]] = []
    try:
        if records.begins:
            _begin(records, indices, undo)
        if records.by_tensor or words[w.UNEVEN]:
            own = _fill_each(records, updater, indices, found)
        else:
            update = words.item(w.UPDATE_NUMBER)
            alone = records.parameters.groups is None
            for of in (updater.optimizer,) if alone else _optimizers(records, indices):
                rates[of] = of.lr
                if of.lr_scheduler is not None and (of, update) in found:
                    rates[of] = found[of, update]
                elif of.lr_scheduler is not None:
                    counts[0] = update
                    rate = of.lr_scheduler(update)
                    rates[of] = rate if type(rate) is float else of.scheduled(rate)
                    found[of, update] = rates[of]
            if records.version != updater.optimizer.version:
                records.refresh(updater)
            for shared in records.shared.values():
                if shared.optimizer in rates:
                    shared.fill(rates[shared.optimizer], words.item(w.TIME), again=True)
        if not records.usable:  # the schedule has changed settings
            return w.REFUSED
        if records.defers:
            if words[w.REPEATS] or None in map(records.record_of, indices):
                return w.REFUSED  # a schedule may have changed states
            decays = _defer(records, index, arguments[2], own or _even(records, indices, rates))
        words[w.ASKED] = 1
        status: int = records.enter(records.context, *arguments)
        if status in ROOM:
            status = records.with_room(status, arguments)
    finally:
        words[w.ASKED] = words[w.EACH] = 0
        if not words[w.DONE]:
            tracked.largest = before
            for each in reversed(undo):
                each()
        else:
            for record, index, decay in decays:
                record.shared.optimizer.row_decay[index] = decay
            if records.sums:
                _collect(records, updater.states, indices)
    return status


def foresee(records: Any, updater: Any, index: Any) -> None:
    """Compute the hyper-parameters of the update that a call with one index should be.

    If it is another one, the front asks for those.
    """
    words, counts, optimizer = records.view, records.counts_view, updater.optimizer
    try:
        record = records.kept[index].record.words
    except (KeyError, TypeError, AttributeError):  # the front refuses the call
        return
    before, time = counts[0], counts[record[COUNT]] + 1
    update = before if before > time else time
    rate, schedule = optimizer.lr, optimizer.lr_scheduler
    try:
        if schedule is not None:
            counts[0] = update  # for a schedule or hyper() that asks the optimizer
            rate = schedule(update)
            if type(rate) is not float:
                rate = optimizer.scheduled(rate)
            if records.version != optimizer.version:  # the schedule has changed settings
                records.refresh(updater)
                return
        for shared in records.shared.values():
            if not shared.follow(rate):
                shared.fill(rate, time, again=True)
    except BaseException:
        optimizer._index_update_count.largest = before  # the schedule may replace their array
        raise
    finally:
        counts[0] = before
    words[EXPECTED], words[EXPECTED_TIME] = update, time if words[TIMED] else 0


def _even(records: Any, indices: Sequence[Index], rates: Mapping[Any, float]) -> list[Step]:
    """Return the steps of tensors whose update counts are equal, given rates by optimizer."""
    found = []
    for index in indices:
        record = records.kept[index].record
        t, of = records.counts.item(record.words[w.COUNT]) + 1, record.shared.optimizer
        own = of.rates_at(rates[of], record.shared.multipliers)
        found.append((t, own["lr"], own["wd"]))
    return found


def _defer(
    records: Any, indices: Any, weights: Any, steps: Sequence[Step]
) -> list[tuple[Record, Index, Any]]:
    """Enter the deferred decay of a step; return that of each parameter after it."""
    decays: list[tuple[Record, Index, Any]] = []
    incomplete = records.incomplete or [False] * len(steps)
    moving = records.moving(indices, weights)
    for (index, weight), step, skips in zip(moving, steps, incomplete, strict=True):
        record = records.kept[index].record
        if record.deferred is not None and not skips:
            after = record.deferred.begin(record.shared.optimizer, index, weight, *step)
            decays.append((record, index, after))
    return decays


def _begin(records: Any, indices: Sequence[Index], undo: list[Callable[[], None]]) -> None:
    """Begin the step of optimizers that count themselves or sum over the tensors of a step.

    Functions that undo it are added to `undo`.
    """
    for optimizer in _optimizers(records, indices):
        if optimizer.per_index:
            undo.append(partial(optimizer.put_back, optimizer.snapshot()))
        sums = optimizer.step_sums
        if sums is not None:
            check_once(optimizer, indices)
            undo.append(partial(sums.put_back, sums.begin(indices)))


def _collect(records: Any, states: Mapping[Index, Any], indices: Sequence[Index]) -> None:
    """Add the numbers that the tensors of a completed step have kept to its sums."""
    for optimizer in records.sums:
        known = [(index, records.kept[index].record) for index in indices]
        own = {i: r.layout.rule.kept for i, r in known if r.shared.optimizer is optimizer}
        arrays = (leaves(states[index])[-len(names) :] for index, names in own.items())
        numbers = [[array.item() for array in each] for each in arrays]
        optimizer.step_sums.add(list(own), numbers)


def _fill_each(
    records: Any, updater: Any, indices: Sequence[Index], asked: dict[tuple[Any, int], float]
) -> list[Step]:
    """Compute the hyper-parameters of each tensor of a call, in the order of its list.

    `asked` has what schedules have returned. Returns the steps of the tensors.
    """
    words, counts, tensors = records.words, records.counts, records.tensors
    rates, times = StepRates(counts.item(0), asked), dict[int, int]()
    steps: list[tuple[int, float, int]] = []
    for index in indices:
        record = records.kept[index].record
        optimizer, slot = record.shared.optimizer, record.words[w.COUNT]
        times[slot] = t = times.get(slot, counts.item(slot)) + 1
        update = rates.next(optimizer, t)
        steps.append((update, 0.0 if optimizer.per_index else rates.at(optimizer, update), t))
    if records.version != updater.optimizer.version:
        records.refresh(updater)
    used: dict[Any, Shared] = {}
    found_steps = list[Step]()
    for k, (index, (update, rate, t)) in enumerate(zip(indices, steps, strict=True)):
        found = records.record_of(index)
        if found is None:  # the schedule has changed states, so that the front refuses the call
            return []
        shared, own = found.shared, -1
        skips = bool(records.incomplete) and records.incomplete[k]
        if shared.optimizer.per_index:
            row = used[k] = _row(records, shared, len(used))
            own, of = row.counted(index, found.words[w.CARRIED])
        else:
            of = shared.optimizer.rates_at(rate, shared.multipliers) if records.defers else NONE
            key = shared, rate, t, skips
            if key not in used:
                row = used[key] = _row(records, shared, len(used))
                if words[w.SCHEDULED]:  # hyper() may read the schedule too
                    counts[0] = update
                row.fill(rate, t, row.version == shared.optimizer.version)
                row.version = shared.optimizer.version
            row = used[key]
        row.words[w.SKIPS] = shared.words[w.SKIPS] or skips
        place = k * w.TENSOR
        tensors[place + w.T_HYPER], tensors[place + w.T_COUNT] = row.address, own
        found_steps.append((t, of["lr"], of["wd"]))
    words[w.EACH] = 1
    return found_steps


def _row(records: Any, shared: Shared, number: int) -> Shared:
    """Return hyper-parameters for one tensor of a call, which are used again by later calls."""
    row: Shared | None = records.rows.get((shared, number))
    if row is None:
        row = records.rows[shared, number] = shared.for_tensor()
    return row


def _optimizers(records: Any, indices: Sequence[Index]) -> list[Any]:
    """Return the optimizers of a call's parameters, in the order of its list."""
    return list(dict.fromkeys(records.kept[each].record.shared.optimizer for each in indices))
