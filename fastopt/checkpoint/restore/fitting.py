"""Validation of restored states against the optimizer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt._engine.validate import label, leaves
from fastopt._kernels.codes import is_coded, scales_shape, split_scales
from fastopt.arguments import ArrayOf
from fastopt.checkpoint.format.container import Array
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.checkpoint.restore.describe import foreign_part
from fastopt.kernels.rule import Rule
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Index, Optimizer

SLOTS = ArrayOf(("float32", "float64", "bfloat16"))
SCALES = ArrayOf(("float32", "float64"))
MASTERS = ArrayOf(("float32", "uint16"))


def check_states(
    optimizer: Optimizer,
    states: Mapping[Index, Any],
    groups: Groups | None,
) -> None:
    """Check restored states before they are used, without knowing the weights.

    States of optimizers without a rule may contain anything that can be saved, except what their
    ``check_saved`` refuses.

    Raises
    ------
    CheckpointError
        The number of arrays in a state differs from the slots of the rule, or arrays have wrong
        dtypes or inconsistent shapes.
    """
    for index, state in states.items():
        context = f"state of {label(index, optimizer.idx2name)}"
        own = optimizer if groups is None else groups.optimizer_of(index)
        foreign = foreign_part(state)
        if foreign:
            raise CheckpointError(f"{context} holds something of type {foreign}")
        rule = own.rule_for(index) if own.native else None
        if rule is None:
            with refusing(f"{context}: "):
                own.check_saved(index, state)
            continue
        with refusing(""):
            slots = _check_arrays(context, rule, state, own)
        if slots:
            _check_kept(context, own, index, slots[0].shape)


def _check_arrays(context: str, rule: Rule, state: Any, optimizer: Optimizer) -> list[Array]:
    """Check the arrays of a state, and return those of the rule's slots, without the master."""
    arrays, scales = split_scales(leaves(state))
    if not all(isinstance(array, np.ndarray) for array in arrays):
        raise CheckpointError(f"{context} must hold arrays, got {state!r:.100}")
    count = len(rule.slots)
    paired = optimizer.multi_precision and isinstance(state, (tuple, list)) and len(state) == 2
    paired = paired and len(arrays) == count + 1
    if len(arrays) != count and not paired:
        raise CheckpointError(
            f"{context} must have {count} arrays for rule {rule.name}, got {len(arrays)}"
        )
    master = None
    if paired:
        master = arrays.pop(-1 if optimizer.master_last else 0)
    for number in arrays[len(rule.state) :]:
        SLOTS(context, number)
        if number.shape:
            raise CheckpointError(f"{context} must have one number for the tensor, got {number!r}")
    arrays = arrays[: len(rule.state)]
    codes = rule.codes
    whole = arrays[0].shape if arrays else ()
    for (slot, shape), array in zip(rule.shapes(whole), arrays, strict=True):
        allowed = ArrayOf((*SLOTS.dtypes, codes[slot])) if slot in codes else SLOTS
        allowed(context, array)
        if array.shape != shape:
            raise CheckpointError(
                f"{context} has arrays of shapes {whole} and {array.shape}, slot {slot!r} must "
                f"have {shape}"
            )
    of = [array.shape for array in arrays if is_coded(array)]
    if [array.shape for array in scales] != list(map(scales_shape, of)):
        raise CheckpointError(f"{context} has codes of shapes {of}, whose scales do not fit")
    for array in scales:
        SCALES(f"{context}: scales", array)
    if master is not None:
        MASTERS(f"{context}: master", master)
        if arrays and rule.state[0] not in rule.row_state and master.shape != arrays[0].shape:
            raise CheckpointError(
                f"{context} has shape {arrays[0].shape}, its master {master.shape}"
            )
    return arrays


def _check_kept(context: str, optimizer: Optimizer, index: Index, shape: tuple[int, ...]) -> None:
    """Check a parameter's deferred decay and sum of gradients against the shape of its state."""
    decay = optimizer.row_decay.get(index)
    if decay is not None and shape[:1] != decay[0].shape:
        raise CheckpointError(
            f"{context} has shape {shape}, the deferred decay of its rows {decay[0].shape}"
        )
    total = vars(optimizer).get("cumgrads", {}).get(index, {}).get("cum_grad")
    if total is None:
        return
    if isinstance(total, tuple):
        values, rows = total
        fits = shape[1:] == values.shape[1:] and (not len(rows) or rows.max() < (*shape, 0)[0])
        found = f"rows of shape {values.shape}"
    else:
        fits, found = total.shape == shape, f"shape {total.shape}"
    if not fits:
        raise CheckpointError(f"{context} has shape {shape}, the sum of its gradients has {found}")
