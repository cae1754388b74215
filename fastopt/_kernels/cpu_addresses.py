"""Loops of a layout as C functions that compiled code calls by address.

They are small, so that a rule compiles quickly: what surrounds the loops is compiled once for all
rules, in :mod:`fastopt._kernels.front`.

Tests: ``tests/engine/test_records.py``.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import carray, types

from fastopt._kernels.compiling import ON_WORDS, address_of
from fastopt._kernels.cpu import element_loop, flush_loop, number_loop, update_loop
from fastopt._kernels.cpu_sums import finish_loop, square_loop, sum_loop
from fastopt._kernels.layout import ADDRESS, WIDTH, Layout
from fastopt._kernels.objects import doubles, record_at, record_pointer, unsigned, words
from fastopt._kernels.units import unit_loop
from fastopt.kernels.rule import Rule, scalar

ON_CHUNKS = ON_WORDS
"""Signature ``(chunks, count, row, fields, sums)``: the addresses of `count` chunks of one tensor,
of its row of a table, of its hyper-parameters and of the sums of the chunks."""

ON_STEP = types.void(types.float64, types.int64, types.int64)
"""Signature ``(t, fields, carried)``: addresses of hyper-parameters and of a carried number."""


@cache
def update(layout: Layout, numbers: bool = False) -> int:
    """Return the address of the function that applies the rule to chunks.

    With `numbers`, indexed rows have one number each.
    """
    if numbers and layout.lazy and not layout.coded:
        return _on_chunks(layout, "numbers", scalar(number_loop(layout)), 0)
    return _on_chunks(layout, "update", scalar(update_loop(layout)), 0)


@cache
def sums(layout: Layout, step: int) -> int:
    """Return the address of the function that computes the sums of reduction `step`."""
    return _on_chunks(layout, f"sums{step}", scalar(sum_loop(layout, step)), layout.rule.sums[step])


@cache
def finish(layout: Layout, step: int) -> int:
    """Return the address of the function that finalizes reduction `step`."""
    loop = scalar(finish_loop(layout, step))
    return _on_chunks(layout, f"finish{step}", loop, layout.rule.sums[step])


@cache
def flush(layout: Layout) -> int:
    """Return the address of the function that applies deferred weight decay to chunks of rows."""
    loop, columns = scalar(flush_loop(layout)), layout.first_grad + 1

    def on_chunks(chunks, count, row, _, __):
        loop(carray(words(chunks), (count, 3)), carray(unsigned(row), (1, columns)))

    return address_of(on_chunks, ON_CHUNKS, layout.rule, "flush")


@cache
def follow(layout: Layout, alone: Rule) -> int:
    """Return the address of the function that averages chunks of rows of a weight.

    The rule of `layout` updates the weight too; `alone` is the one that only averages.
    """
    parts, average = len(layout.weight), layout.first_kept - 1
    place = (len(layout.rule.hyper) - 1) * np.dtype(layout.real).itemsize
    lone = Layout(alone, layout.real, layout.weight, layout.weight[0], (layout.real,))
    loop, state, grad, record = element_loop(lone), lone.first_state, lone.first_grad, lone.record
    loop = scalar(loop)

    def on_chunks(chunks, count, row, fields, _):
        listed, table = np.empty((count, 3), np.int64), np.zeros((1, grad + 1), np.uint64)
        source = unsigned(row)
        for k in range(count):
            listed[k, 0] = 0
            for end in range(1, 3):
                listed[k, end] = words(chunks)[3 * k + end] * np.int64(source[WIDTH])
        for part in range(parts):
            table[0, ADDRESS + part] = source[ADDRESS + part]
        table[0, state] = source[average]
        table[0, grad] = source[ADDRESS]  # the rule reads no gradient
        loop(listed, table, carray(record_pointer(fields + place, record), (1,)))

    return address_of(on_chunks, ON_CHUNKS, layout.rule, "follow", also=(alone,))


@cache
def squares(kind: type, real: type, column: int = 0, sparse: bool = False) -> int:
    """Return the address of the function that sums the squares of a gradient in each chunk.

    The gradient's address is in `column` of the row, for a dense one its only word. Chunks are
    those of indexed rows if the gradient is `sparse`.
    """
    columns = column + 1
    loop = scalar(square_loop((kind,), real, column, sparse))

    def on_chunks(chunks, count, row, _, partial):
        table = carray(unsigned(row), (1, columns))
        loop(carray(words(chunks), (count, 3)), table, carray(doubles(partial), (count,)))

    return address_of(on_chunks, ON_CHUNKS, None, "rows" if sparse else "")


@cache
def units(weight: type, real: type) -> int:
    """Return the address of the function that clips units of gradients in the dtype `real`.

    Its arguments are the first unit, the number of units, the addresses of three words, which are
    the addresses of weight, gradient and result, and of three numbers, and the width of a unit.
    """
    loop = unit_loop(weight, real, real)

    def on_units(first, count, row, numbers, width):
        table, values = carray(unsigned(row), (1, 3)), doubles(numbers)
        for unit in range(first, first + count):
            loop(table, unit, width, values[0], values[1], values[2])

    return address_of(on_units, ON_CHUNKS, None)


@cache
def prepare(correct: Callable[..., None], names: tuple[str, ...]) -> int:
    """Return the address of the function that corrects hyper-parameters for a step."""
    dtype = np.dtype((np.record, [(name, np.float64) for name in names]))

    def prepare(t, fields, carried):
        correct(t, record_at(fields, dtype), carray(doubles(carried), (1,)))

    return address_of(prepare, ON_STEP, None, also=(correct,))


def _on_chunks(layout: Layout, variant: str, loop: Callable, sums: int) -> int:
    """Return the address of a loop over the chunks of one tensor, with `sums` sums for each."""
    columns, record = layout.first_grad + 1, layout.record

    def on_chunks(chunks, count, row, fields, partial):
        listed = carray(words(chunks), (count, 3))
        table = carray(unsigned(row), (1, columns))
        hyper = carray(record_pointer(fields, record), (1,))
        if sums:
            loop(listed, table, hyper, carray(doubles(partial), (count, sums)))
        else:
            loop(listed, table, hyper)

    return address_of(on_chunks, ON_CHUNKS, layout.rule, variant)
