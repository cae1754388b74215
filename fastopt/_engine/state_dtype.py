"""Conversion of states between float32, float64, bfloat16 and 8-bit codes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fastopt._engine.mixed_precision import holds_master
from fastopt._engine.per_index import Index
from fastopt._engine.validate import label, leaves
from fastopt._kernels.codes import decoded, encoded, is_coded
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.layout import bfloat16, real_of

__all__ = ["in_dtype_of", "mapped_slots"]

Array = np.ndarray[Any, Any]
Convert = Callable[[str, Array], Any]


def in_dtype_of(optimizer: Any, index: Index, state: Any, weight: Any) -> Any:
    """Return a state in the precision set by `optimizer`; `weight` is None if it is unknown."""
    reals = [array.dtype for array in leaves(state) if array.dtype.name in ("float32", "float64")]
    real = real_of(weight.dtype if weight is not None else reals[0] if reals else np.dtype("f4"))

    def convert(slot: str, array: Array) -> Any:
        exact = array.astype(real)
        whole = optimizer.whole_shapes.get(index)
        codes = optimizer.codes_of(optimizer.rule_for(index), array, whole)
        if slot in codes:
            return encoded(exact, np.dtype(codes[slot]))
        compressed = optimizer.state_dtype == "bfloat16" and array.ndim
        return exact.astype(bfloat16()) if compressed else exact

    return mapped_slots(optimizer, index, state, convert)


def mapped_slots(optimizer: Any, index: Index, state: Any, convert: Convert) -> Any:
    """Return a state with ``convert(name, decoded array)`` for each slot, and a copied master.

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
    names = iter(rule.slots)
    if not holds_master(rule, state):
        return _mapped(state, names, convert)
    place = int(optimizer.master_last)
    pair = [_mapped(state[1 - place], names, convert), np.array(state[place])]
    return type(state)(pair if place else pair[::-1])


def _mapped(part: Any, names: Iterator[str], convert: Convert) -> Any:
    if part is None:
        return None
    if not isinstance(part, (tuple, list)):
        return convert(next(names), part)
    if part and is_coded(part[0]):
        return convert(next(names), decoded(*part))
    return type(part)([_mapped(each, names, convert) for each in part])
