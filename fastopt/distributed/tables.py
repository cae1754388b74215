"""Tables whose rows are distributed over ranks, for embeddings too large for one machine.

Reason: MPI and torch have no tables; errors of one rank are agreed before a row changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fastopt._arrays import Gradient
from fastopt._engine.validate import check_index, converted, is_half, listed
from fastopt._kernels.layout import kind_of
from fastopt._updater.updater import Updater
from fastopt.amp import LossScaler
from fastopt.arguments import choice, count
from fastopt.checkpoint.restore.shards import Placement, Saved
from fastopt.distributed.agreement import Facts, attempt, checksum
from fastopt.distributed.checkpoint import Resumable
from fastopt.distributed.rows import MOST_ROWS, Owners, Pulled, RowExchange
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import REALS, RowSparse

Values = Callable[[Array], ArrayLike]


@dataclass
class Rows:
    """Rows of one table that this rank owns."""

    shape: tuple[int, ...]
    owners: Owners
    weight: Array
    pulled: Pulled | None = None
    """Rows of the last pull; gradients of the same rows reuse its routes."""


class Owned(Resumable):
    """Abstract base of :class:`~fastopt.distributed.ShardedTable` and ``ShardedTables``.

    Parameters
    ----------
    shapes : mapping of index to tuple of int
        Shape of each table.
    values : mapping of index to numpy.ndarray or callable
        Initial values of tables. Default: zeros.
    optimizer, comm, dtype, owners, loss_scaler, clip_global_norm, timeout
        See :class:`~fastopt.distributed.ShardedTable`.
    """

    def __init__(
        self,
        shapes: Mapping[Any, Any],
        optimizer: Optimizer,
        comm: object,
        values: Mapping[Any, Array | Values],
        dtype: DTypeLike,
        owners: str,
        loss_scaler: LossScaler | None,
        clip_global_norm: float | None,
        timeout: float | None,
    ) -> None:
        super().__init__(Updater(optimizer, loss_scaler, clip_global_norm), comm, timeout)
        self.shard._serve(self.backend)
        self._begin("make a table")
        kind, self._rows = np.dtype(dtype), dict[Index, Rows]()
        rows_by_index, error = attempt(
            lambda: {
                check_index(index): self._create_rows(shape, values.get(index), kind, owners)
                for index, shape in shapes.items()
            }
        )
        facts = Facts({"index": str([*shapes]), "dtype": str(kind), "owners": str(owners)})
        facts |= {f"shape of index {index!r}": str(shape) for index, shape in shapes.items()}
        described, problem = attempt(
            lambda: {f"values of index {i!r}": _described(v, kind) for i, v in values.items()}
        )
        self._agree(Facts({**facts, **(described or {})}), error or problem)
        self._rows = rows_by_index
        for index, rows in rows_by_index.items():
            width = int(np.prod(rows.shape[1:], dtype=np.int64))
            share = rows.owners.block * width
            place = Placement(rows.shape, kind.name, "rows", 0, share)
            self.placements[index] = place
            self._slice(index, place)
        self._compile((index, self.placements[index], kind, True) for index in rows_by_index)

    def _create_rows(self, shape: object, values: Any, dtype: Any, owners: object) -> Rows:
        """Create this rank's rows of a table."""
        if not isinstance(shape, tuple) or not shape:
            raise TypeError(f"shape must be a tuple of one length or more, got {shape!r}")
        lengths = tuple(count("shape", length, least=0) for length in shape)
        if lengths[0] > MOST_ROWS:
            raise ValueError(f"shape must have at most {MOST_ROWS} rows, got {lengths[0]}")
        if kind_of(dtype) is None:
            raise TypeError(f"dtype must be one of {', '.join(REALS)}, got {dtype}")
        assignment = Owners(lengths[0], self.ranks, choice("owners", owners, "block", "hash"))  # type: ignore[arg-type]
        rows = assignment.owned(self.rank)
        weight = np.zeros((len(rows), *lengths[1:]), dtype)
        if values is not None:
            array = np.asarray(values(rows) if callable(values) else values)
            expected = weight.shape if callable(values) else lengths
            if array.shape != expected:
                raise ValueError(f"values must have shape {expected}, got {array.shape}")
            weight[...] = array if callable(values) else array[rows]
        return Rows(lengths, assignment, weight)

    def _known(self, mapping: object) -> dict[Index, Any]:
        """Items by the index of a table, in the order of the tables.

        Raises
        ------
        TypeError, ValueError
            `mapping` is not a mapping, is empty, or has an unknown index.
        """
        if not isinstance(mapping, Mapping):
            raise TypeError(f"expected a mapping of tables' indices, got {type(mapping).__name__}")
        if not mapping:
            raise ValueError("expected one table or more, got none")
        items = {check_index(index): item for index, item in mapping.items()}
        for index in items.keys() - self._rows.keys():
            raise ValueError(f"{self._label(index)}: there is no such table")
        return {index: items[index] for index in self._rows if index in items}

    def _pull(self, row_ids: Callable[[], Any]) -> dict[Index, Array]:
        """Return rows of tables by index, for row numbers by index; collective."""
        return self._together("pull", self._fetched, lambda: self._ids(row_ids), self._shapes)

    def _fetched(self, ids: Mapping[Index, Array]) -> dict[Index, Array]:
        """Rows of checked row numbers, by index."""
        tables = [self._rows[index] for index in ids]
        wanted, positions = [], []
        for numbers in ids.values():
            unique, inverse = np.unique(numbers, return_inverse=True)
            wanted.append(unique)
            positions.append(inverse)
        routes = RowExchange(self._ranks, [table.owners for table in tables], wanted)
        (rows,) = routes.there()
        back = routes.back([t.weight[r] for t, r in zip(tables, rows, strict=True)])
        known = zip(wanted, rows, routes.orders, routes.sent, routes.received, strict=True)
        for table, pulled in zip(tables, known, strict=True):
            table.pulled = Pulled(*pulled)
        pairs = zip(ids, back, positions, strict=True)
        return {index: values[inverse] for index, values, inverse in pairs}

    def _shapes(self, items: Mapping[Index, Any]) -> dict[str, str]:
        """Shapes of the tables of a call, for comparison between ranks."""
        return {f"shape of {self._label(i)}": str(self._rows[i].shape) for i in items}

    def _ids(self, row_ids: Callable[[], Any]) -> dict[Index, Array]:
        ids = {}
        for index, rows in self._known(row_ids()).items():
            nothing = np.empty((np.size(rows), 0), np.float32)
            checked: Array = RowSparse(nothing, rows, (self._rows[index].shape[0], 0)).indices
            ids[index] = checked.astype(np.int64)
        return ids

    def _push(self, grads: Callable[[], Any]) -> None:
        """Update rows of tables with gradients by index; collective."""
        with self.optimizer.call_lock:
            self._push_together(
                "push",
                lambda: {i: self._listed(i, grad) for i, grad in self._known(grads()).items()},
                self._facts,
                self._sent,
                lambda sent: self.shard(
                    [*sent], [*sent.values()], [self._rows[index].weight for index in sent]
                ),
            )

    def _sent(self, grads: Mapping[Index, RowSparse]) -> dict[Index, RowSparse]:
        """Send gradients to the owners; return those of all ranks for the rows of this rank."""
        tables = [self._rows[index] for index in grads]
        ids = [grad.indices.astype(np.int64) for grad in grads.values()]
        owners, pulled = [t.owners for t in tables], [t.pulled for t in tables]
        routes = RowExchange(self._ranks, owners, ids, pulled)
        rows, values = routes.there([grad.values for grad in grads.values()])
        return {
            index: RowSparse(came, where, table.weight.shape)
            for index, came, where, table in zip(grads, values, rows, tables, strict=True)
        }

    def _listed(self, index: Index, grad: Gradient) -> RowSparse:
        """Check a gradient, and sum its repeated rows unless the sums would be rounded."""
        context, table = self._label(index), self._rows[index]
        rows = listed(context, grad, table.shape)
        if not isinstance(rows.values, np.ndarray):
            raise TypeError(
                f"{context}: gradient must have NumPy arrays in a sharded table, got "
                f"{type(rows.values).__name__}"
            )
        takes = [table.weight.dtype.name] + ["float32"] * is_half(table.weight)
        if rows.dtype.name not in takes:
            rows = converted(f"{context}: gradient", rows, rows.dtype, table.weight, takes)
        return rows if rows.values.itemsize == 2 else rows.coalesce()

    def _facts(self, grads: Mapping[Index, RowSparse]) -> dict[str, str]:
        kinds = {f"the gradient of {self._label(i)}": g.dtype.name for i, g in grads.items()}
        return kinds | self._shapes(grads)

    def _weights(self) -> dict[Index, Array]:
        return {index: rows.weight for index, rows in self._rows.items()}

    @property
    def _kind(self) -> str:
        kinds = {rows.owners.kind for rows in self._rows.values()}
        return " by ".join([super()._kind, *sorted(kinds)])

    def _restore_rest(self, saved: Saved) -> None:
        super()._restore_rest(saved)
        for index, rows in self._rows.items():
            if index in saved.weights:
                rows.weight[...] = saved.weights[index].reshape(rows.weight.shape)

    def flush(self) -> None:
        """Apply deferred weight decay to all rows; see :meth:`Updater.flush`."""
        for index, rows in self._rows.items():
            self.shard._flush(index, rows.weight)


def _described(values: Array | Values, dtype: np.dtype[Any]) -> str:
    """Describe the initial values of a table, for comparison between ranks."""
    if callable(values):
        return "a function"
    return f"an array with checksum {checksum(np.asarray(values, dtype)):#x}"


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
        comm: object,
        values: Array | Values | None = None,
        dtype: DTypeLike = np.float32,
        owners: Literal["block", "hash"] = "block",
        index: Index | bytes = 0,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        timeout: float | None = None,
    ) -> None:
        initial = {} if values is None else {index: values}
        kind = dtype, owners, loss_scaler, clip_global_norm, timeout
        super().__init__({index: shape}, optimizer, comm, initial, *kind)
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

    def push(self, grad: Gradient) -> None:
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
        comm: object,
        values: Mapping[Any, Array | Values] | None = None,
        dtype: DTypeLike = np.float32,
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

    def owned(self, index: Index) -> Array:
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
