"""Encoding and decoding of arrays of 8-bit codes with block scales.

Tests: ``tests/kernels/test_blocks.py``.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastopt._kernels.blocks import (
    CODE_BLOCK,
    NONNEGATIVE,
    SIGNED,
    blocks_of,
    nonnegative_code,
    nonnegative_value,
    scale_of,
    signed_code,
    signed_value,
)
from fastopt._kernels.layout import CODES

__all__ = [
    "decoded",
    "encoded",
    "is_coded",
    "is_worth_codes",
    "numbers_of",
    "scales_shape",
    "split_scales",
]

Array = np.ndarray[Any, Any]

LEAST = 4096
"""Minimum elements of a weight whose state is coded by default."""

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


def is_coded(array: Any) -> bool:
    """Whether an array holds codes."""
    return getattr(getattr(array, "dtype", None), "name", None) in CODES


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
    return [decoded(array, next(of)) if is_coded(array) else array for array in rest]


def decoded(codes: Array, scales: Array) -> Array:
    """Decode an array of codes to the dtype of the scales."""
    value = signed_value if codes.dtype == np.int8 else nonnegative_value
    values = np.empty(codes.shape, scales.dtype)
    for (part, target), scale in _parts(scales, np.ascontiguousarray(codes), values):
        target[...] = value(part.astype(scales.dtype), scale)
    return values


@np.errstate(invalid="ignore")
def encoded(numbers: Array, kind: Any) -> tuple[Array, Array]:
    """Encode float32 or float64 numbers; return codes of type `kind`, int8 or uint8, and scales."""
    signed = kind == np.int8
    codes = np.empty(numbers.shape, kind)
    scales = np.zeros(scales_shape(numbers.shape), numbers.dtype)
    for (part, target), scale in _parts(scales, np.ascontiguousarray(numbers), codes):
        part = part if signed else np.sqrt(part)
        tops = np.abs(part).max(axis=-1)
        pairs = [scale_of(top, SIGNED if signed else NONNEGATIVE) for top in tops.ravel()]
        found = np.array(pairs, numbers.dtype).T.reshape(2, *tops.shape, 1)
        scale[...] = found[0]
        exact = signed_code(part, found[1])
        if not signed:
            exact = nonnegative_code(part, np.sqrt(found[1]))
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
