"""Rows on their way between those who need them and those who own them."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastopt.mpi.collectives import exchanged
from fastopt.mpi.ranks import Ranks

__all__ = ["Owners", "Routes"]

Array = np.ndarray[Any, Any]
Ids = NDArray[np.int64]

MOST_ROWS = 3_000_000_000
"""Rows up to which the products in :meth:`Owners.places` are within 64 bits."""


class Owners:
    r"""Which rank owns which row.

    Row :math:`i` of :math:`n` has the place :math:`a i \bmod n`, and places are cut into blocks of
    equal length, one for each rank. With blocks :math:`a` is 1. With hashing it is the number next
    to :math:`n / \phi` that has no divisor in common with :math:`n`, so that rows at any regular
    distance are spread over the ranks (Knuth, "The Art of Computer Programming", volume 3, 6.4).

    Parameters
    ----------
    rows : int
        Number of rows.
    ranks : int
        Number of ranks.
    kind : {'block', 'hash'}
        How rows are given out.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.mpi.rows import Owners
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
        """Place of each row."""
        return ids * self.factor % max(self.rows, 1)

    def of(self, ids: Ids) -> Ids:
        """Rank that owns each row."""
        return self.places(ids) // self.block

    def owned(self, rank: int) -> Ids:
        """Rows of a rank, in the order in which it keeps them."""
        first, last = (min(r * self.block, self.rows) for r in (rank, rank + 1))
        return np.arange(first, last) * self._inverse % max(self.rows, 1)

    def local(self, ids: Ids) -> Ids:
        """Number of each row on the rank that owns it."""
        return self.places(ids) % self.block

    @cached_property
    def _inverse(self) -> int:
        return pow(self.factor, -1, self.rows) if self.rows > 1 else 1


class Routes:
    """Ways for items of several arrays from this rank to others, and back.

    All ranks make one together.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    targets : sequence of numpy.ndarray
        Rank that each item goes to, for each array.
    """

    def __init__(self, ranks: Ranks, targets: Sequence[Ids]) -> None:
        self.ranks = ranks
        self.orders = [np.argsort(each, kind="stable") for each in targets]
        sent = np.array([np.bincount(each, minlength=ranks.size) for each in targets]).T
        received = np.empty_like(sent, order="C")
        ranks.wait(ranks.comm.Ialltoall(np.ascontiguousarray(sent), received))
        self.sent, self.received = sent.T, received.T

    def there(self, *items: Sequence[Array]) -> list[list[Array]]:
        """Items that the ranks have for this one, in the order of the ranks.

        Of each array there may be several kinds of items, which travel together.
        """
        kinds = len(items)
        ordered = [a[order] for each in items for a, order in zip(each, self.orders, strict=True)]
        sent, received = (np.tile(counts, (kinds, 1)) for counts in (self.sent, self.received))
        came = exchanged(self.ranks, ordered, sent, received)
        each = len(self.orders)
        return [came[k * each : (k + 1) * each] for k in range(kinds)]

    def back(self, answers: Sequence[Array]) -> list[Array]:
        """Answers to the items that this rank has sent, in their order."""
        results = exchanged(self.ranks, answers, self.received, self.sent)
        ordered = [np.empty_like(came) for came in results]
        for target, order, came in zip(ordered, self.orders, results, strict=True):
            target[order] = came
        return ordered
