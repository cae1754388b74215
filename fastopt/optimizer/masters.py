"""Half-precision weights: masters, copies, and how a state is nested around them."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from fastopt.kernels.device_memory import assign, host
from fastopt.kernels.devices import header, headers
from fastopt.kernels.layout import real_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.threads import in_forked_child
from fastopt.optimizer.border import check_like, check_state, is_half, label, leaves
from fastopt.optimizer.rates import Array, Index, Rates
from fastopt.sparse import HALVES

__all__ = ["Masters"]


_locked: "WeakSet[Masters]" = WeakSet()


def _unlock() -> None:
    for holder in list(_locked):
        holder.lock = threading.RLock()  # maybe held by a thread that is not here


in_forked_child(_unlock)


class Masters(Rates):
    """Abstract base of :class:`~fastopt.optimizer.Optimizer`, which documents the arguments."""

    multi_precision: bool
    masters_given: dict[Index, Array]
    master: str
    _rule_of: Callable[[Index], Rule | None]

    _rounded_sums: ClassVar[bool] = False
    """Whether the passes of a rule see a weight with a master as it was rounded."""

    _master_last: ClassVar[bool] = False
    """Whether the state is nested as (state, master) instead of (master, state)."""

    def _forget(self) -> None:
        """Start without what serves the present process only."""
        self.lock = threading.RLock()  # for threads that share the optimizer
        _locked.add(self)
        self.copies: dict[Index, Array] = {}

    def set_master(self, index: Index, array: Array, state: Any) -> None:
        """See :meth:`Updater.set_master <fastopt.optimizer.Updater.set_master>`."""
        words, array = label(index, self.idx2name), host(array)
        if not self.multi_precision:
            raise ValueError(f"{words}: a master needs an optimizer with multi_precision=True")
        check_like(words, "master", array, ("float32",), np.shape(array), written=False)
        if state is None:
            self.masters_given[index] = array.copy()
            return
        paired = isinstance(state, (tuple, list)) and len(state) == 2
        rule = self._rule_of(index)
        if rule is not None:  # without a master, the arrays of two slots are a pair too
            paired = paired and len(leaves(state)) == len(rule.state) + 1
        if self.master == "split" or not paired:
            raise ValueError(
                f"{words}: a split or missing master cannot be set after the first update"
            )
        held = header(state[self._master_last])
        check_like(words, "state's master", held, ("float32",), array.shape)
        assign(held, array)

    def set_copy(self, index: Index, array: Array | None) -> None:
        """See :meth:`Updater.set_copy <fastopt.optimizer.Updater.set_copy>`."""
        with self.lock:
            if array is None:
                self.copies.pop(index, None)
                return
            of = header(array)
            check_like(label(index, self.idx2name), "copy", of, HALVES, np.shape(of))
            self.copies[index] = array

    def _check_copy(self, words: str, weight: Array, copy: Array) -> None:
        if weight.dtype != np.float32:
            raise TypeError(f"{words}: only a float32 weight has a copy, got {weight.dtype}")
        check_like(words, "copy", copy, HALVES, weight.shape)

    def _has_master(self, weight: Array) -> bool:
        return self.multi_precision and is_half(weight)

    def _nested(self, inner: Any, master: Array) -> Any:
        """State of a weight with a master."""
        return (inner, master) if self._master_last else (master, inner)

    def _unnested(self, words: str, weight: Array, state: Any) -> tuple[tuple[Array, ...], Any]:
        """The master with the weight, or the weight with its remainder; and the inner state."""
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ValueError(
                f"{words}: the state of a weight with a master must be a pair of master and state, "
                f"got {type(state).__name__}"
            )
        inner, master = state if self._master_last else state[::-1]
        master = header(master)
        check_like(words, "master", master, ("float32", "uint16"), weight.shape)
        if master.dtype == np.float32:
            return (master, weight), inner
        if weight.dtype.name != "bfloat16":
            raise TypeError(f"{words}: only a bfloat16 weight has a split master")
        return (weight, master), inner

    def _parts(
        self, words: str, rule: Rule, weight: Array, state: Any, copy: Array | None, masters: bool
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The exact weight with its copy or remainder, and the arrays of the rule's state."""
        exact: tuple[Array, ...] = (weight,)
        if copy is not None:
            copy = header(copy)
            self._check_copy(words, weight, copy)
            exact = (weight, copy)
        if masters and self._has_master(weight):
            exact, state = self._unnested(words, weight, state)
        arrays = tuple(headers(leaves(state)))
        check_state(words, rule, weight, _state_dtypes(weight), arrays)
        return exact, arrays


def _state_dtypes(weight: Array) -> tuple[str, str]:
    return np.dtype(real_of(weight.dtype)).name, "bfloat16"
