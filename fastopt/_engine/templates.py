"""Templates of records: what parameters of the same form have in common, whatever the updater.

A record is a block of words: a copy of its template's, with the addresses of the parameter's own
arrays. Parameters whose states are zeros at first have the form of these in the template too, so
that nothing is checked for each of them.

Tests: ``tests/engine/test_records.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.validate import Array, is_half, leaves, mapped
from fastopt._kernels import cpu_addresses
from fastopt._kernels import record_words as w
from fastopt._kernels.chunks import chunks_of
from fastopt._kernels.codes import items_of
from fastopt._kernels.layout import ADDRESS, BFLOAT16, FLOAT16, PITCH, WIDTH, Layout, kind_of
from fastopt._kernels.numpy_abi import NBYTES, address_of, guard, kind_word
from fastopt.kernels.rule import Rule

Words = NDArray[np.int64]

CODES = {np.float32: w.FLOAT32, np.float64: w.FLOAT64, FLOAT16: w.FLOAT16}
CODES[BFLOAT16] = w.BFLOAT16
"""Code of each storage type of weights and gradients."""

LINE = 64
"""Bytes of a cache line."""

APART = 192
"""Further bytes between states: at distances near a multiple of a page, a load of one state would
wait for the store to another."""

ALONE_FROM = 1 << 20
"""Bytes from which states of a parameter have a block of their own, which is freed with them."""


class Slot(NamedTuple):
    """Array of a new state, as a part of a block of zeros."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    offset: int


NUMBERS = np.empty(0)
"""In place of the arrays of a state."""


class Blank(NamedTuple):
    """State of a parameter before its first update, if it consists of zeros."""

    nested: Any
    """The state with empty arrays."""
    slots: list[Slot]
    spacing: int
    """Bytes of memory for each parameter."""

    is_flat: bool
    """Whether the state is a tuple of the arrays."""

    def arrays(self, memory: Array, start: int) -> list[Array]:
        """Return the arrays of a state in a block of zeros, from byte `start` on."""
        return [
            np.ndarray(shape, dtype, memory, start + offset, strides)
            for shape, dtype, strides, offset in self.slots
        ]

    def state(self, arrays: Sequence[Array]) -> Any:
        """Return the state that has these arrays."""
        following = iter(arrays)
        return tuple(arrays) if self.is_flat else mapped(lambda _: next(following), self.nested)


class Template(NamedTuple):
    """A record of one parameter, which serves others of the same form."""

    block: Words
    """The words of the record, and behind them the arrays that it has the addresses of; these are
    relative to the start."""
    layout: Layout
    leaves: list[int]
    """Positions in the state of the arrays besides the weight."""
    columns: list[int]
    """Positions in the block of the addresses of these arrays."""
    guards: list[int]
    """Positions in the block of the ids of these arrays."""
    row: int
    """Position in the block of the row of the table."""
    kernels: Words | None
    """Addresses of the loops for dense gradients, whose address is in the block; None if the first
    gradient is row-sparse."""
    blank: Blank | None = None
    """The state before the first update, if it is always the same."""

    def filled(self, addresses: Sequence[int], headers: Sequence[int]) -> tuple[Words, Any, int]:
        """Return a block for arrays and their headers at some addresses, its view, its address."""
        block = self.block.copy()
        base, words = address_of(block), block.data
        for place in INSIDE:
            words[place] += base
        for k, place in enumerate(self.columns):
            words[place], words[self.guards[k]] = addresses[k], headers[k]
        return block, words, base


TEMPLATES: dict[Any, Template] = {}
"""Templates by what they depend on: see :meth:`NewParameter.key`."""

MOST_TEMPLATES = 4096
"""Number of templates from which they are forgotten."""


def remember(key: tuple[Any, ...], template: Template) -> None:
    """Keep a template for other parameters."""
    if len(TEMPLATES) >= MOST_TEMPLATES:
        TEMPLATES.clear()
    TEMPLATES[key] = template


INSIDE = [w.FIELDS, w.SUMS, w.ROW, w.GUARDS, w.CHUNKS, w.FLAT]
"""Words of a record with addresses in its block."""


def blank_of(optimizer: OptimizerLike, weight: Array, state: object) -> Blank | None:
    """Return the template of a new state, or None if states of this form are not all zeros."""
    if not optimizer.starts_at_zero or is_half(weight):
        return None
    slots: list[Slot] = []
    end = 0
    for array in leaves(state):
        slots.append(Slot(array.shape, array.dtype, array.strides, end))
        end += -(-array.nbytes // LINE) * LINE + APART
    is_flat = nesting(state) == (0,) * len(slots)
    return Blank(mapped(lambda _: NUMBERS, state), slots, end, is_flat)


def nesting(state: object) -> Any:
    """Return the nesting of a state: 0 for an array, None, and tuples of them; also of a list."""
    if isinstance(state, (tuple, list)):
        kind = () if isinstance(state, tuple) else (list,)
        return (*kind, *map(nesting, state))
    return None if state is None else 0


def is_pitched(arrays: Sequence[Array]) -> bool:
    """Whether all arrays have contiguous rows with one common stride, larger than a row."""
    lead = arrays[0]
    return not lead.flags.c_contiguous and all(
        array.ndim == 2
        and array.flags.aligned
        and array.strides == (lead.strides[0], array.itemsize)
        and array.strides[0] >= array.shape[1] * array.itemsize
        for array in arrays
    )


LOOPS: dict[Any, Words] = {}
"""Addresses of loops, which records have the addresses of: the first array of a key stays."""


class Loops(NamedTuple):
    """What loops are compiled for."""

    layout: Layout
    weight: type
    """Storage type of the weights."""
    measured: bool
    """Whether sums of squares are computed too."""
    clipped: bool
    """Whether units of gradients are clipped too."""
    numbers: bool = False
    """Whether indexed rows have one number each."""
    flushed: bool = False
    """Whether deferred decay is applied to all rows too."""
    alone: Rule | None = None
    """A rule that averages all rows, without an update."""

    @property
    def addresses(self) -> Words:
        """Addresses of the loops, and what is known of them."""
        loops = LOOPS.get(self)
        if loops is None:  # two threads may compile the same loops
            loops = LOOPS.setdefault(self, _compiled(self))
        return loops


def _compiled(loops: Loops) -> Words:
    layout, rule, squares = loops.layout, loops.layout.rule, 0
    if loops.measured:
        rows = (layout.first_grad, True) if layout.sparse else ()
        squares = cpu_addresses.squares(layout.grad, layout.real, *rows)
    units = cpu_addresses.units(loops.weight, layout.real) if loops.clipped else 0
    by_row = w.EVERY_ROW if layout.catch_up else int(layout.by_row)
    if loops.alone is not None:
        follow = cpu_addresses.follow(layout, loops.alone)
        return np.array([0, squares, units, by_row, 0, follow, 0])
    addresses = [cpu_addresses.update(layout, loops.numbers), squares, units, by_row]
    addresses += [cpu_addresses.flush(layout) if loops.flushed else 0, 0, len(rule.passes)]
    for step, number in enumerate(rule.sums):
        addresses += [cpu_addresses.sums(layout, step), cpu_addresses.finish(layout, step)]
        addresses += [number, int(rule.passes[step].largest)]
    return np.array(addresses, np.int64)


def _packed(record: Words, inside: dict[int, Array]) -> Words:
    """Return a record and the arrays that it has the addresses of in one block."""
    pieces, end = [record], len(record)
    for place, array in inside.items():
        record[place] = 8 * end
        pieces.append(np.ascontiguousarray(array).view(np.int64).ravel())
        end += array.size
    return np.concatenate(pieces)


def template_of(
    layout: Layout,
    kernels: Words | None,
    weight: Array,
    others: tuple[Array, ...],
    order: int,
    column: int,
    positions: list[int],
) -> Template:
    """Return the template of a parameter whose arrays have been checked.

    The weight's address is in `column` of its row; `others` are at `positions` of its state.
    """
    width, (items, _) = items_of(layout, weight)
    row = np.zeros(layout.first_grad + 1, np.int64)
    row[WIDTH] = width
    required = 0 if layout.pitched else order
    guards = guard(others, len(others), required) if others else np.zeros((0, 1), np.uint64)
    if layout.pitched:
        row[PITCH] = weight.strides[0]
        for words, array in zip(guards, others, strict=True):
            words[NBYTES] = np.subtract(*byte_bounds(array)[::-1])
    flat, _ = chunks_of((weight.size, 1))
    inside = {
        w.ROW: row,
        w.GUARDS: guards,
        w.CHUNKS: np.array([0, 0, items]),
        w.FLAT: flat,
        w.FIELDS: np.zeros(len(layout.rule.hyper)),
        w.SUMS: np.zeros(len(flat) * max(layout.rule.sums, default=1)),
    }
    numbers = {
        w.KERNELS: 0 if kernels is None else kernels.ctypes.data,
        w.GUARDED: len(others),
        w.GUARD_WIDTH: guards.shape[1],
        w.WEIGHT_COLUMN: column,
        w.GRAD_COLUMN: layout.first_grad,
        w.WEIGHT_DTYPE: kind_word(weight.dtype),
        w.WEIGHT_CODE: CODES[kind_of(weight.dtype)],
        w.GRAD_CODE: CODES[layout.grad],
        w.ORDER: order,
        w.NDIMS: weight.ndim,
        w.SIZE: weight.size,
        w.BYTES: weight.nbytes,
        w.ITEM_COUNT: items,
        w.FLAT_COUNT: len(flat),
        w.KEYED: layout.keyed,
    }
    record = np.zeros(max(w.RECORD, w.LENGTHS + weight.ndim), np.int64)
    for place, number in numbers.items():
        record[place] = number
    record[w.LENGTHS : w.LENGTHS + weight.ndim] = weight.shape
    block = _packed(record, inside)
    first = [int(record[place]) // 8 for place in (w.ROW, w.GUARDS)]
    return Template(
        block,
        layout,
        positions,
        [first[0] + c for c in range(ADDRESS, layout.first_grad) if c != column],
        [first[1] + k * guards.shape[1] for k in range(len(others))],
        first[0],
        kernels,
    )


def zeros(size: int) -> Array:
    """Return bytes that begin with a cache line."""
    memory = np.zeros(size + LINE, np.uint8)
    return memory[-address_of(memory) % LINE :]
