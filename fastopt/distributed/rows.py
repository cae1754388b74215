"""Routing of rows between the ranks that use them and the ranks that own them.

Reason: rows of all weights or tables are sent in one operation, and summed in rank order.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastopt.checkpoint.restore.shards import Placement
from fastopt.distributed.agreement import exchanged, gathered_together, transposed
from fastopt.distributed.plan import Plan
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


def owners_of(bits: NDArray[Any], ranks: int) -> Ids:
    r"""Rank that owns each id, a multiplicative hash of all 64 bits.

    .. math:: \lfloor p \, \lfloor (2^{64} / \phi) \, i \bmod 2^{64} \rfloor / 2^{64} \rfloor

    (Knuth, "The Art of Computer Programming", volume 3, 6.4). Ids at any regular distance are
    spread over the ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.rows import owners_of
    >>> owners_of(np.arange(8), 2)
    array([0, 1, 0, 1, 0, 0, 1, 0])
    """
    half = np.uint64(32)
    high = (bits.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> half
    return ((high * np.uint64(ranks)) >> half).astype(np.int64)


class HashedIds:
    """Assignment of arbitrary 64-bit ids to ranks, see :func:`owners_of`.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def of(self, ids: Ids) -> Ids:
        """Rank that owns each id."""
        return owners_of(ids, self.ranks)

    def local(self, ids: Ids) -> Ids:
        """The ids, which their owner looks up."""
        return ids


class Blocks:
    """Assignment of the rows of a weight that is split between rows.

    Parameters
    ----------
    placement : Placement
        Placement of the weight.
    ranks : int
        Number of ranks.

    Attributes
    ----------
    cuts : numpy.ndarray
        First row of each rank, and the number of rows.
    """

    def __init__(self, placement: Placement, ranks: int) -> None:
        self.cuts: Ids = (
            np.array([placement.cut(rank) for rank in range(ranks + 1)]) // placement.unit
        )

    def of(self, ids: Ids) -> Ids:
        """Rank that owns each row."""
        owners: Ids = np.searchsorted(self.cuts, ids, side="right") - 1
        return owners

    def local(self, ids: Ids) -> Ids:
        """Number of each row in the slice of its owner."""
        return ids - self.cuts[self.of(ids)]


OwnerMap = Owners | HashedIds | Blocks
"""Assignment of rows to ranks, and their numbers there."""


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


class RowExchange:
    """Routes from this rank to the owners of some rows, and back.

    The routes of the last pull are reused if the rows are the same. The constructor is collective.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    owners : sequence of OwnerMap
        Owners of the rows, for each table.
    ids : sequence of numpy.ndarray
        Rows that this rank uses, for each table.
    pulled : sequence of Pulled or None, optional
        Last pull of each table.
    """

    def __init__(
        self,
        ranks: Ranks,
        owners: Sequence[OwnerMap],
        ids: Sequence[Ids],
        pulled: Sequence[Pulled | None] = (),
    ) -> None:
        self.ranks, self.pulled = ranks, pulled
        self.orders, self.local, sent, announced = [], [], [], []
        for before, rows, owner in zip(pulled or repeat(None), ids, owners, strict=False):
            if before is not None and np.array_equal(before.wanted, rows):
                self.orders.append(before.order)
                self.local.append(rows[:0])
                sent.append(before.sent)
                announced.append(np.full(ranks.size, KNOWN))
                continue
            targets = owner.of(rows)
            self.orders.append(np.argsort(targets, kind="stable"))
            self.local.append(owner.local(rows)[self.orders[-1]])
            sent.append(np.bincount(targets, minlength=ranks.size))
            announced.append(sent[-1])
        self.sent, numbers = np.array(sent), np.array(announced)
        self.received = self.came = transposed(ranks, numbers.T).T
        self._counts = (numbers, self.sent), (self.came, self.received)
        """Of rows whose numbers are sent, and of all; then of those that are received."""
        if pulled:
            kept = [np.zeros(ranks.size, int) if p is None else p.received for p in pulled]
            self.received = np.where(self.came == KNOWN, kept, self.came)
            there, here = np.maximum(numbers, 0), np.maximum(self.came, 0)
            self._counts = (there, self.sent), (here, self.received)

    def there(self, *items: Sequence[Array]) -> list[list[Array]]:
        """Send items to the owners of their rows, and return the rows and items for this rank.

        They are in rank order, and rows have their local numbers. There may be several kinds of
        items for each table; everything is sent in one operation.
        """
        ordered = [a[order] for kind in items for a, order in zip(kind, self.orders, strict=True)]
        sent, received = (
            np.concatenate([rows, *[counts] * len(items)]) for rows, counts in self._counts
        )
        came = exchanged(self.ranks, [*self.local, *ordered], sent, received)
        count = len(self.orders)
        if self.pulled:
            came[:count] = [self._rows(k, came[k]) for k in range(count)]
        return [came[k : k + count] for k in range(0, len(came), count)]

    def back(self, answers: Sequence[Array]) -> list[Array]:
        """Send answers back, and return the answers to this rank's items, in their order."""
        results = exchanged(self.ranks, answers, self.received, self.sent)
        ordered = [np.empty_like(came) for came in results]
        for target, order, came in zip(ordered, self.orders, results, strict=True):
            target[order] = came
        return ordered

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


class SparseGradients:
    """Row-sparse gradients from all ranks for this rank's slices, concatenated in rank order.

    The constructor is collective. Repeated rows of a rank are summed before they are sent, unless
    the sums would be rounded to half precision.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    plan : Plan
        Plan of a call; weights with row-sparse gradients are split between rows.
    grads : sequence
        Gradients of this rank, by position in the call.

    Attributes
    ----------
    grads : dict of int to RowSparse
        Gradients of all ranks, for the rows of this rank's slices, by position in the call.
    """

    def __init__(self, ranks: Ranks, plan: Plan, grads: Sequence[Any]) -> None:
        self.ranks, self.plan = ranks, plan
        blocks, indices, values = [], [], []
        for k in plan.listed:
            grad, placement = grads[k], plan.placements[k]
            grad = grad if grad.dtype.name in HALVES else grad.coalesce()
            some = slice(None if placement.size else 0)  # rows without elements have no owner
            blocks.append(Blocks(placement, ranks.size))
            indices.append(grad.indices[some].astype(np.int64))
            values.append(grad.values[some])
        self.firsts = [block.cuts[ranks.rank] for block in blocks]
        there = RowExchange(ranks, blocks, indices).there(values)
        self.grads = {
            k: RowSparse(came, rows, plan.placements[k].slice_shape(ranks.rank))
            for k, rows, came in zip(plan.listed, *there, strict=True)
        }

    def spread(self, whole: Collection[int]) -> None:
        """Send the changed rows of this rank's slices to all ranks: the indexed ones, or all.

        All rows of the tensors at the positions `whole` have changed.
        """
        slices = [self.plan.slices[k] for k in self.grads]
        changed = [
            np.arange(len(part)) if k in whole else np.unique(grad.indices).astype(np.int64)
            for part, (k, grad) in zip(slices, self.grads.items(), strict=True)
        ]
        values = [part[rows] for part, rows in zip(slices, changed, strict=True)]
        rows = [rows_here + first for rows_here, first in zip(changed, self.firsts, strict=True)]
        results, _ = gathered_together(self.ranks, [*values, *rows])
        for k, came, at in zip(self.grads, results, results[len(values) :], strict=False):
            self.plan.weights[k][at] = came
