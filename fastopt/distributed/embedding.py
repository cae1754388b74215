"""Embedding table for arbitrary ids, whose rows are distributed over ranks."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._advice import RANKS_TABLE_ATTRIBUTES
from fastopt.arguments import brief, flag
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.restore.placement import Placement
from fastopt.distributed.agreement import Facts, agree, attempt
from fastopt.distributed.checkpoint import write_together
from fastopt.distributed.collectives import of_all
from fastopt.distributed.job import private
from fastopt.distributed.ranks import time_limit
from fastopt.distributed.row_shards import (
    read_rows,
    share_rows,
    write_rows,
    write_rows_index,
)
from fastopt.distributed.rows import Routes
from fastopt.distributed.sharded import Shard, Sharded
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array
from fastopt.sparse import RowSparse
from fastopt.table import EmbeddingTable
from fastopt.table.index import Ids

Numbers = NDArray[np.int64]

KEYS = None, np.dtype(np.int64), np.dtype(np.uint64)
"""Dtypes of ids; None if a rank has no ids."""


def owners_of(bits: Ids, ranks: int) -> Numbers:
    r"""Rank that owns each id, a multiplicative hash of all 64 bits.

    .. math:: \lfloor p \, \lfloor (2^{64} / \phi) \, i \bmod 2^{64} \rfloor / 2^{64} \rfloor

    (Knuth, "The Art of Computer Programming", volume 3, 6.4). Ids at any regular distance are
    spread over the ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.embedding import owners_of
    >>> owners_of(np.arange(8), 2)
    array([0, 1, 0, 1, 0, 0, 1, 0])
    """
    half = np.uint64(32)
    high = (bits.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> half
    return ((high * np.uint64(ranks)) >> half).astype(np.int64)


class TableShard(Shard):
    """Updater of a rank's table for the agreement of ranks; the table's own updates it."""

    _claims = False


class ShardedEmbeddingTable(Sharded):
    """Embedding table for arbitrary 64-bit ids, in which each id is owned by one rank.

    Each rank keeps the rows of its ids, with their state, in an
    :class:`~fastopt.EmbeddingTable`. A hash of the id determines its owner. Ranks look up the ids
    that they need, which creates rows on their owners, and send gradients to the owners. Each rank
    first sums the gradients of its repeated ids, and the owner adds these sums in rank order;
    half-precision gradients are only summed by the owner, in float32. The result is that of one
    table with the concatenated ids and gradients of all ranks.

    Parameters
    ----------
    table : EmbeddingTable
        Table for the rows of this rank, with equal arguments on all ranks. `capacity` and `path`
        are those of one rank, and can differ. The table may have rows if this rank owns their ids,
        such as a table with a `path` that is reopened on the same number of ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator. All of its ranks must create the table and call its methods together.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Attributes
    ----------
    table : EmbeddingTable
        The table of this rank. Its methods that only read can be called on single ranks; do not
        update it directly.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, ranks disagree, or the table has an id of another rank.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from mpi4py import MPI
    >>> from fastopt.mpi import ShardedEmbeddingTable
    >>> sgd = fastopt.SGD(learning_rate=0.5, lazy_update=True)
    >>> own = fastopt.EmbeddingTable(2, sgd, init="zeros")
    >>> table = ShardedEmbeddingTable(own, MPI.COMM_WORLD)
    >>> ids = np.array([10**18, 7, 10**18])
    >>> table.lookup(ids).shape
    (3, 2)
    >>> table.update(ids, np.ones((3, 2), np.float32))
    >>> table.lookup([7, 10**18])
    array([[-0.5, -0.5],
           [-1. , -1. ]], dtype=float32)
    """

    elsewhere: ClassVar[Mapping[str, str]] = RANKS_TABLE_ATTRIBUTES

    def __init__(self, table: EmbeddingTable, comm: Any, timeout: float | None = None) -> None:
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"table must be an EmbeddingTable, got {brief(table)}")
        super().__init__(TableShard(table.optimizer), comm, timeout)
        self.table = table
        self._begin("make a table")
        used = bool(table.step or len(table) or (table._waiting and len(table._waiting)))
        start = table._start
        seen = np.array([used, start.seed, KEYS.index(table._keys)], np.int64)
        every = of_all(self._ranks, seen)
        if not every[:, 0].any():
            start.seed = int(every[0, 1])  # initial values depend on seed and id only
        if table._keys is None:
            table._keys = KEYS[every[:, 2].max()]
        _, error = attempt(self._check_owned)
        self._agree(
            Facts(
                {
                    "dim": str(table.dim),
                    "dtype": table.dtype.name,
                    "init": str(start.text),
                    "seed of init": str(start.seed),
                    "min_count": str(table.min_count),
                    "half_life": str(table.half_life),
                    "name": repr(table.name),
                    "dtype of ids": str(table._keys),
                    "step": str(table.step),
                }
            ),
            error,
        )
        table._updater = self.shard
        elements = table.capacity * table.dim
        self.shard.parameters.of(table.name).offset = self.rank * elements  # other random numbers
        table._show()
        place = Placement((table.capacity, table.dim), table.dtype.name, "rows", 0, table.dim)
        self._compile([(table.name, place, table.dtype, True)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.table!r}, rank={self.rank}, ranks={self.ranks})"

    def _check_owned(self) -> None:
        for index in filter(None, (self.table._index, self.table._waiting)):
            bits = index.ids_of(index.in_use(), np.dtype(np.int64))
            wrong = bits[owners_of(bits, self.ranks) != self.rank]
            if len(wrong):
                owner = owners_of(wrong[:1], self.ranks)[0]
                raise ValueError(
                    f"table {self.table.name!r} has id {wrong.view(self.table.id_dtype)[0]}, which "
                    f"rank {owner} of {self.ranks} owns; ShardedEmbeddingTable.load() distributes "
                    "the rows of a saved table"
                )

    def lookup(self, ids: ArrayLike, create: bool = True) -> Array:
        """Return the rows of ids, fetched from their owners; all ranks must call it.

        New ids get a row on their owner, with initial values that do not depend on the number of
        ranks. The appearances on all ranks count together, see :meth:`EmbeddingTable.lookup
        <fastopt.EmbeddingTable.lookup>`.

        Parameters
        ----------
        ids : array_like of int
            Ids of this rank, of any shape; other ranks can have other ids, or none.
        create : bool
            See :meth:`EmbeddingTable.lookup <fastopt.EmbeddingTable.lookup>`; the same on all
            ranks. Default True.

        Returns
        -------
        numpy.ndarray
            A copy of shape ``(*ids.shape, dim)``, zeros for ids without a row.

        Raises
        ------
        TypeError, ValueError
            `ids` are invalid on some rank, or the capacity of a rank is exceeded. All ranks raise
            the error, and no row changes. If the capacity was exceeded, other ranks may have
            counted the ids and created rows with initial values.
        """
        values: Array = self._together(
            "lookup",
            lambda given: self._fetched(given, create),
            lambda: self._wanted(ids, create),
            lambda given: {"create": str(create)},
            lambda: self._typed(ids, keep=create is True),
        )
        return values

    def _fetched(self, given: Any, create: bool) -> Array:
        """Rows of checked ids from their owners."""
        wanted, times, inverse, shape = given
        routes = Routes(self._ranks, [owners_of(wanted, self.ranks)])
        (came,), (counted,) = routes.there([wanted], [times])
        rows, error = attempt(self._taken, came, counted, create)
        self._agree(Facts(), error)
        (values,) = routes.back([rows])
        return np.reshape(values[inverse], (*shape, self.table.dim))

    def update(self, ids: ArrayLike, grads: ArrayLike) -> None:
        """Update the rows of ids with the gradients of all ranks; all ranks must call it.

        Parameters
        ----------
        ids : array_like of int
            Ids of this rank, of any shape; other ranks can have other ids, or none.
        grads : numpy.ndarray
            Gradients of shape ``(*ids.shape, dim)``, in the table's dtype, or float32 for
            half-precision tables; the same dtype on all ranks.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid on some rank, ranks disagree, or the capacity of a rank is
            exceeded. All ranks raise the error, and nothing changes.
        """
        with self.table.lock, self.table._access.to_change(), self.optimizer.call_lock:
            self._push_together(
                "update",
                lambda: self._summed(ids, grads),
                lambda given: Facts({"dtype of grads": given[1].dtype.name}),
                self._sent,
                lambda sent: self.table._update(sent[0], self.table.id_dtype, sent[1]),
                lambda: self._typed(ids),
            )

    def _sent(self, given: tuple[Ids, Array]) -> tuple[Ids, Array]:
        """Send gradients to the owners of their ids; return those for the ids of this rank."""
        routes = Routes(self._ranks, [owners_of(given[0], self.ranks)])
        (came,), (grads,) = routes.there([given[0]], [given[1]])
        return came, grads

    def evict(
        self,
        unused_for: int | None = None,
        count_below: float | None = None,
        keep: ArrayLike | Callable[[Array], ArrayLike] | None = None,
    ) -> NDArray[Any]:
        """Remove ids that are no longer used; all ranks must call it.

        Parameters
        ----------
        unused_for, count_below
            See :meth:`EmbeddingTable.evict <fastopt.EmbeddingTable.evict>`; the same on all ranks.
        keep : array_like of int or callable, optional
            Ids of this rank to keep, or a function of them; other ids are ignored.

        Returns
        -------
        numpy.ndarray
            The removed ids of this rank.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid on this rank, which then has removed nothing; or ranks disagree.
        """
        chosen = {"unused_for": str(unused_for), "count_below": str(count_below)}

        def evicted(_: Any) -> Array:
            gone, error = attempt(self.table.evict, unused_for, count_below, keep)
            self._agree(Facts(), error)
            return np.asarray(gone)

        result: Array = self._together("evict", evicted, facts=lambda _: chosen)
        return result

    def flush(self, decay: bool = True) -> None:
        """Apply deferred decay, and write the changes of tables in files, on this rank alone.

        Parameters
        ----------
        decay : bool
            See :meth:`EmbeddingTable.flush <fastopt.EmbeddingTable.flush>`. Default True.
        """
        self.table.flush(decay)

    def save(self, path: PathLike) -> None:
        """Write a checkpoint that any number of ranks can load; all ranks must call it.

        Each rank writes the rows of its ids next to `path`, like :meth:`ShardedUpdater.save`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks can write to, the same on all ranks.

        Raises
        ------
        TypeError, OSError
            See :meth:`ShardedUpdater.save`. All ranks raise the error; the old checkpoint is
            unchanged.
        """
        with self.table.lock, self.table._access.to_read(), self.optimizer.call_lock:
            self._together(
                "save",
                lambda _: write_together(
                    self,
                    path,
                    lambda run: write_rows(path, run, self.rank, self.ranks, self.table),
                    lambda run: write_rows_index(path, run, self.ranks),
                ),
                facts=lambda _: {"path": os.fspath(path)},
            )

    @classmethod
    def load(
        cls,
        path: PathLike,
        comm: Any,
        optimizer: Optimizer | None = None,
        init: Any = None,
        timeout: float | None = None,
    ) -> Self:
        """Return the table that any number of ranks saved; all ranks must call it.

        The file can also be one of :meth:`EmbeddingTable.save <fastopt.EmbeddingTable.save>`. On
        as many ranks as saved it, the table continues exactly like the saved one; on other numbers
        of ranks rows have other numbers.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
            Communicator.
        optimizer, init
            See :meth:`EmbeddingTable.load <fastopt.EmbeddingTable.load>`.
        timeout : float, optional
            See :class:`ShardedUpdater`.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            On some rank, a file is missing, damaged, of another run, or cannot be read. All ranks
            raise the error, and `optimizer` is unchanged.

        Examples
        --------
        >>> import tempfile
        >>> import fastopt
        >>> from mpi4py import MPI
        >>> from fastopt.mpi import ShardedEmbeddingTable
        >>> own = fastopt.EmbeddingTable(4, "adam")
        >>> table = ShardedEmbeddingTable(own, MPI.COMM_WORLD)
        >>> before = table.lookup([3, 1, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table.save(f"{folder}/table.safetensors")
        ...     again = ShardedEmbeddingTable.load(f"{folder}/table.safetensors", MPI.COMM_WORLD)
        >>> bool((again.lookup([3, 1, 2]) == before).all())
        True
        """
        limit = time_limit(timeout)
        ranks = private(comm, limit).ranks
        ranks.begin("load of a ShardedEmbeddingTable", limit)

        def owners(bits: Ids) -> Numbers:
            return owners_of(bits, ranks.size)

        arguments = ranks.rank, ranks.size, owners, optimizer, init
        found, error = attempt(read_rows, path, *arguments)
        run, fields, rows = found or ("", {}, "")
        agree(ranks, [Facts(path=os.fspath(path), run=run, rows=rows)], error)
        if rows:
            try:
                fields = share_rows(ranks, fields, owners)
            except BaseException as problem:
                ranks.fail(f"failed: {type(problem).__name__}: {problem}")
                raise
        table, error = attempt(cls._restored, fields, optimizer, init)
        agree(ranks, (), error)
        if optimizer is not None:
            table._use(optimizer)
        return cls(table, comm, timeout)

    @staticmethod
    def _restored(fields: Any, optimizer: Optimizer | None, init: Any) -> EmbeddingTable:
        """Create the table of this rank from fields of a checkpoint."""
        table = EmbeddingTable._restored(fields, None, init)
        if optimizer is not None and type(optimizer) is not type(table.optimizer):
            raise CheckpointError(
                f"it was saved with {type(table.optimizer).__name__}, optimizer is "
                f"{type(optimizer).__name__}"
            )
        return table

    # Helpers

    @contextmanager
    def _typed(self, ids: Any, keep: bool = True) -> Iterator[None]:
        """Context in which the ranks have agreed on the dtype of ids; collective.

        The first ids of any rank decide. The dtype is reset if the call fails, or unless `keep`.
        """
        table, before = self.table, self.table._keys
        done = False
        if before is None:
            array, _ = attempt(np.asarray, ids)
            known = array is not None and array.size
            kind = np.array([1 + (array.dtype == np.uint64) if known else 0], np.int64)
            self._ranks.wait(self._ranks.comm.all_reduce_max(kind))
            table._keys = KEYS[kind[0]]
        try:
            yield
            done = keep
        finally:
            if not done:
                table._keys = before

    def _wanted(self, ids: Any, create: Any) -> tuple[Ids, Numbers, Numbers, tuple[int, ...]]:
        """Distinct ids, how often each appears, the position of each id in them, and the shape."""
        flag("create", create)
        bits, shape, _ = self.table._checked_ids(ids)
        return *_distinct(bits), shape

    def _taken(self, ids: Ids, times: Numbers, create: bool) -> Array:
        """Rows of the ids from all ranks, with the number of appearances of each."""
        table = self.table
        with table.lock, table._access.to(change=create):
            if create:
                first = np.cumsum(times) - times
                rows = table._rows(np.repeat(ids, times), table.id_dtype, True)[first]
            else:
                rows = table._rows(ids, table.id_dtype, False)
            return table._storage.taken(rows)

    def _summed(self, ids: Any, grads: Any) -> tuple[Ids, Array]:
        """Checked ids and gradients; repeated ids are summed unless the sums would be rounded."""
        bits, _, values = self.table._checked_update(ids, grads)
        if values.itemsize == 2:
            return bits, values
        distinct, _, positions = _distinct(bits)
        grad = RowSparse(values, positions, (len(distinct), self.table.dim)).coalesce()
        return distinct, grad.values


def _distinct(bits: Ids) -> tuple[Ids, Numbers, Numbers]:
    """Distinct ids in the order of first appearance, their number, and the position of each id."""
    found = np.unique(bits, return_index=True, return_inverse=True, return_counts=True)
    unique, first, inverse, times = found
    order = np.argsort(first)
    return unique[order], times[order], np.argsort(order)[inverse]
