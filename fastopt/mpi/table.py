"""A table of rows that live on their owners, such as embeddings that no single machine can hold."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fastopt.amp import LossScaler
from fastopt.arguments import choice, count
from fastopt.checkpoint.placement import Placement
from fastopt.checkpoint.shards import Saved
from fastopt.engine.validate import check_index, label, listed
from fastopt.kernels.layout import kind_of
from fastopt.kernels.table import launch
from fastopt.mpi.agreement import Facts, attempt
from fastopt.mpi.gate import Stopped
from fastopt.mpi.resumable import Resumable
from fastopt.mpi.rows import MOST_ROWS, Owners, Routes
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import REALS, RowSparse

__all__ = ["ShardedTable"]

Values = Callable[[Array], ArrayLike]


class ShardedTable(Resumable):
    """A table whose rows, with their state, live each on one rank.

    Rows are pulled from their owners where they are needed, and gradients that list rows are
    pushed to them. An owner sums what all ranks have pushed for a row: rank 0's values in the order
    in which they are listed, then rank 1's, and so on. Then it updates, lazily where the optimizer
    does so, with the result of one updater that is given all lists one after the other.

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
        super().__init__(optimizer, comm, loss_scaler, clip_global_norm, timeout)
        self._begin("make a table")
        made, error = attempt(self._made, shape, values, np.dtype(dtype), owners, index)
        given = {"shape": shape, "dtype": np.dtype(dtype), "owners": owners, "index": index}
        facts = Facts({name: str(value) for name, value in given.items()})
        self._agree(facts, error)
        self.index: Index
        self.shape: tuple[int, ...]
        self.index, self.shape, self.owners, self.weight = made
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        place = Placement(self.shape, self.weight.dtype.name, "rows", 0, self.owners.block * width)
        self.placements[self.index] = place
        self.rows = self.owners.owned(self.rank)
        self.shard.planner.offsets[self.index] = place.cut(self.rank)
        self._compile([(self.index, place, self.weight.dtype, True)])

    def _made(
        self, shape: Any, values: Any, dtype: Any, owners: Any, index: Any
    ) -> tuple[Index, tuple[int, ...], Owners, Array]:
        """Index, shape, owners, and the rows of this rank."""
        if not isinstance(shape, tuple) or not shape:
            raise TypeError(f"shape must be a tuple of one length or more, got {shape!r}")
        lengths = tuple(count("shape", length, least=0) for length in shape)
        if lengths[0] > MOST_ROWS:
            raise ValueError(f"shape must have at most {MOST_ROWS} rows, got {lengths[0]}")
        if kind_of(dtype) is None:
            raise TypeError(f"dtype must be one of {', '.join(REALS)}, got {dtype}")
        own = Owners(lengths[0], self.ranks, choice("owners", owners, "block", "hash"))  # type: ignore[arg-type]
        rows = own.owned(self.rank)
        weight = np.zeros((len(rows), *lengths[1:]), dtype)
        if values is not None:
            given = np.asarray(values(rows) if callable(values) else values)
            expected = weight.shape if callable(values) else lengths
            if given.shape != expected:
                raise ValueError(f"values must have shape {expected}, got {given.shape}")
            weight[...] = given if callable(values) else given[rows]
        return check_index(index), lengths, own, weight

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
        self._begin("pull")
        ids, error = attempt(self._ids, row_ids)
        self._agree(Facts(shape=str(self.shape)), error)
        wanted, positions = np.unique(ids, return_inverse=True)
        routes = Routes(self._ranks, [self.owners.of(wanted)])
        ((rows,),) = routes.there([self.owners.local(wanted)])
        (pulled,) = routes.back([self.weight[rows]])
        return pulled[positions]

    def _ids(self, row_ids: Any) -> Array:
        nothing = np.empty((np.size(row_ids), 0), np.float32)
        listed: Array = RowSparse(nothing, row_ids, (self.shape[0], 0)).indices
        return listed.astype(np.int64)

    def push(self, grad: Any) -> None:
        """Update rows with the sums of the gradients of all ranks; all ranks call.

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
        with self.optimizer.lock:
            self._begin("push")
            given, error = attempt(self._listed, grad)
            gate = self._gate(lambda: [self._facts(given)])
            try:
                gate.enter(error)
                assert given is not None
                with self._updating(lambda: gate.passed):
                    ids = given.indices.astype(np.int64)
                    routes = Routes(self._ranks, [self.owners.of(ids)])
                    (rows,), (values,) = routes.there([self.owners.local(ids)], [given.values])
                    pushed = RowSparse(values, rows, self.weight.shape)
                launching = self._launching(
                    partial(launch, combine=self.shard.sums.combined), _nothing
                )
                with self._updating(lambda: gate.launched), launching:
                    self.shard([self.index], [pushed], [self.weight])
            except Stopped as stopped:
                error = stopped.error
            if error is not None:
                raise error

    def _listed(self, grad: Any) -> RowSparse:
        words = label(self.index, self.optimizer.idx2name)
        given = listed(words, grad, self.shape)
        if not isinstance(given.values, np.ndarray):
            raise TypeError(
                f"{words}: gradient must have NumPy arrays with fastopt.mpi, got "
                f"{type(given.values).__name__}"
            )
        takes = {self.dtype.name} | ({"float32"} if self.dtype.itemsize == 2 else set())
        if given.dtype.name not in takes:
            expected = " or ".join(sorted(takes))
            raise TypeError(f"{words}: gradient must have dtype {expected}, got {given.dtype}")
        return given

    def _facts(self, given: RowSparse | None) -> Facts:
        words = label(self.index, self.optimizer.idx2name)
        kind = given.dtype.name if given is not None else ""
        return Facts({f"the gradient of {words}": kind, "shape": str(self.shape)})

    def _weights(self) -> dict[Index, Array]:
        return {self.index: self.weight}

    @property
    def _kind(self) -> str:
        return f"{super()._kind} by {self.owners.kind}"

    def _take_up(self, saved: Saved) -> None:
        super()._take_up(saved)
        if self.index in saved.weights:
            self.weight[...] = saved.weights[self.index]

    def flush(self) -> None:
        """Give all rows the decay that they have missed; see :meth:`Updater.flush`."""
        self.shard.flush(self.index, self.weight)


def _nothing() -> None:
    """Sums are there before the update begins."""
