"""Table whose rows are distributed over ranks, for embeddings too large for one machine."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fastopt._engine.validate import check_index
from fastopt.amp import LossScaler
from fastopt.distributed.owned import Owned, Values
from fastopt.distributed.rows import Owners
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index


class ShardedTable(Owned):
    """Table in which each row and its state are owned by one rank.

    Ranks pull the rows that they need from the owners, and push row-sparse gradients to them. Each
    rank first sums its repeated rows, and the owner adds these sums in rank order; half-precision
    rows are only summed by the owner, in float32. Then the owner updates the rows, lazily if the
    optimizer does. The result is that of one updater with the concatenated gradients of all ranks.
    :class:`ShardedTables` pulls and pushes several tables at once.

    Parameters
    ----------
    shape : tuple of int
        Shape of the whole table; the first axis is the rows.
    optimizer : Optimizer
        The optimizer, the same on all ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator. All of its ranks must create the table and call its methods together.
    values : numpy.ndarray or callable, optional
        Initial values of the whole table, or a function that takes an array of row numbers and
        returns the values of these rows. Default: zeros.
    dtype : dtype
        float32, float64, float16 or bfloat16. Default float32.
    owners : {'block', 'hash'}
        How rows are assigned to ranks: in contiguous blocks, or spread over the ranks, which
        balances the load if some regions are used more. Default 'block'.
    index : int, str or bytes
        Index of the table in the optimizer, for multipliers, names and update counts. Default 0.
    loss_scaler, clip_global_norm
        See :class:`~fastopt.optimizer.Updater`.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Attributes
    ----------
    rows : numpy.ndarray
        Numbers of the rows that this rank owns.
    weight : numpy.ndarray
        Values of these rows.
    states : dict
        State of these rows, by index.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid.

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
        """Assignment of rows to ranks."""
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
        """Return rows, fetched from their owners; all ranks must call it, each with its own rows.

        Parameters
        ----------
        row_ids : sequence of int
            Row numbers, in any order, possibly repeated.

        Returns
        -------
        numpy.ndarray
            Rows, of shape (number of rows, ...) and the table's dtype.

        Raises
        ------
        TypeError, ValueError
            A row number is invalid on some rank. All ranks raise the error.
        """
        return self._pull(lambda: {self.index: row_ids})[self.index]

    def push(self, grad: Any) -> None:
        """Update rows with the gradients of all ranks, summed; all ranks must call it.

        If the indexed rows are those of the last :meth:`pull`, their numbers are not sent again.

        Parameters
        ----------
        grad : RowSparse, pair (values, indices), or scipy.sparse array
            Gradient of this rank, of the table's shape, in the table's dtype, or float32 for
            half-precision tables. It may have no rows.

        Raises
        ------
        TypeError, ValueError
            The gradient is invalid on some rank, or ranks disagree. All ranks raise the error, and
            nothing changes.
        """
        self._push(lambda: {self.index: grad})
