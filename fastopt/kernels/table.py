"""Tables of tensors: what a kernel launch is told about the arrays that it works on."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import cpu
from fastopt.kernels.rule import Rule

__all__ = ["CHUNK", "PARALLEL_FROM", "SHARE_FROM", "Tensor", "chunks", "launch"]

CHUNK = 32_768
"""Elements in one piece of work: 128 KB of float32, so that four arrays stay in a core's cache."""

PARALLEL_FROM = 16_384
"""Elements from which starting threads costs less than it saves."""

SHARE_FROM = 12
"""Tensors from which making them share a launch costs less than it saves."""


class Tensor:
    """The arrays of one tensor and what the kernels are told about them.

    It may serve in call after call, since most of it stays what it was. Addresses do not: an array
    can be resized in place, so that :meth:`take` reads them anew.

    Parameters
    ----------
    rule : Rule
        What updates the tensor.
    weight : numpy.ndarray
        The weight, of a dtype that kernels know.
    state : tuple of numpy.ndarray
        One array for each slot of the rule.
    """

    def __init__(self, rule: Rule, weight: np.ndarray, state: tuple[np.ndarray, ...]) -> None:
        self.rule, self.weight, self.state = rule, weight, state
        self.dtype: Any = weight.dtype
        self.real: Any = weight.dtype.type
        self.size = weight.size
        self.by_row = rule.row is not None
        self.width = weight.size // max(state[0].size, 1) if self.by_row else 1
        self.entry = np.empty((1, 4 + len(state)), np.uint64)
        self.entry[0, -1] = self.width
        self.fields = np.empty(len(rule.hyper), self.real)
        self.record = self.fields.view(rule.record(self.real))  # type: ignore[arg-type]
        self.pieces, _ = chunks((self.size, self.width))
        self.copied: Sequence[tuple[np.ndarray, np.ndarray]] = ()
        self.borrowed: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def of_copies(
        cls, rule: Rule, weight: np.ndarray, grad: np.ndarray, state: tuple[np.ndarray, ...]
    ) -> "Tensor":
        """Tensor with contiguous copies of the arrays that kernels cannot work on.

        :func:`launch` copies weight and state back.
        """
        arrays = [np.require(array, None, ("C", "A", "E")) for array in (weight, grad, *state)]
        tensor = cls(rule, arrays[0], tuple(arrays[2:]))
        pairs = zip((weight, *state), (arrays[0], *arrays[2:]), strict=True)
        tensor.copied = [(o, n) for o, n in pairs if not np.may_share_memory(o, n)]
        tensor.borrowed = grad, arrays[1]
        taken = tensor.take(arrays[1])
        assert taken
        return tensor

    def renew(self) -> None:
        """Copy again what is worked on as copies, after other tensors have been updated."""
        for original, copy in self.copied:
            copy[...] = original
        if self.borrowed and self.borrowed[0] is not self.borrowed[1]:
            self.borrowed[1][...] = self.borrowed[0]

    def take(self, grad: Any) -> bool:
        """Enter the present addresses; False if kernels cannot work on the arrays as they are.

        They can if all are contiguous, aligned and of the shape and dtype that the tensor was made
        for, `grad` does not overlap the weight, and all but `grad` can be written to.
        """
        dtype = self.dtype
        if type(grad) is not np.ndarray or grad.dtype != dtype or self.weight.dtype != dtype:
            return False
        size = cpu.admit()(self.entry, self.weight, grad, self.state, self.by_row)
        return bool(size == self.size)

    def fill(self, hyper: tuple[float, ...], key: int) -> None:
        """Set the values of the rule's fields in order, and the key of its noise."""
        try:
            if None in hyper:  # NumPy takes it for NaN
                raise TypeError
            self.record[0] = hyper
        except (TypeError, ValueError):
            raise TypeError(
                f"rule {self.rule.name} needs numbers for {self.rule.hyper}, got {hyper}"
            ) from None
        if self.rule.noise:
            self.entry[0, -2] = key


def launch(tensors: Sequence[Tensor]) -> None:
    """Update `tensors` in place, with the result of one after the other.

    Many with equal rule and dtype share a kernel launch, unless some share memory.
    """
    if len(tensors) >= SHARE_FROM and _disjoint(tensors):
        groups: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.rule, tensor.real), []).append(tensor)
        for (rule, real), group in groups.items():
            pieces, total = chunks(*[(tensor.size, tensor.width) for tensor in group])
            table = np.concatenate([tensor.entry for tensor in group])
            fields = np.concatenate([tensor.fields for tensor in group])
            records = fields.view(rule.record(real))
            _run(rule, real, pieces, total, table, records)
        return
    for tensor in tensors:
        if tensor is not tensors[0]:
            tensor.renew()
        _run(tensor.rule, tensor.real, tensor.pieces, tensor.size, tensor.entry, tensor.record)
        for original, copy in tensor.copied:
            original[...] = copy


def _run(rule: Rule, real: Any, pieces: Any, total: int, table: Any, records: Any) -> None:
    """Launch the kernels of every pass and of the update on a table of `total` elements."""
    if not total:
        return
    parallel = total >= PARALLEL_FROM
    for step, count in enumerate(rule.sums):
        partial = np.zeros((len(pieces), count))
        cpu.sums(rule, step, real, parallel)(pieces, table, records, partial)
        cpu.finish(rule, step, real)(pieces, records, partial)
    kernel = cpu.rows if rule.row else cpu.dense
    kernel(rule, real, parallel)(pieces, table, records)


@lru_cache(maxsize=1024)
def chunks(*shapes: tuple[int, int]) -> tuple[NDArray[np.int64], int]:
    """Cut tensors of ``(size, width)`` between their rows into pieces of work.

    Returns an array with a row ``(tensor, start, size)`` for each piece, and the sum of the sizes.
    """
    pieces = [np.empty((0, 3), np.int64)]
    for tensor, (size, width) in enumerate(shapes):
        step = max(CHUNK // width, 1) * width if width else 1
        start = np.arange(0, size, step)
        sizes = np.minimum(step, size - start)
        pieces.append(np.stack([np.full_like(start, tensor), start, sizes], axis=1))
    return np.concatenate(pieces), sum(size for size, _ in shapes)


def _disjoint(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor works on copies and no two arrays of the tensors share memory."""
    if any(tensor.copied for tensor in tensors):
        return False
    start = np.concatenate([tensor.entry[0, :-2] for tensor in tensors])
    sizes = [a.nbytes for t in tensors for a in (t.weight, t.weight, *t.state)]  # gradient's too
    end = start + np.array(sizes, np.uint64)
    order = np.argsort(start)
    return bool((end[order][:-1] <= start[order][1:]).all())
