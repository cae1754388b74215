"""States of parameters before their first update, as templates for others of the same form.

Tests: ``tests/engine/test_first_calls.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastopt._engine.validate import is_half, leaves

Array = np.ndarray[Any, Any]

LINE = 64
"""Bytes of a cache line."""

APART = 192
"""Further bytes between states: at distances near a multiple of a page, a load of one state would
wait for the store to another."""


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

    def filled(self, arrays: Sequence[Array]) -> Any:
        """Return the state with arrays at their positions."""
        return _filled(self.nested, arrays)


def blank_of(optimizer: Any, weight: Array, state: Any) -> Blank | None:
    """Return the template of a new state, or None if states of this form are not all zeros."""
    if not optimizer.starts_at_zero or is_half(weight):
        return None
    slots: list[Slot] = []
    end = 0
    for array in leaves(state):
        slots.append(Slot(array.dtype, array.shape, array.strides, end))
        end += -(-array.nbytes // LINE) * LINE + APART
    positions = iter(range(len(slots)))
    return Blank(_numbered(state, positions), slots, end)


def _numbered(state: Any, positions: Any) -> Any:
    """Return a state with positions in place of arrays."""
    if isinstance(state, tuple):
        return tuple(_numbered(each, positions) for each in state)
    return None if state is None else next(positions)


def _filled(nested: Any, arrays: Sequence[Array]) -> Any:
    """Return a nested state with arrays in place of positions."""
    if isinstance(nested, tuple):
        return tuple([_filled(each, arrays) for each in nested])
    return None if nested is None else arrays[nested]
