"""Several tables whose rows live on their owners, pulled and pushed together."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fastopt.amp import LossScaler
from fastopt.mpi.owned import Owned, Values
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index

__all__ = ["ShardedTables"]


class ShardedTables(Owned):
    """Tables whose rows, with their state, live each on one rank: :class:`ShardedTable` for many.

    A pull or push of all of them takes as many operations as one of a single table.

    Parameters
    ----------
    shapes : mapping of index to tuple of int
        Shape of each table, by its index in the optimizer; rows come first.
    optimizer : Optimizer
        Decides how to update; the same on all ranks.
    comm : mpi4py.MPI.Comm
        The ranks; all of them make the tables, and call their methods, together.
    values : mapping of index to numpy.ndarray or callable, optional
        Tables, or functions that take an array of row numbers and return the values of these rows.
        Those without one begin with zeros.
    dtype : dtype
        float32, float64, float16 or bfloat16. Default float32.
    owners : {'block', 'hash'}
        See :class:`ShardedTable`. Default 'block'.
    loss_scaler, clip_global_norm
        See :class:`~fastopt.optimizer.Updater`; they work on all gradients of a push together.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Attributes
    ----------
    states : dict
        State of the rows of this rank, by index.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be.

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
        """Numbers of the rows of a table that this rank owns, in the order of its values.

        Parameters
        ----------
        index : int, str or bytes
            The table.

        Returns
        -------
        numpy.ndarray
            The numbers, int64.

        Raises
        ------
        KeyError
            There is no such table.
        """
        return self._rows[index].owners.owned(self.rank)

    def pull(self, row_ids: Mapping[Any, ArrayLike]) -> dict[Index, Array]:
        """Return rows of some tables; all ranks call, with the same tables.

        Parameters
        ----------
        row_ids : mapping of index to sequence of int
            Numbers of the rows, in any order; some may be repeated.

        Returns
        -------
        dict of index to numpy.ndarray
            Shapes (number of rows, ...), of the tables' dtype.

        Raises
        ------
        TypeError, ValueError
            A row is not one of its table, on some rank, or ranks disagree. All ranks raise it.
        """
        return self._pull(lambda: row_ids)

    def push(self, grads: Mapping[Any, Any]) -> None:
        """Update rows of some tables; all ranks call, with the same tables.

        Where a rank lists the rows of its last :meth:`pull` of a table, their numbers are not sent
        again.

        Parameters
        ----------
        grads : mapping of index to gradient
            In the forms that :meth:`ShardedTable.push` takes.

        Raises
        ------
        TypeError, ValueError
            A gradient does not fit, on some rank, or ranks disagree. All ranks raise it, and
            nothing changes.
        """
        self._push(lambda: grads)
