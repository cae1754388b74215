"""Row-sparse gradients of replicated weights with sharded state."""

from collections.abc import Sequence

import numpy as np

from fastopt.checkpoint.restore.placement import Placement
from fastopt.distributed.collectives import gathered_together
from fastopt.distributed.ranks import Ranks
from fastopt.distributed.rows import Routes
from fastopt.optimizer.optimizer import Array
from fastopt.sparse import HALVES, RowSparse


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
