"""The layout that a kernel is compiled for: a rule and the storage types of its arrays.

Tests: ``tests/engine/test_parameters.py``.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from fastopt.kernels.rule import Rule

DONE, KEY, OFFSET, WIDTH, ROWS, STARTS, ORDER, SEGMENTS, APPLIED, DECAY, PITCH, FOLDED, ADDRESS = (
    range(13)
)
"""Columns of a table of tensors, which has a row for each tensor.

DONE is set in the first row by the kernel that has updated all tensors; on a device it is set in
all rows of a step that is skipped. KEY is the key of the
tensor's random numbers; OFFSET is the number of its first element in the random stream, if the
tensor is a slice; WIDTH is the number of elements in a row. A row-sparse gradient has SEGMENTS
unique rows, in ascending order at address ROWS; the values of the k-th one are at positions
``order[starts[k]:starts[k + 1]]``, with ``starts`` at address STARTS and ``order`` at ORDER.
APPLIED is the address of the decay applied to each row, DECAY that of the accumulated decay before
and after the step. PITCH is the number of bytes between rows of weight and state that are fields of
records. FOLDED is the address of the sums of parts of rows that are indexed often; see
:func:`fastopt._kernels.segments.summed`. The columns from ADDRESS on have the addresses of the
weight (and its rounded copy or low 16 bits), of each state slot, of the numbers that the rule keeps
for the tensor, of the scales of each 8-bit slot, and of the gradient.
"""

FLOAT16, BFLOAT16 = np.uint16, np.int16
"""Types of the bits of half-precision values; they differ so that pointer types do too."""

SPLIT = (BFLOAT16, np.uint16)
"""Storage types of a weight split into a bfloat16 and the low 16 bits of the float32."""

CODES = {"int8": np.int8, "uint8": np.uint8}
"""Types of the codes of signed and of nonnegative numbers, by name."""

PAIRS: dict[Any, Any] = {np.float32: np.complex64, np.float64: np.complex128}
"""Types of complex numbers, by the type of their parts."""

_KINDS = {"float32": np.float32, "float64": np.float64, "float16": FLOAT16, "bfloat16": BFLOAT16}


@cache
def kind_of(dtype: np.dtype) -> Any:
    """Return the storage type of `dtype`; None if kernels do not support it."""
    return _KINDS.get(dtype.name) if dtype.isnative else None


def state_kind(dtype: np.dtype) -> Any:
    """Return the storage type of `dtype` in a state, which may hold 8-bit codes."""
    return kind_of(dtype) or CODES.get(dtype.name)


def bfloat16() -> Any:
    """Return the dtype of bfloat16 arrays.

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


def real_of(dtype: np.dtype) -> Any:
    """Return the type of the arithmetic on weights of `dtype`: float32, or float64 for float64."""
    return np.float64 if dtype == np.float64 else np.float32


def wide_of(kind: type) -> tuple[Any]:
    """Return the type, in a tuple, that numbers of a storage type have when they are loaded."""
    return (np.float64 if kind == np.float64 else np.float32,)


@dataclass(frozen=True)
class Layout:
    """A rule and the storage types of the arrays that it is applied to.

    Parameters
    ----------
    rule : Rule
        The update rule.
    real : type
        Type of the arithmetic.
    weight : tuple of type
        Storage type of the exact weight, and of its rounded copy if it has one; or SPLIT.
    grad : type
        Storage type of the gradient.
    state : tuple of type
        Storage type of each state slot; half precision is rounded stochastically, bytes are codes.
    dither : bool
        The weight is rounded stochastically.
    sparse : bool
        The gradient is row-sparse.
    lazy : bool
        Only the indexed rows are updated.
    catch_up : bool
        Deferred weight decay is applied to the indexed rows first.
    rounded_sums : bool
        The reductions of the rule read the half-precision form of the weight.
    pitched : bool
        Rows of weight and state have a common stride that is larger than a row.
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
    def read_weights(self) -> int:
        """Number of the weight's arrays that an update reads: a rounded copy is only written."""
        return len(SPLIT) if self.weight == SPLIT else 1

    @property
    def first_state(self) -> int:
        """Column of a table with the address of the first state slot."""
        return ADDRESS + len(self.weight)

    @property
    def split_state(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Storage types of the slots with a number for each element, then of those of rows."""
        count = len(self.state) - len(self.rule.row_state)
        return self.state[:count], self.state[count:]

    @property
    def first_row_state(self) -> int:
        """Column of a table with the address of the first slot with a number for each row."""
        return self.first_state + len(self.split_state[0])

    @property
    def first_grad(self) -> int:
        """Column of a table with the address of the gradient."""
        return self.first_scale + len(self.scales)

    @property
    def first_scale(self) -> int:
        """Column of a table with the address of the scales of the first 8-bit slot."""
        return self.first_kept + len(self.rule.kept)

    @property
    def first_kept(self) -> int:
        """Column of a table with the address of the first number kept for a tensor."""
        return self.first_state + len(self.state)

    @property
    def kept(self) -> tuple[Any, ...]:
        """Storage type of each number kept for a tensor."""
        return (self.real,) * len(self.rule.kept)

    @property
    def scales(self) -> tuple[Any, ...]:
        """Storage type of the scales of each 8-bit slot."""
        return (self.real,) * sum(kind in CODES.values() for kind in self.state)

    @cached_property
    def coded(self) -> bool:
        """Whether a state slot holds 8-bit codes; see :mod:`fastopt._kernels.blocks`."""
        return bool(self.scales)

    @property
    def wide_grad(self) -> tuple[Any]:
        """Type, in a tuple, of the gradient's numbers when they are loaded."""
        return wide_of(self.grad)

    @property
    def summed(self) -> tuple[int, tuple[Any, ...]]:
        """Column of the weight that the reductions of the rule read, and its storage types."""
        if not self.rounded_sums:
            return ADDRESS, self.weight
        # The rounded form is the first part of a split weight, else the copy after the weight.
        behind = int(self.weight != SPLIT)
        return ADDRESS + behind, (self.weight[behind],)

    @property
    def record(self) -> Any:
        """Dtype of the record of hyper-parameters of a tensor."""
        return self.rule.record(self.real)

    @cached_property
    def by_row(self) -> bool:
        """Whether the kernel works row by row."""
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
