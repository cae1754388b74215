"""What a kernel is compiled for: a rule, and the kinds of memory that it works on."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from fastopt.kernels.rule import Rule

__all__ = [
    "ADDRESS",
    "BFLOAT16",
    "CODES",
    "DECAY",
    "DONE",
    "FLOAT16",
    "KEY",
    "OFFSET",
    "ORDER",
    "PAID",
    "PITCH",
    "ROWS",
    "SEGMENTS",
    "SPLIT",
    "STARTS",
    "WIDTH",
    "Layout",
    "bfloat16",
    "kind_of",
    "real_of",
    "state_kind",
]

DONE, KEY, OFFSET, WIDTH, ROWS, STARTS, ORDER, SEGMENTS, PAID, DECAY, PITCH, ADDRESS = range(12)
"""Columns of a table of tensors, which has a row for each tensor.

DONE is set in the first row by the kernel that has updated all tensors. KEY is the key of the
tensor's random numbers, OFFSET the number that its first element has for them, where it is a slice
of a tensor, and WIDTH the number of elements in a row of it. A row-sparse gradient lists rows
SEGMENTS in number, in ascending order at address ROWS; the values for the k-th of them are those at
places ``order[starts[k]:starts[k + 1]]``, with ``starts`` at STARTS and ``order`` at ORDER. PAID
and DECAY are addresses too, of what each row's decay has come to and of the totals before and after
the step. PITCH is the number of bytes between rows of weight and state that are fields of records.
From ADDRESS on come the addresses of the weight (and its rounded copy or remainder), of
each state slot, of the numbers that the tensor keeps, of the scales of each slot of codes, and of
the gradient.
"""

FLOAT16, BFLOAT16 = np.uint16, np.int16
"""Types of the bits of a half; two, so that the type of a pointer tells which half it is."""

SPLIT = (BFLOAT16, np.uint16)
"""Kinds of a weight that is a bfloat16 and, beside it, the 16 bits that this lacks of a float32."""

CODES = {"int8": np.int8, "uint8": np.uint8}
"""Types of the codes of signed and of nonnegative numbers, by their names."""

_KINDS = {"float32": np.float32, "float64": np.float64, "float16": FLOAT16, "bfloat16": BFLOAT16}


@cache
def kind_of(dtype: Any) -> Any:
    """Type that stands for `dtype` in memory; None if kernels do not know it."""
    return _KINDS.get(dtype.name) if dtype.isnative else None


def state_kind(dtype: Any) -> Any:
    """Type that stands for `dtype` in the memory of a state, which may hold codes."""
    return kind_of(dtype) or CODES.get(dtype.name)


def bfloat16() -> Any:
    """The dtype of bfloat16 arrays.

    Raises
    ------
    ImportError
        The package ml_dtypes, which defines it, is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("bfloat16 arrays need ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def real_of(dtype: Any) -> Any:
    """Type of the arithmetic on weights of `dtype`: float32, or float64 for float64."""
    return np.float64 if dtype == np.float64 else np.float32


@dataclass(frozen=True)
class Layout:
    """A rule and the kinds of memory of the arrays that it is applied to.

    Parameters
    ----------
    rule : Rule
        What updates a tensor.
    real : type
        Type of the arithmetic.
    weight : tuple of type
        Kind of the exact weight, and that of a rounded copy if one is written beside it; or SPLIT.
    grad : type
        Kind of the gradient.
    state : tuple of type
        Kind of each state slot; halves are rounded stochastically, bytes are codes.
    dither : bool
        The weight is rounded stochastically.
    sparse : bool
        The gradient lists rows.
    lazy : bool
        Rows that the gradient does not list are left alone.
    catch_up : bool
        Listed rows are given the decay first that they have missed.
    rounded_sums : bool
        The passes of the rule see the weight as its half-precision copy has it.
    pitched : bool
        Rows of weight and state are at equal distances, and other things lie between them.
    """

    rule: Rule
    real: Any
    weight: tuple[Any, ...]
    grad: Any
    state: tuple[Any, ...]
    dither: bool = False
    sparse: bool = False
    lazy: bool = False
    catch_up: bool = False
    rounded_sums: bool = False
    pitched: bool = False

    @property
    def first_state(self) -> int:
        """Column of a table with the address of the first state slot."""
        return ADDRESS + len(self.weight)

    @property
    def first_grad(self) -> int:
        """Column of a table with the address of the gradient."""
        return self.first_scale + len(self.scales)

    @property
    def first_scale(self) -> int:
        """Column of a table with the address of the scales of the first slot of codes."""
        return self.first_kept + len(self.rule.kept)

    @property
    def first_kept(self) -> int:
        """Column of a table with the address of the first number that a tensor keeps."""
        return self.first_state + len(self.state)

    @property
    def kept(self) -> tuple[Any, ...]:
        """Kind of each of these numbers."""
        return (self.real,) * len(self.rule.kept)

    @property
    def scales(self) -> tuple[Any, ...]:
        """Kind of the scales of each slot of codes."""
        return (self.real,) * sum(kind in CODES.values() for kind in self.state)

    @cached_property
    def coded(self) -> bool:
        """Whether a state slot holds codes, see :mod:`fastopt.kernels.blocks`."""
        return bool(self.scales)

    @property
    def summed(self) -> tuple[int, tuple[Any, ...]]:
        """Column of the weight that the passes of the rule see, and its kinds."""
        if not self.rounded_sums:
            return ADDRESS, self.weight
        # A split weight's first part is its rounded form, otherwise that is the copy behind it.
        behind = int(self.weight != SPLIT)
        return ADDRESS + behind, (self.weight[behind],)

    @property
    def record(self) -> Any:
        """Dtype of the record of hyper-parameters of a tensor."""
        return self.rule.record(self.real)

    @property
    def by_row(self) -> bool:
        """Whether the kernel goes row by row."""
        return self.lazy or self.rule.row is not None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.rule, self.weight, self.grad, self.state, self.sparse, self.lazy))

    @cached_property
    def keyed(self) -> bool:
        """Whether an update draws random numbers."""
        return self.rule.noise or self.dither or BFLOAT16 in self.state
