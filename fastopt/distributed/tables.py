"""Several sharded tables that are pulled and pushed together."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fastopt.amp import LossScaler
from fastopt.distributed.owned import Owned, Values
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index


class ShardedTables(Owned):
    """Several tables in which each row and its state are owned by one rank.

    They work like :class:`ShardedTable`, but a pull or push of all tables takes only as many MPI
    operations as for a single table.

    Parameters
    ----------
    shapes : mapping of index to tuple of int
        Shape of each table, by its index in the optimizer; the first axis is the rows.
    optimizer : Optimizer
        The optimizer, the same on all ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator. All of its ranks must create the tables and call their methods together.
    values : mapping of index to numpy.ndarray or callable, optional
        Initial values of tables, or functions that take an array of row numbers and return the
        values of these rows. Default: zeros.
    dtype : dtype
        float32, float64, float16 or bfloat16. Default float32.
    owners : {'block', 'hash'}
        See :class:`ShardedTable`. Default 'block'.
    loss_scaler, clip_global_norm
        See :class:`~fastopt.optimizer.Updater`; they apply to all gradients of a push together.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Attributes
    ----------
    states : dict
        State of the rows of this rank, by index.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from fastopt import optimizer
    >>> from fastopt.mpi import ShardedTables
    >>> shapes = {"users": (1000, 2), "items": (50, 3)}
    >>> tables = ShardedTables(shapes, optimizer.SGD(learning_rate=0.5), MPI.COMM_WORLD)
    >>> found = tables.pull({"users": [7, 8], "items": [3]})
    >>> tables.push({"users": (np.ones((2, 2), np.float32), np.array([7, 8]))})
    >>> tables.pull({"users": [8]})["users"] * MPI.COMM_WORLD.size
    array([[-0.5, -0.5]], dtype=float32)
    """

    def __init__(
        self,
        shapes: Mapping[Any, tuple[int, ...]],
        optimizer: Optimizer,
        comm: Any,
        values: Mapping[Any, Array | Values] | None = None,
        dtype: Any = np.float32,
        owners: Literal["block", "hash"] = "block",
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        timeout: float | None = None,
    ) -> None:
        kind = dtype, owners, loss_scaler, clip_global_norm, timeout
        super().__init__(shapes, optimizer, comm, values or {}, *kind)

    @property
    def weights(self) -> dict[Index, Array]:
        """Values of the rows that this rank owns, by index."""
        return self._weights()

    def owned(self, index: Any) -> Array:
        """Return the numbers of the rows of a table that this rank owns, in the order of `weights`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the table.

        Returns
        -------
        numpy.ndarray
            Row numbers, int64.

        Raises
        ------
        KeyError
            No table has this index.
        """
        return self._rows[index].owners.owned(self.rank)

    def pull(self, row_ids: Mapping[Any, ArrayLike]) -> dict[Index, Array]:
        """Return rows of some tables; all ranks must call it with the same tables.

        Parameters
        ----------
        row_ids : mapping of index to sequence of int
            Row numbers, in any order, possibly repeated.

        Returns
        -------
        dict of index to numpy.ndarray
            Rows, of shape (number of rows, ...) and the tables' dtype.

        Raises
        ------
        TypeError, ValueError
            A row number is invalid on some rank, or ranks disagree. All ranks raise the error.
        """
        return self._pull(lambda: row_ids)

    def push(self, grads: Mapping[Any, Any]) -> None:
        """Update rows of some tables; all ranks must call it with the same tables.

        If the indexed rows of a table are those of its last :meth:`pull`, their numbers are not
        sent again.

        Parameters
        ----------
        grads : mapping of index to gradient
            Gradients, in the forms that :meth:`ShardedTable.push` accepts.

        Raises
        ------
        TypeError, ValueError
            A gradient is invalid on some rank, or ranks disagree. All ranks raise the error, and
            nothing changes.
        """
        self._push(lambda: grads)
