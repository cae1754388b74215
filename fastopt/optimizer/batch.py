"""Many tensors in one call: what is remembered of a list, so that the next call costs little."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels import cpu
from fastopt.kernels.devices import headers
from fastopt.kernels.headers import CHANGED
from fastopt.kernels.layout import Layout
from fastopt.kernels.table import Table
from fastopt.optimizer.counts import Counts
from fastopt.optimizer.rates import Array, Index

__all__ = ["Batch", "Call", "address"]

Call = tuple[Index, Array, Any, Any]
"""Index, weight, gradient and state."""


class Batch:
    """The tensors of a list call, those of one layout in one table.

    Parameters
    ----------
    calls : sequence of (index, weight, gradient, state)
        The call, without repeated indices.
    tables : sequence of Table
        Table of each tensor.
    counts : Counts
        Counts of updates.
    begin : int
        Count of an index that has not been updated.
    mode : tuple
        What the layouts depend on besides the arrays, with the ids of copies.
    copies : sequence of arrays
        These copies.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        tables: Sequence[Table],
        counts: Counts,
        begin: int,
        mode: tuple[Any, ...],
        copies: Sequence[Array],
    ) -> None:
        self.mode, self._copies = mode, copies  # kept alive, or another could get an id of theirs
        self.indices = [index for index, *_ in calls]
        self.weights = [weight for _, weight, _, _ in calls]  # kept alive, as their addresses are
        self.states = [state for *_, state in calls]
        self._weight_ids, self._state_ids = _ids(self.weights), _ids(self.states)
        # With the first once more, as the getter of one item makes no tuple.
        self._states_of = itemgetter(*self.indices, self.indices[0])
        self.counts, self._deletions = counts, counts.deletions
        self._begin_count = begin
        self.slots: NDArray[np.int64] | None = None
        self.classes: Any = None
        self._written = self._sorted = (np.empty(0, np.uint64),) * 2
        groups: dict[tuple[Any, int, Layout], list[int]] = {}
        self.singles: list[int] = []
        for place, table in enumerate(tables):
            alone = table.layout.sparse or table.borrowed or not table.direct
            if alone or table.arrays[0].ndim == 0:
                self.singles.append(place)
            else:
                kind = table.device, table.stream_handle, table.layout
                groups.setdefault(kind, []).append(place)
        self.on_device = any(table.device for table in tables)
        self.rows: list[tuple[Table, int]] = [(table, 0) for table in tables]
        self.groups: list[tuple[Table, NDArray[np.int64]]] = []
        for places in groups.values():
            joined = type(tables[places[0]]).joined([tables[place] for place in places])
            self.groups.append((joined, np.array(places, np.int64)))
            for row, place in enumerate(places):
                self.rows[place] = joined, row

    def places(self) -> NDArray[np.int64]:
        """Places of the indices among the counts; those that are new begin to be counted."""
        if self.slots is None:
            self.slots = self.counts.places(self.indices, self._begin_count)
        return self.slots

    @property
    def tables(self) -> list[Table]:
        """What to launch."""
        return [table for table, _ in self.groups] + [self.rows[place][0] for place in self.singles]

    def matches(self, indices: list[Any], weights: list[Any], states: Mapping[Index, Any]) -> bool:
        """Whether a call is for the same indices, weights and states."""
        try:
            return (
                indices == self.indices
                and self.counts.deletions == self._deletions
                and _same(weights, self._weight_ids)
                and _same(self._states_of(states), self._state_ids)
            )
        except (KeyError, ValueError):  # an index without state, or that is an array
            return False

    def take(self, grads: Sequence[Any]) -> bool:
        """Enter the addresses of all dense arrays; False if one does not fit or is shared."""
        if self.on_device:
            try:
                grads = headers(grads)
            except TypeError:  # the checks of single calls tell in words
                return False
        objects = np.fromiter(grads, object, len(grads))
        changed = bool(self.singles)  # of which nothing is known from the call before
        for table, places in self.groups:
            cpu.adopt()(address(objects), places, table.guards, table.guards.shape[1] - 1)
            taken = [grads[place] for place in places] if table.device else ()
            answer = table.take(*taken)
            if answer >= 0:
                return False
            changed |= answer == CHANGED
        return not changed or self.disjoint()

    def disjoint(self) -> bool:
        """Whether nothing that is written to is written or read by another tensor too."""
        written = [table.written() for table in self.tables]
        begin, end = (np.concatenate(addresses) for addresses in zip(*written, strict=True))
        if not all(map(np.array_equal, (begin, end), self._written)):
            order = np.argsort(begin)
            self._written, self._sorted = (begin, end), (begin[order], end[order])
        begin, end = self._sorted
        if (end[:-1] > begin[1:]).any():
            return False
        for table in self.tables:
            first, last = table.read()
            after = np.searchsorted(end, first, side="right")
            beside = after < len(begin)
            if (begin[after[beside]] < last[beside]).any():
                return False
        return True

    def let_go(self) -> None:
        """Keep no gradient alive, for a call that ends without a launch."""
        for place in self.singles:
            self.rows[place][0].let_go()

    def squares(self) -> NDArray[np.float64]:
        """Sum of the squares of each gradient, not finite if one of them is not."""
        totals = np.zeros(len(self.indices))
        for table, places in self.groups:
            totals[places] = table.squares()
        for place in self.singles:
            totals[place] = self.rows[place][0].squares()[0]
        return totals


def _ids(objects: Sequence[Any]) -> NDArray[np.uint64]:
    return np.array(list(map(id, objects)), np.uint64)


def _same(objects: Sequence[Any], ids: NDArray[np.uint64]) -> bool:
    """Whether these are the objects with the given ids."""
    held = np.fromiter(objects, object, len(ids))
    return bool(cpu.same()(address(held), ids))


def address(objects: NDArray[Any]) -> int:
    """Where an array begins in memory."""
    return int(objects.__array_interface__["data"][0])
