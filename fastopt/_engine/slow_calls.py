"""Calls that needed Python although their parameters had been updated before.

Tests: ``tests/engine/test_slow_calls.py``.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.per_index import Index
from fastopt._kernels import record_words as w
from fastopt._kernels.devices import is_cuda
from fastopt.amp import SlowCalls
from fastopt.sparse import is_row_sparse

__all__ = ["SlowCallCounter"]

log = logging.getLogger("fastopt")

IN_A_ROW = 10
"""Number of slow calls in a row that are reported."""

KEPT = 10
"""Number of slow calls whose reasons are kept."""


ATTEMPTS = 2
"""Maximum number of times that a slow call enters compiled code before Python checks it."""


class SlowCallCounter:
    """Counts the slow calls of an updater, and reports ten of them in a row once."""

    def __init__(self) -> None:
        self.calls = SlowCalls()
        self._in_a_row = self._entered = 0
        self._reported = False

    def reason(
        self, updater: Any, indices: Sequence[Index], grads: Sequence[Any], weights: Sequence[Any]
    ) -> tuple[Index, str] | None:
        """Return the index and the reason of a call that is about to be slow, or None.

        First calls are not slow, nor are those with optimizers and settings that records never
        support, such as those that compute in Python.
        """
        entered = updater._records.words.item(w.CALL_NUMBER)
        if entered - self._entered > ATTEMPTS:  # fast calls have come in between
            self._in_a_row = 0
        known, on_records = updater.states, updater._records.usable
        if not (on_records and indices and all(index in known for index in indices)):
            return None
        for index, grad, weight in zip(indices, grads, weights, strict=True):
            if is_cuda(weight):
                return None
            why = reason_of(grad, weight)
            if why:
                return index, why
        kept = updater._records.kept
        for index in indices:
            if index not in kept:
                return (
                    index,
                    "its state, or a setting or attribute, has changed since its last call",
                )
        twice = len(set(indices)) < len(indices)
        return indices[0], "an index occurs twice" if twice else "its arrays have another form"

    def add(self, updater: Any, index: Index, reason: str) -> None:
        """Count a slow call that has succeeded."""
        calls = self.calls
        first = calls.first if len(calls.first) >= KEPT else (*calls.first, (index, reason))
        self.calls = SlowCalls(calls.calls + 1, first)
        self._in_a_row += 1
        self._entered = updater._records.words.item(w.CALL_NUMBER)
        if self._in_a_row >= IN_A_ROW and not self._reported:
            self._reported = True
            log.warning(
                "%d calls of an updater in a row needed Python, the last one for index %r: %s; "
                "updater.info.slow counts them, see docs/call-costs.md",
                self._in_a_row,
                index,
                reason,
            )


def reason_of(grad: Any, weight: Any) -> str:
    """Return why records do not support two arrays; empty if they may do."""
    if is_row_sparse(grad):
        return "its gradient is row-sparse, in a form that needs Python"
    for role, array in (("gradient", grad), ("weight", weight)):
        if type(array) is not np.ndarray and not (role == "gradient" and np.isscalar(array)):
            return f"its {role} is a {type(array).__name__}"
        dtype = array.dtype if isinstance(array, np.ndarray) else np.dtype(type(array))
        if not dtype.isnative or dtype == np.longdouble != np.float64:
            return f"its {role} has dtype {dtype}"
    if isinstance(grad, np.ndarray) and np.may_share_memory(grad, weight):
        return "its gradient and weight are interleaved in memory"
    if weight.ndim > w.AXES:
        return f"its weight has more than {w.AXES} axes"
    if not (weight.flags.aligned and getattr(grad, "flags", weight.flags).aligned):
        return "its gradient or weight is not aligned"
    return ""
