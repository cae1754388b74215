"""Rows on their way between those who need them and those who own them."""

import math
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastopt.mpi.collectives import items_as_bytes
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
    """A way for items from this rank to others, and back; all ranks make one together.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    targets : numpy.ndarray
        Rank that each item goes to.
    """

    def __init__(self, ranks: Ranks, targets: Ids) -> None:
        self.ranks = ranks
        self.order = np.argsort(targets, kind="stable")
        self.sent = np.bincount(targets, minlength=ranks.size)
        self.received = np.empty_like(self.sent)
        ranks.wait(ranks.comm.Ialltoall(self.sent, self.received))

    def there(self, items: Array) -> Array:
        """Items that the ranks have for this one, in the order of the ranks."""
        return self._exchange(items[self.order], self.sent, self.received)

    def back(self, answers: Array) -> Array:
        """Answers to the items that this rank has sent, in their order."""
        came = self._exchange(answers, self.received, self.sent)
        ordered = np.empty_like(came)
        ordered[self.order] = came
        return ordered

    def _exchange(self, items: Array, sent: Array, received: Array) -> Array:
        result = np.empty((int(received.sum()), *items.shape[1:]), items.dtype)
        with items_as_bytes(items, result) as (source, target, kind):
            if kind:
                comm = self.ranks.comm
                request = comm.Ialltoallv([source, sent, kind], [target, received, kind])
                self.ranks.wait(request)
        return result
