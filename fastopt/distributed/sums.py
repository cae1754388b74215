"""Sums over tensors that are split over the ranks."""

from typing import Any

import numpy as np

from fastopt._kernels.chunks import Chunks
from fastopt.distributed.collectives import of_all
from fastopt.distributed.ranks import Ranks

__all__ = ["Sums"]

Array = np.ndarray[Any, Any]


class Sums:
    """Adds the sums of all ranks in rank order, so that all ranks get the same bits.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def added(self, own: Array) -> Array:
        """Sum a float64 array over the ranks; collective."""
        return self._merged(own, np.add)

    def _merged(self, own: Array, merge: np.ufunc) -> Array:
        total = np.zeros(own.shape)
        for part in of_all(self.ranks, own):
            merge(total, part, out=total)
        return total

    def combined(
        self, chunks: Chunks, partials: Array, tensors: int, largest: bool
    ) -> tuple[Chunks, Array]:
        """See :data:`fastopt._kernels.table.Combine`."""
        own = np.zeros((tensors, partials.shape[1]))
        merge = np.maximum if largest else np.add
        merge.at(own, chunks[:, 0], partials)
        whole = np.zeros((tensors, 3), np.int64)
        whole[:, 0] = np.arange(tensors)
        return whole, self._merged(own, merge)
