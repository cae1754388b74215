"""Calls that needed Python although their parameters had been updated before.

Tests: ``tests/engine/test_slow_calls.py``.
"""

import logging
from typing import Any

import numpy as np

from fastopt._engine.owner import Updating
from fastopt._engine.parameters import Given
from fastopt._engine.per_index import Index
from fastopt._engine.validate import Array
from fastopt._kernels import record_words as w
from fastopt._kernels.devices import is_cuda
from fastopt.amp import SlowCalls
from fastopt.sparse import RowSparse, is_row_sparse

log = logging.getLogger("fastopt")

IN_A_ROW = 10
"""Number of slow calls in a row that are reported."""

KEPT = 10
"""Number of slow calls whose reasons are kept."""


ATTEMPTS = 2
"""Maximum number of times that a slow call enters compiled code before Python checks it."""


class SlowCallCounter:
    """Counts the slow calls of an updater, and reports ten of them in a row once."""

    calls = SlowCalls()
    _in_a_row = _entered = 0
    _reported = False

    def reason(self, updater: Updating, call: Given, unchecked: bool) -> tuple[Index, str] | None:
        """Return the index and the reason of a call that is about to be slow, or None.

        First calls are not slow, nor are those with optimizers that compute in Python, sum the
        gradients of several calls or take an extra array. `unchecked`: the call has reached Python
        for the check of the multipliers, so that it is slow only if its arrays are.
        """
        entered = updater.records.words.item(w.CALL_NUMBER)
        if entered - self._entered > ATTEMPTS:  # fast calls have come in between
            self._in_a_row = 0
        records, (indices, grads, weights, *_) = updater.records, call
        on_records = records.mode.usable and not records.prepared
        if not (on_records and indices and all(index in updater.states for index in indices)):
            return None
        for index, grad, weight in zip(indices, grads, weights, strict=True):
            if is_cuda(weight):
                return None
            why = reason_of(grad, weight)
            if not (why or unchecked) and is_row_sparse(grad):
                if updater.settings.accumulate > 1:
                    why = "its gradient is row-sparse, which needs Python with accumulate"
                elif records.record_of(index) is None and not weight.flags.c_contiguous:
                    why = "its gradient is row-sparse, and its weight is not in C order"
            if why:
                return index, why
        if unchecked:
            return None
        for index, weight in zip(indices, weights, strict=True):
            if records.record_of(index) is None:
                order = "" if weight.flags.c_contiguous else "its weight is not in C order, "
                changed = "or a setting or attribute has changed since its last call"
                return index, f"{order}its state is new or has a form that needs Python, {changed}"
        twice = len(set(indices)) < len(indices)
        form = "the type of its index, or the form of its arrays, needs Python"
        return indices[0], "an index occurs twice" if twice else form

    def add(self, updater: Updating, index: Index, reason: str) -> None:
        """Count a slow call that has succeeded."""
        calls = self.calls
        first = calls.first if len(calls.first) >= KEPT else (*calls.first, (index, reason))
        self.calls = SlowCalls(calls.calls + 1, first)
        self._in_a_row += 1
        self._entered = updater.records.words.item(w.CALL_NUMBER)
        if self._in_a_row >= IN_A_ROW and not self._reported:
            self._reported = True
            log.warning(
                "%d calls of an updater in a row needed Python, the last one for index %r: %s; "
                "updater.info.slow counts them, see help(fastopt.amp.SlowCalls)",
                self._in_a_row,
                index,
                reason,
            )


def reason_of(grad: Any, weight: Array) -> str:
    """Return why records do not support two arrays; empty if they may do."""
    arrays = [("gradient", grad), ("weight", weight)]
    if is_row_sparse(grad):
        parts = (grad.values, grad.indices) if isinstance(grad, RowSparse) else grad
        arrays[:1] = [("gradient", part) for part in parts if isinstance(part, np.ndarray)]
    for role, array in arrays:
        if type(array) is not np.ndarray and not (role == "gradient" and np.isscalar(array)):
            return f"its {role} is a {type(array).__name__}"
        dtype = array.dtype if isinstance(array, np.ndarray) else np.dtype(type(array))
        if not dtype.isnative or dtype == np.longdouble != np.float64:
            return f"its {role} has dtype {dtype}"
    if isinstance(grad, np.ndarray) and np.may_share_memory(grad, weight):
        return "its gradient and weight are interleaved in memory"
    if not (weight.flags.aligned and getattr(grad, "flags", weight.flags).aligned):
        return "its gradient or weight is not aligned"
    return ""
