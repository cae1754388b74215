"""Encoding and decoding of arrays of 8-bit codes with block scales.

Tests: ``tests/kernels/test_blocks.py``.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastopt._kernels.blocks import (
    CODE_BLOCK,
    LIFT,
    blocks_of,
    inverse_root,
    nonnegative_scale,
    signed_scale,
    signed_value,
    squeezed,
    stretched,
)
from fastopt._kernels.layout import CODES, Layout

Array = np.ndarray[Any, Any]

LEAST = 4096
"""Minimum elements of a weight whose state is coded by default."""

KINDS = frozenset(map(np.dtype, CODES.values()))
"""Dtypes of codes; the name of a dtype is computed by an import, which fails when Python exits."""

NARROW = 16
"""Minimum elements of a row of such a weight."""

PIECE = 1 << 13
"""Blocks that are converted at a time, which bounds the scratch memory."""


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of codes of this shape: ``(rows, blocks in a row)``.

    Arrays of fewer than two dimensions are one row.
    """
    rows = shape[0] if len(shape) > 1 else 1
    width = math.prod(shape[1:] if len(shape) > 1 else shape)
    return rows, blocks_of(width)


def is_worth_codes(shape: tuple[int, ...], least: int | None) -> bool:
    """Whether the state of a weight of this shape is coded.

    It is if the weight has at least `least` elements. By default, weights of two or more dimensions
    and at least LEAST elements are coded. Rows must have at least NARROW elements on average, or
    the scales would take too much memory.
    """
    size = math.prod(shape)
    if len(shape) < 2:
        return least is not None and size >= least
    return size >= (LEAST if least is None else least) and size >= NARROW * shape[0]


def is_coded(array: object) -> bool:
    """Whether an array holds codes."""
    return getattr(array, "dtype", None) in KINDS


def split_scales(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split a state into its arrays and the scales, each of which follows its codes."""
    rest: list[Any] = []
    scales: list[Any] = []
    of_codes = False
    for array in arrays:
        (scales if of_codes else rest).append(array)
        of_codes = not of_codes and is_coded(array)
    return rest, scales


def numbers_of(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays of a state, with codes decoded."""
    rest, scales = split_scales(arrays)
    of = iter(scales)
    pairs: list[Any] = [(array, next(of) if is_coded(array) else None) for array in rest]
    by = next((pair for pair in pairs if pair[1] is not None and pair[0].dtype == np.uint8), None)
    return [array if scales is None else decoded(array, scales, by) for array, scales in pairs]


def decoded(codes: Array, scales: Array, by: tuple[Array, Array] | None = None) -> Array:
    """Decode an array of codes to the dtype of the scales.

    Signed codes are those of quotients if `by` has the nonnegative codes and scales of the state.
    """
    if codes.dtype == np.uint8:
        root = _roots(codes, scales)
        return root * root
    values = np.empty(codes.shape, scales.dtype)
    for (part, target), scale in _parts(scales, np.ascontiguousarray(codes), values):
        target[...] = signed_value(part.astype(scales.dtype), scale)
    return values if by is None else values * _roots(*by)


def _roots(codes: Array, scales: Array) -> Array:
    """Return the roots of nonnegative numbers."""
    values = np.empty(codes.shape, scales.dtype)
    for (part, target), scale in _parts(scales, np.ascontiguousarray(codes), values):
        code = part.astype(scales.dtype)
        target[...] = stretched(code + code.dtype.type(LIFT)) * -scale
    return values


@np.errstate(invalid="ignore", over="ignore")
def encoded(numbers: Array, kind: np.dtype, by: Array | None = None) -> tuple[Array, Array]:
    """Encode float32 or float64 numbers; return codes of type `kind`, int8 or uint8, and scales.

    Signed numbers are divided by the roots of `by`, if these are given.
    """
    signed = kind == np.int8
    codes = np.empty(numbers.shape, kind)
    scales = np.zeros(scales_shape(numbers.shape), numbers.dtype)
    others = () if by is None else (np.ascontiguousarray(by),)
    scale_of = signed_scale if signed else nonnegative_scale
    for (part, target, *rest), scale in _parts(
        scales, np.ascontiguousarray(numbers), codes, *others
    ):
        part = part * inverse_root(rest[0]) if rest else part
        tops = np.abs(part).max(axis=-1)
        pairs = [scale_of(top) for top in tops.ravel()]
        scaling = np.array(pairs, numbers.dtype).T.reshape(2, *tops.shape, 1)
        scale[...] = scaling[0]
        if signed:
            exact = signed_value(part, scaling[1])
        else:
            lift = numbers.dtype.type(LIFT)
            exact = np.maximum(squeezed(part * inverse_root(part) * scaling[1]), lift) - lift
        target[...] = np.nan_to_num(np.rint(exact)).astype(np.int16).astype(kind)
    return codes, scales


def _parts(scales: Array, *arrays: Array) -> Iterator[tuple[tuple[Array, ...], Array]]:
    """Yield blocks of equal length from arrays in C order, and their scales."""
    rows, number = scales.shape
    width = arrays[0].size // max(rows, 1)
    whole = width // CODE_BLOCK
    flat = [array.reshape(rows, width) for array in arrays]
    cuts = [(slice(0, whole * CODE_BLOCK), whole, CODE_BLOCK, slice(0, whole))]
    cuts.append(
        (slice(whole * CODE_BLOCK, width), number - whole, width % CODE_BLOCK, slice(whole, number))
    )
    for columns, count, length, of in cuts:
        views = [array[:, columns].reshape(rows, count, length) for array in flat]
        if not views[0].size:
            continue
        step, ahead = max(PIECE // count, 1), min(count, PIECE)
        for row in range(0, rows, step):
            for first in range(0, count, ahead):
                at = slice(row, row + step), slice(first, first + ahead)
                yield tuple(view[at] for view in views), scales[:, of][at][..., np.newaxis]


def items_of(layout: Layout, weight: Array) -> tuple[int, tuple[int, int]]:
    """Return the elements of a row, and the items that chunks consist of with their elements."""
    size, height = weight.size, len(weight) if weight.ndim else 1
    width = size // max(height, 1)
    if layout.coded:
        if weight.ndim < 2 and not layout.sparse:
            width = size
        rows, in_row = scales_shape(weight.shape)
        return width, (rows * in_row, size // max(rows * in_row, 1))
    return width, (height, width) if layout.rule.row else (size, 1)
