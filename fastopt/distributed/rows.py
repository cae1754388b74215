"""Routing of rows between the ranks that use them and the ranks that own them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastopt.checkpoint.restore.placement import Placement
from fastopt.distributed.collectives import exchanged, gathered_together, transposed
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array
from fastopt.sparse import HALVES, RowSparse

Ids = NDArray[np.int64]

MOST_ROWS = 3_000_000_000
"""Maximum number of rows, so that products in :meth:`Owners.places` fit into 64 bits."""


class Owners:
    r"""Assignment of rows to the ranks that own them.

    Row :math:`i` of :math:`n` has the position :math:`a i \bmod n`, and positions are split into
    blocks of equal length, one per rank. For 'block', :math:`a` is 1. For 'hash', it is the first
    number from :math:`n / \phi` on that is coprime to :math:`n`, so that rows at any regular
    distance are spread over the ranks (Knuth, "The Art of Computer Programming", volume 3, 6.4).

    Parameters
    ----------
    rows : int
        Number of rows.
    ranks : int
        Number of ranks.
    kind : {'block', 'hash'}
        How rows are assigned.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.rows import Owners
    >>> Owners(8, 2, "block").of(np.arange(8))
    array([0, 0, 0, 0, 1, 1, 1, 1])
    >>> Owners(8, 2, "hash").of(np.arange(8))
    array([0, 1, 0, 1, 1, 0, 1, 0])
    """

    def __init__(self, rows: int, ranks: int, kind: Literal["block", "hash"]) -> None:
        self.rows, self.kind = rows, kind
        self.block = max(-(-rows // ranks), 1)
        self.factor = 1
        if kind == "hash" and rows > 2:
            self.factor = round(rows * (math.sqrt(5) - 1) / 2)
            while math.gcd(self.factor, rows) != 1:
                self.factor += 1

    def places(self, ids: Ids) -> Ids:
        """Position of each row."""
        return ids * self.factor % max(self.rows, 1)

    def of(self, ids: Ids) -> Ids:
        """Rank that owns each row."""
        return self.places(ids) // self.block

    def owned(self, rank: int) -> Ids:
        """Rows of a rank, in the order in which they are stored."""
        first, last = (min(r * self.block, self.rows) for r in (rank, rank + 1))
        return np.arange(first, last) * self._inverse % max(self.rows, 1)

    def local(self, ids: Ids) -> Ids:
        """Local number of each row on its owner."""
        return self.places(ids) % self.block

    @cached_property
    def _inverse(self) -> int:
        return pow(self.factor, -1, self.rows) if self.rows > 1 else 1


class Routes:
    """Routes for items of several arrays from this rank to others, and back.

    The constructor is collective.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    targets : sequence of numpy.ndarray
        Target rank of each item, for each array.
    """

    def __init__(self, ranks: Ranks, targets: Sequence[Ids]) -> None:
        self.ranks = ranks
        self.orders = [np.argsort(each, kind="stable") for each in targets]
        sent = np.array([np.bincount(each, minlength=ranks.size) for each in targets]).T
        self.sent, self.received = sent.T, transposed(ranks, sent).T

    def there(self, *items: Sequence[Array]) -> list[list[Array]]:
        """Send items to their targets, and return the items for this rank, in rank order.

        There may be several kinds of items for each array, which are sent together.
        """
        kinds = len(items)
        ordered = [a[order] for each in items for a, order in zip(each, self.orders, strict=True)]
        sent, received = (np.tile(counts, (kinds, 1)) for counts in (self.sent, self.received))
        came = exchanged(self.ranks, ordered, sent, received)
        each = len(self.orders)
        return [came[k * each : (k + 1) * each] for k in range(kinds)]

    def back(self, answers: Sequence[Array]) -> list[Array]:
        """Send answers back, and return the answers to this rank's items, in their order."""
        results = exchanged(self.ranks, answers, self.received, self.sent)
        ordered = [np.empty_like(came) for came in results]
        for target, order, came in zip(ordered, self.orders, results, strict=True):
            target[order] = came
        return ordered


@dataclass(frozen=True)
class Pulled:
    """Rows of one table that the ranks have pulled, and their routes."""

    wanted: Ids
    """Rows that this rank has pulled, ascending."""
    rows: Ids
    """Local numbers of this rank's rows that other ranks have pulled, in rank order."""
    order: Ids
    """Order in which the wanted rows were requested."""
    sent: Ids
    """Number of wanted rows that each rank owns."""
    received: Ids
    """Number of rows of this rank that each rank has pulled."""


KNOWN = -1
"""Sent instead of a count if the rows are those of the last pull."""


class Ways:
    """Routes for gradients from this rank to the owners of their rows.

    The routes of the last pull are reused if the rows are the same. The constructor is collective.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    pulled : sequence of Pulled or None
        Last pull of each table.
    ids : sequence of numpy.ndarray
        Rows whose gradients this rank has, for each table.
    owners : sequence of Owners
        Owners of the rows, for each table.
    """

    def __init__(
        self,
        ranks: Ranks,
        pulled: Sequence[Pulled | None],
        ids: Sequence[Ids],
        owners: Sequence[Owners],
    ) -> None:
        self.ranks, self.pulled = ranks, pulled
        self.orders, self.local, sent, known = [], [], [], []
        for before, rows, own in zip(pulled, ids, owners, strict=True):
            same = before is not None and np.array_equal(before.wanted, rows)
            known.append(same)
            if same and before is not None:
                self.orders.append(before.order)
                self.local.append(rows[:0])
                sent.append(before.sent)
                continue
            targets = own.of(rows)
            self.orders.append(np.argsort(targets, kind="stable"))
            self.local.append(own.local(rows)[self.orders[-1]])
            sent.append(np.bincount(targets, minlength=ranks.size))
        shape = len(pulled), ranks.size
        self.sent = np.array(sent, np.int64).reshape(shape)
        reports = np.where(np.array(known, bool)[:, np.newaxis], KNOWN, self.sent)
        self.reported, self.came = np.maximum(reports, 0), transposed(ranks, reports.T).T
        kept = [np.zeros(ranks.size, np.int64) if p is None else p.received for p in pulled]
        self.received = np.where(self.came == KNOWN, np.array(kept).reshape(shape), self.came)

    def there(self, values: Sequence[Array]) -> tuple[list[Array], list[Ids]]:
        """Send gradients to the owners, and return gradients and rows for this rank, in rank order.

        Everything is sent in one operation.
        """
        ordered = [each[order] for each, order in zip(values, self.orders, strict=True)]
        sent, received = (
            np.concatenate(pair)
            for pair in ((self.sent, self.reported), (self.received, np.maximum(self.came, 0)))
        )
        came = exchanged(self.ranks, [*ordered, *self.local], sent, received)
        number = len(self.pulled)
        return came[:number], [self._rows(k, came[number + k]) for k in range(number)]

    def _rows(self, table: int, sent: Ids) -> Ids:
        """Rows of a table: those of the last pull for ranks that sent `KNOWN`, else `sent`."""
        before, known = self.pulled[table], self.came[table] == KNOWN
        if before is None or not known.any():
            return sent
        if known.all():
            return before.rows
        pulled = np.split(before.rows, np.cumsum(before.received)[:-1])
        listed = np.split(sent, np.cumsum(np.maximum(self.came[table], 0))[:-1])
        chosen = zip(known, pulled, listed, strict=True)
        return np.concatenate([one if same else other for same, one, other in chosen])


class Listed:
    """Row-sparse gradients from all ranks for this rank's slices, concatenated in rank order.

    The constructor is collective. Repeated rows of a rank are summed before they are sent, unless
    the sums would be rounded to half precision.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    placements : sequence of Placement
        Placements of the weights, which are split between rows.
    grads : sequence of RowSparse
        Gradients of this rank.

    Attributes
    ----------
    grads : list of RowSparse
        Gradients of all ranks, for the rows of this rank's slices.
    """

    def __init__(
        self, ranks: Ranks, placements: Sequence[Placement], grads: Sequence[RowSparse]
    ) -> None:
        self.ranks = ranks
        self.firsts: list[int] = []
        owners, local, values = [], [], []
        for placement, given in zip(placements, grads, strict=True):
            grad = given if given.dtype.name in HALVES else given.coalesce()
            cuts = np.array([placement.cut(rank) for rank in range(ranks.size + 1)])
            cuts //= placement.unit
            self.firsts.append(int(cuts[ranks.rank]))
            some = slice(None if placement.size else 0)  # rows without elements have no owner
            rows = grad.indices[some].astype(np.int64)
            owners.append(np.searchsorted(cuts, rows, side="right") - 1)
            local.append(rows - cuts[owners[-1]])
            values.append(grad.values[some])
        there = zip(placements, *Routes(ranks, owners).there(values, local), strict=True)
        self.grads = [
            RowSparse(came, rows, placement.slice_shape(ranks.rank))
            for placement, came, rows in there
        ]

    def spread(
        self, weights: Sequence[Array], slices: Sequence[Array], every: Sequence[bool]
    ) -> None:
        """Send the changed rows of this rank's slices to all ranks: the indexed ones, or all."""
        changed = [
            np.arange(len(own)) if whole else np.unique(grad.indices).astype(np.int64)
            for own, grad, whole in zip(slices, self.grads, every, strict=True)
        ]
        values = [own[rows] for own, rows in zip(slices, changed, strict=True)]
        rows = [own + first for own, first in zip(changed, self.firsts, strict=True)]
        results, _ = gathered_together(self.ranks, [*values, *rows])
        for k, weight in enumerate(weights):
            weight[results[len(weights) + k]] = results[k]
