"""A table of rows that live on their owners, such as embeddings that no single machine can hold."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fastopt.amp import LossScaler
from fastopt.engine.validate import check_index
from fastopt.mpi.owned import Owned, Values
from fastopt.mpi.rows import Owners
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index

__all__ = ["ShardedTable"]


class ShardedTable(Owned):
    """A table whose rows, with their state, live each on one rank.

    Rows are pulled from their owners where they are needed, and gradients that list rows are
    pushed to them. Each rank sums the rows that it lists more than once, and an owner adds these
    sums in the order of the ranks; rows of half precision are added by the owner alone, in float32.
    Then it updates, lazily where the optimizer does so, with the result of one updater that is
    given all lists one after the other. :class:`ShardedTables` pulls and pushes several at once.

    Parameters
    ----------
    shape : tuple of int
        Shape of the whole table; rows come first.
    optimizer : Optimizer
        Decides how to update; the same on all ranks.
    comm : mpi4py.MPI.Comm
        The ranks; all of them make the table, and call its methods, together.
    values : numpy.ndarray or callable, optional
        The whole table, or a function that takes an array of row numbers and returns the values of
        these rows. Default: zeros.
    dtype : dtype
        float32, float64, float16 or bfloat16. Default float32.
    owners : {'block', 'hash'}
        Whether neighbours have the same owner, or rows are spread, so that ranks have equal work
        where some regions are used more. Default 'block'.
    index : int, str or bytes
        Index of the table in the optimizer: multipliers, names and counts. Default 0.
    loss_scaler, clip_global_norm
        See :class:`~fastopt.optimizer.Updater`.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Attributes
    ----------
    rows : numpy.ndarray
        Numbers of the rows that this rank owns.
    weight : numpy.ndarray
        Their values.
    states : dict
        Their state, under the index.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from fastopt import RowSparse, optimizer
    >>> from fastopt.mpi import ShardedTable
    >>> table = ShardedTable((1000, 2), optimizer.SGD(learning_rate=0.5), MPI.COMM_WORLD)
    >>> table.push(RowSparse(np.ones((2, 2), np.float32), np.array([7, 7]), (1000, 2)))
    >>> table.pull([7, 8])
    array([[-1., -1.],
           [ 0.,  0.]], dtype=float32)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        optimizer: Optimizer,
        comm: Any,
        values: Array | Values | None = None,
        dtype: Any = np.float32,
        owners: Literal["block", "hash"] = "block",
        index: Any = 0,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        timeout: float | None = None,
    ) -> None:
        given = {} if values is None else {index: values}
        kind = dtype, owners, loss_scaler, clip_global_norm, timeout
        super().__init__({index: shape}, optimizer, comm, given, *kind)
        self.index: Index = check_index(index)
        self.shape: tuple[int, ...] = self._rows[self.index].shape

    @property
    def owners(self) -> Owners:
        """Which rank owns which row."""
        return self._rows[self.index].owners

    @property
    def rows(self) -> Array:
        """Numbers of the rows that this rank owns."""
        return self.owners.owned(self.rank)

    @property
    def weight(self) -> Array:
        """Values of the rows that this rank owns."""
        return self._rows[self.index].weight

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the table."""
        dtype: np.dtype[Any] = self.weight.dtype
        return dtype

    def pull(self, row_ids: ArrayLike) -> Array:
        """Return rows, from whichever ranks own them; all ranks call, each for its own rows.

        Parameters
        ----------
        row_ids : sequence of int
            Numbers of the rows, in any order; some may be repeated.

        Returns
        -------
        numpy.ndarray
            Shape (number of rows, ...), of the table's dtype.

        Raises
        ------
        TypeError, ValueError
            A row is not one of the table, on some rank. All ranks raise it.
        """
        return self._pull(lambda: {self.index: row_ids})[self.index]

    def push(self, grad: Any) -> None:
        """Update rows with the sums of the gradients of all ranks; all ranks call.

        Where a rank lists the rows of its last :meth:`pull`, their numbers are not sent again.

        Parameters
        ----------
        grad : RowSparse, pair (values, indices), or scipy.sparse array
            Gradient of this rank, of the table's shape; values have its dtype, or float32 for
            tables of half precision. It may list no rows.

        Raises
        ------
        TypeError, ValueError
            The gradient does not fit, on some rank, or ranks disagree. All ranks raise it, and
            nothing changes.
        """
        self._push(lambda: {self.index: grad})
