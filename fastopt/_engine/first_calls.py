"""States and records of parameters whose form is known, at their first update.

The states of such parameters are views of one block of zeros for each form, and their records are
copies of a template that differ in a few words, so that nothing is checked or allocated for each
parameter. The first parameter of a form has its state from the optimizer and its record from
:class:`~fastopt._engine.records.Records`.

Tests: ``tests/engine/test_first_calls.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastopt._engine.validate import is_half, leaves
from fastopt._kernels.table import address_of

__all__ = ["Blank", "Slot", "blank_of", "states"]

Array = np.ndarray[Any, Any]

LINE = 64
"""Bytes of a cache line."""

APART = 192
"""Further bytes between states: at distances near a multiple of a page, a load of one state would
wait for the store to another."""

ALONE_FROM = 1 << 20
"""Bytes from which states of a parameter have a block of their own, which is freed with them."""


class Slot(NamedTuple):
    """Array of a state, as a part of a block."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Blank(NamedTuple):
    """State of a parameter before its first update, as a template for others of the same form."""

    nested: Any
    """The state with positions of slots in place of arrays."""
    slots: list[Slot]
    spacing: int
    """Bytes of memory for each parameter."""
    flat: bool
    """Whether the state is a tuple of arrays."""


def blank_of(optimizer: Any, index: Any, weight: Array, state: Any) -> Blank | None:
    """Return the template of a new state, or None if states of this form are not all zeros."""
    if not optimizer.starts_at_zero or is_half(weight) or index in optimizer.whole_shapes:
        return None
    slots: list[Slot] = []
    end = 0
    for array in leaves(state):
        slots.append(Slot(array.dtype, array.shape, array.strides, end))
        end += -(-array.nbytes // LINE) * LINE + APART
    positions = iter(range(len(slots)))
    nested = _numbered(state, positions)
    return Blank(nested, slots, end, nested == tuple(range(len(slots))))


def _numbered(state: Any, positions: Any) -> Any:
    """Return a state with positions in place of arrays."""
    if isinstance(state, tuple):
        return tuple(_numbered(each, positions) for each in state)
    return None if state is None else next(positions)


def states(blank: Blank, count: int) -> tuple[list[Any], list[list[Array]], np.ndarray[Any, Any]]:
    """Create the states of `count` parameters.

    Returns
    -------
    list, list of list of numpy.ndarray, numpy.ndarray
        The states; the arrays of each slot; and the addresses of the arrays, with a row for each
        parameter.
    """
    slots, spacing = blank.slots, blank.spacing
    if not slots:
        return [None] * count, [], np.empty((count, 0), np.int64)
    if spacing >= ALONE_FROM and count > 1:
        parts = [states(blank, 1) for _ in range(count)]
        arrays = [[part[1][k][0] for part in parts] for k in range(len(slots))]
        places = np.concatenate([part[2] for part in parts])
        return [part[0][0] for part in parts], arrays, places
    memory = np.zeros(count * spacing + LINE, np.uint8)
    start = address_of(memory)
    first = -start % LINE
    arrays = [_views(memory, slot, first, spacing, count) for slot in slots]
    offsets = np.array([slot.offset for slot in slots], np.int64)
    places = (start + first + spacing * np.arange(count))[:, None] + offsets
    if blank.nested == 0:
        return arrays[0], arrays, places
    if blank.flat:
        return list(zip(*arrays, strict=True)), arrays, places
    return [_filled(blank.nested, own) for own in zip(*arrays, strict=True)], arrays, places


def _views(memory: Array, slot: Slot, first: int, spacing: int, count: int) -> list[Array]:
    """Return the arrays of a slot of consecutive parameters."""
    shape, strides = (count, *slot.shape), (spacing, *slot.strides)
    together: Array = np.ndarray(shape, slot.dtype, memory, first + slot.offset, strides)
    return list(together) if slot.shape else [together[k, ...] for k in range(count)]


def _filled(nested: Any, arrays: Sequence[Array]) -> Any:
    """Return the state with arrays at their positions."""
    if isinstance(nested, tuple):
        return tuple(_filled(each, arrays) for each in nested)
    return None if nested is None else arrays[nested]
