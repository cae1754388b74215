"""Conversion of states between float32, float64, bfloat16 and 8-bit codes.

Tests: ``tests/engine/test_stochastic_rounding.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.mixed_precision import holds_master
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array, label, leaves
from fastopt._kernels.codes import encoded, is_coded, numbers_of
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.layout import bfloat16, real_of
from fastopt.kernels.rule import Rule

Convert = Callable[[str, Mapping[str, Array]], Any]


def in_dtype_of(optimizer: OptimizerLike, index: Index, state: object, weight: Array | None) -> Any:
    """Return a state in the precision set by `optimizer`; `weight` is None if it is unknown."""
    reals = [array.dtype for array in leaves(state) if array.dtype.name in ("float32", "float64")]
    real = real_of(weight.dtype if weight is not None else reals[0] if reals else np.dtype("f4"))

    rule: Any = optimizer.rule_for(index) if optimizer.native else None

    def convert(slot: str, numbers: Mapping[str, Array]) -> Any:
        array = numbers[slot]
        exact = array.astype(real)
        codes = optimizer.codes_of(rule, array, index)
        if slot in codes:
            by = (
                numbers[rule.divisor].astype(real) if slot in rule.signed and rule.divisor else None
            )
            return encoded(exact, np.dtype(codes[slot]), by)
        compressed = optimizer.state_dtype == "bfloat16" and array.ndim
        return exact.astype(bfloat16()) if compressed else exact

    return mapped_slots(optimizer, index, state, convert)


def mapped_slots(optimizer: OptimizerLike, index: Index, state: Any, convert: Convert) -> Any:
    """Return a state with ``convert(name, decoded arrays)`` for each slot, and a copied master.

    Raises
    ------
    TypeError
        The state is on a device, or the optimizer has no rule that names its slots.
    """
    context = label(index, optimizer.idx2name)
    rule = optimizer.rule_for(index) if optimizer.native else None
    if rule is None:
        raise TypeError(f"{context}: no rule says what the slots of its state are")
    if any(map(is_cuda, leaves(state))):
        raise TypeError(f"{context}: its state is on a device, where slots are not converted")
    if not holds_master(rule, state):
        return _mapped(rule, state, convert)
    place = int(optimizer.master_last)
    pair = [_mapped(rule, state[1 - place], convert), np.array(state[place])]
    return type(state)(pair if place else pair[::-1])


def _mapped(rule: Rule, state: object, convert: Convert) -> Any:
    numbers = dict(zip(rule.slots, numbers_of(leaves(state)), strict=True))
    return _like(state, iter(rule.slots), lambda slot: convert(slot, numbers))


def _like(part: object, slots: Iterator[str], converted: Callable[[str], Any]) -> Any:
    """Return ``converted(slot)`` in the place of each array, or pair of codes and scales."""
    if part is None:
        return None
    if not isinstance(part, (tuple, list)) or (part and is_coded(part[0])):
        return converted(next(slots))
    return type(part)([_like(item, slots, converted) for item in part])
