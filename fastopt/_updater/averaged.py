"""Weights that hold their averages: the context of an updater, and what a load restores.

Tests: ``tests/test_averages.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastopt._engine.averaging import Averages, exact_copy
from fastopt._engine.mixed_precision import has_master, split_state
from fastopt._engine.owner import Updating
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array, check_like, label, leaves, weights_by_index
from fastopt._foreign import as_real, owner_of
from fastopt._interrupts import between_updates, uninterrupted
from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import header
from fastopt.sparse import REALS


@contextmanager
def context(updater: Updating, weights: object) -> Iterator[None]:
    """See :meth:`Updater.averaged`."""
    before, entered = updater._averages, False
    averages = averages_of(updater) if before or not evaluates(updater) else Averages(None)
    try:
        with between_updates(updater.lock, "averaged()"), uninterrupted:
            averages.check_free()
            if before is None:
                averages.arrays = leading(updater)
            needed = {i: a for i, a in averages.arrays.items() if not updater._is_frozen(i)}
            targets = _targets(updater, averages, needed, weights)
            if before is None:
                averages.arrays = _evaluated(updater, targets)
            entered = True
            vars(updater)["_averages"] = averages
            averages.swap_in(targets)
            updater.forget()
        yield
    finally:
        if entered:
            with updater.lock, uninterrupted:
                averages.swap_out()
                vars(updater)["_averages"] = before
                updater.records.forget()


def restore(updater: Updating, weights: object) -> None:
    """See :meth:`Updater.restore_weights`."""
    with updater.lock, uninterrupted:
        averages = averages_of(updater)
        targets = _targets(updater, averages, held(updater), weights)
        averages.restore({index: arrays[0] for index, arrays in targets.items()})
        updater.records.forget()


def evaluates(updater: Updating) -> bool:
    """Whether an optimizer evaluates with other weights than it updates."""
    groups = updater.parameters.groups
    return updater.optimizer.evaluates or (groups is not None and groups.evaluates)


def evaluated(updater: Updating, weights: object = None) -> dict[Index, Any]:
    """Return the weights to evaluate with of each optimizer that averages in its own state.

    `weights` are those that this updater has not updated yet. Nothing changes.
    """
    averages = Averages(None)
    with between_updates(updater.lock, "averages of the weights"):
        averages.arrays = leading(updater)
        return _evaluated(updater, _targets(updater, averages, averages.arrays, weights))


def averages_of(updater: Updating) -> Averages:
    """Return the averages of an updater; raise RuntimeError if it has none."""
    if updater._averages is None:
        raise RuntimeError("the updater has no average: Updater(optimizer, average=EMA())")
    return updater._averages


def held(updater: Updating) -> dict[Index, Array]:
    """Return the weights of a state that was saved inside :meth:`averaged`."""
    averages = averages_of(updater)
    if averages.held is None or averages.inside:
        raise RuntimeError("restore_weights() is for a state that was saved inside of averaged()")
    return averages.held


def leading(updater: Updating) -> dict[Index, Any]:
    """Return an array in the weight's shape for each index whose optimizer has averages."""
    arrays = {}
    for index, state in updater.states.items():
        of = updater.parameters.optimizer_of(index)
        if of.evaluates:
            arrays[index] = leaves(state)[-1 - len(of.rule_for(index).kept)]
    return arrays


def _evaluated(updater: Updating, targets: Mapping[Index, Sequence[Any]]) -> dict[Index, Any]:
    """Return the weights to evaluate with, by index."""
    averages = {}
    for index, (weight, *_) in targets.items():
        exact, state = _inner_state(updater, index, weight)
        of = updater.parameters.optimizer_of(index)
        slots = state[: len(of.rule_for(index).state)]
        averages[index] = of.evaluated(host(exact_copy(exact)), slots)
    return averages


def _inner_state(updater: Updating, index: Index, weight: Array) -> tuple[Any, list[Any]]:
    """Return the weight's exact values (its master if it has one), and its state arrays."""
    of = updater.parameters.optimizer_of(index)
    context, weight, state = label(index, of.idx2name), header(weight), updater.states[index]
    if has_master(of, weight):
        exact, state = split_state(of, context, weight, state)
    else:
        exact = (weight,)
    return exact, [host(header(array)) for array in leaves(state)]


def check_fit(weights: Mapping[Index, Any], needed: Mapping[Index, Any], of: Updating) -> None:
    """Raise ValueError if there are weights, but none of those that are needed."""
    if needed and not weights.keys() & needed.keys():
        for index in [index for index in weights if not of._is_frozen(index)]:
            names = of.optimizer.idx2name
            raise ValueError(f"{label(index, names)}: the updater has no average of it")


def _targets(
    updater: Updating,
    averages: Averages,
    needed: Mapping[Index, Any],
    weights: object,
) -> dict[Index, list[Any]]:
    """Return the weight of each index, with its half-precision copy if it has one."""
    passed = weights_by_index(weights)
    names = updater.optimizer.idx2name
    if averages.held is None:  # a restore leaves others alone
        check_fit(passed, needed, updater)
    targets = {}
    for index in needed:
        context = label(index, names)
        weight, of = passed.get(index), updater.parameters.of(index)
        if index not in passed and of.weight is not None:
            weight = of.weight = updater._viewed(index, owner_of(of.weight))
        weight = as_real(weight)
        if weight is None:
            raise ValueError(
                f"{context}: its weight was not updated yet by this updater; pass "
                "it in weights, nested as in step, or as {index: array}"
            )
        shape = header(averages.arrays[index]).shape
        check_like(context, "weight", header(weight), REALS, shape)
        copy = updater.parameters.copy_of(index)
        targets[index] = [weight] if copy is None else [weight, copy]
    return targets
