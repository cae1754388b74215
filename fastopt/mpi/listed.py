"""Gradients that list rows of a weight which all ranks have, while its state is shared out."""

import numpy as np

from fastopt.checkpoint.placement import Placement
from fastopt.mpi.collectives import gathered
from fastopt.mpi.ranks import Ranks
from fastopt.mpi.rows import Routes
from fastopt.optimizer.optimizer import Array
from fastopt.sparse import RowSparse

__all__ = ["Listed"]


class Listed:
    """Rows that the ranks list for this rank's slice, in the order of the ranks.

    All ranks make one together.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    placement : Placement
        The weight, which is cut between rows.
    grad : RowSparse
        What this rank lists.

    Attributes
    ----------
    grad : RowSparse
        What all ranks list, of the rows of the slice.
    """

    def __init__(self, ranks: Ranks, placement: Placement, grad: RowSparse) -> None:
        self.ranks = ranks
        cuts = np.array([placement.cut(rank) for rank in range(ranks.size + 1)]) // placement.unit
        self.first = int(cuts[ranks.rank])
        some = slice(None if placement.size else 0)  # rows without elements have no owner
        rows, values = grad.indices[some].astype(np.int64), grad.values[some]
        owners = np.searchsorted(cuts, rows, side="right") - 1
        routes = Routes(ranks, owners)
        local = routes.there(rows - cuts[owners])
        self.grad = RowSparse(routes.there(values), local, placement.slice_shape(ranks.rank))

    def spread(self, weight: Array, own: Array, every: bool) -> None:
        """Give all ranks the rows of slices that have changed: those listed, or every one.

        `own` is the slice of this rank.
        """
        changed = np.arange(len(own)) if every else np.unique(self.grad.indices)
        values, _ = gathered(self.ranks, own[changed])
        rows, _ = gathered(self.ranks, changed + self.first)
        weight[rows] = values
