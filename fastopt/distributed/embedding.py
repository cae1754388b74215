"""Embedding table for arbitrary ids, whose rows are distributed over ranks.

Reason: MPI and torch have no tables; errors of one rank are agreed before a row changes.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._advice import Advice
from fastopt._kernels.hashing import FREE
from fastopt.arguments import brief, constructor, count, flag
from fastopt.checkpoint.format.errors import CheckpointError, read_from, refusing
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.tree import dumps, loads, read
from fastopt.checkpoint.restore.describe import copied
from fastopt.checkpoint.restore.shards import RUN, Placement, read_shard
from fastopt.distributed import agreement
from fastopt.distributed.agreement import Facts
from fastopt.distributed.checkpoint import write_together
from fastopt.distributed.job import private
from fastopt.distributed.ranks import Ranks, time_limit
from fastopt.distributed.rows import HashedIds, RowExchange, owners_of
from fastopt.distributed.sharded import Sharded
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array
from fastopt.sparse import RowSparse
from fastopt.table import EmbeddingTable
from fastopt.table.directory import Directory
from fastopt.table.index import Ids
from fastopt.table.saved import checked
from fastopt.table.storage import Init, of_rows

Numbers = NDArray[np.int64]

KEYS = None, np.dtype(np.int64), np.dtype(np.uint64)
"""Dtypes of ids; None if a rank has no ids."""


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

    attribute_advice: ClassVar[Mapping[str, str]] = Advice("RANKS_TABLE_ATTRIBUTES")

    def __init__(self, table: EmbeddingTable, comm: object, timeout: float | None = None) -> None:
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"table must be an EmbeddingTable, got {brief(table)}")
        super().__init__(table._updater, comm, timeout)
        self.table = table
        self._begin("make a table")
        used = bool(table.step or len(table) or (table._waiting and len(table._waiting)))
        start = table._form.start
        seen = np.array([used, start.seed, KEYS.index(table._keys)], np.int64)
        every = agreement.of_all(self._ranks, seen)
        if not every[:, 0].any():
            start.seed = int(every[0, 1])  # initial values depend on seed and id only
        if table._keys is None:
            table._keys = KEYS[every[:, 2].max()]
        _, error = agreement.attempt(self._check_owned)
        names = "dim", "dtype", "min_count", "half_life", "step"
        facts = Facts({name: str(getattr(table, name)) for name in names}, name=repr(table.name))
        facts |= {"init": str(start.text), "seed of init": str(start.seed)}
        self._agree(Facts({**facts, "dtype of ids": str(table._keys)}), error)
        self.shard._serve(self.backend)
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
        return self._together(
            "lookup",
            lambda wanted: self._fetched(wanted, create),
            lambda: self._wanted(ids, create),
            lambda wanted: {"create": str(create)},
            lambda: self._typed(ids, keep=create is True),
        )

    def _fetched(self, arguments: tuple[Any, ...], create: bool) -> Array:
        """Rows of checked ids from their owners."""
        wanted, times, inverse, shape = arguments
        routes = RowExchange(self._ranks, [HashedIds(self.ranks)], [wanted])
        (came,), (counted,) = routes.there([times])
        rows, error = agreement.attempt(self._taken, came, counted, create)
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
                lambda summed: {"dtype of grads": summed[1].dtype.name},
                lambda summed: _to_owners(self._ranks, summed),
                lambda sent: self.table._update(sent[0], self.table.id_dtype, sent[1]),
                lambda: self._typed(ids),
            )

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

        def evicted(_: object) -> Array:
            gone, error = agreement.attempt(self.table.evict, unused_for, count_below, keep)
            self._agree(Facts(), error)
            return np.asarray(gone)

        return self._together("evict", evicted, facts=lambda _: chosen)

    def prefetch(self, ids: ArrayLike) -> None:
        """Let the owners of ids read their rows from files ahead; all ranks must call it.

        It returns once the ids are with their owners, whose threads read the rows while the ranks
        compute. Call it with the ids of the next batch, as with :meth:`EmbeddingTable.prefetch
        <fastopt.EmbeddingTable.prefetch>`. Ids without a row are ignored, and so are all ids of
        tables in memory.

        Parameters
        ----------
        ids : array_like of int
            Ids of this rank, of any shape; other ranks can have other ids, or none.

        Raises
        ------
        TypeError, ValueError
            `ids` are invalid on some rank. All ranks raise the error.
        """

        def read(arguments: tuple[Any, ...]) -> None:
            (came,) = RowExchange(self._ranks, [HashedIds(self.ranks)], [arguments[0]]).there()
            self.table.prefetch(came[0].view(self.table.id_dtype))

        with self.optimizer.call_lock:
            self._together(
                "prefetch",
                read,
                lambda: self._wanted(ids, False),
                around=lambda: self._typed(ids, keep=False),
            )

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
                    self, path, lambda: ({"table": self.table._described()}, {"kind": KIND})
                ),
                facts=lambda _: {"path": os.fspath(path)},
            )

    @constructor
    def load(
        cls,
        path: PathLike | Sequence[PathLike],
        comm: object,
        optimizer: str | Optimizer | None = None,
        init: Init | None = None,
        timeout: float | None = None,
        directory: PathLike | None = None,
    ) -> Self:
        """Return the table that any number of ranks saved; all ranks must call it.

        The file can also be one of :meth:`EmbeddingTable.save <fastopt.EmbeddingTable.save>`. On
        as many ranks as saved it, the table continues exactly like the saved one; on other numbers
        of ranks rows have other numbers.

        Parameters
        ----------
        path : str or os.PathLike, or a list of them
            The file; or the directories of tables with a `path`, those of all ranks that had the
            table, in the order of the ranks. All ranks must see them, and no process has them open.
        comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
            Communicator.
        optimizer, init
            See :meth:`EmbeddingTable.load <fastopt.EmbeddingTable.load>`.
        timeout : float, optional
            See :class:`ShardedUpdater`.
        directory : str or os.PathLike, optional
            New directory in which this rank keeps its rows, the `path` of its table. The rows of
            the rank are in memory once while they are loaded. Default: they stay in memory.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            On some rank, a file is missing, damaged, of another run, or cannot be read; or the
            directories are not those of all ranks, in order. All ranks raise the error, and
            `optimizer` is unchanged.

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

        made = of_rows(optimizer)
        content, error = agreement.attempt(read_rows, path, ranks.rank, ranks.size, made, init)
        run, fields, parts = content or ("", None, False)
        agreement.agree(ranks, [Facts(path=str(path), run=run)], error)
        try:
            if parts:
                fields = share_rows(ranks, fields, made)
        except Exception as problem:
            if not agreement.is_agreed(problem):
                ranks.fail(f"failed: {type(problem).__name__}: {problem}")
            raise
        table, error = agreement.attempt(cls._restored, fields, made, init, directory)
        try:
            agreement.agree(ranks, (), error)
        except BaseException:
            if table is not None and table._directory is not None:
                table._directory.discard()
            raise
        if made is not None:
            table._use(made)
        return cls(table, comm, timeout)

    @staticmethod
    def _restored(
        fields: Any, optimizer: Optimizer | None, init: Init | None, directory: PathLike | None
    ) -> EmbeddingTable:
        """Create the table of this rank from fields of a checkpoint."""
        saved = fields["optimizer"]
        if optimizer is not None and type(optimizer) is not type(saved):
            raise CheckpointError(
                f"it was saved with {type(saved).__name__}, optimizer is {type(optimizer).__name__}"
            )
        return EmbeddingTable._restored(fields, None, init, directory)

    # Helpers

    @contextmanager
    def _typed(self, ids: ArrayLike, keep: bool = True) -> Iterator[None]:
        """Context in which the ranks have agreed on the dtype of ids; collective.

        The first ids of any rank decide. The dtype is reset if the call fails, or unless `keep`.
        """
        table, before = self.table, self.table._keys
        done = False
        if before is None:
            array, _ = agreement.attempt(np.asarray, ids)
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

    def _wanted(
        self, ids: ArrayLike, create: bool
    ) -> tuple[Ids, Numbers, Numbers, tuple[int, ...]]:
        """Distinct ids, how often each appears, the position of each id in them, and the shape."""
        flag("create", create)
        bits, shape, _ = self.table._checked_ids(ids)
        return *_distinct(bits), shape

    def _taken(self, ids: Ids, times: Numbers, create: bool) -> Array:
        """Rows of the ids from all ranks, with the number of appearances of each."""
        table = self.table
        with table.lock, table._access.to_call(change=create):
            if create:
                first = np.cumsum(times) - times
                rows = table._rows(np.repeat(ids, times), table.id_dtype, True)[first]
            else:
                rows = table._rows(ids, table.id_dtype, False)
            return table._storage.taken(rows)

    def _summed(self, ids: ArrayLike, grads: ArrayLike) -> tuple[Ids, Array]:
        """Checked ids and gradients; repeated ids are summed unless the sums would be rounded."""
        bits, _, values = self.table._checked_update(ids, grads)
        if values.itemsize == 2:
            return bits, values
        distinct, _, positions = _distinct(bits)
        grad = RowSparse(values, positions, (len(distinct), self.table.dim)).coalesce()
        return distinct, grad.values


def _distinct(bits: Ids) -> tuple[Ids, Numbers, Numbers]:
    """Distinct ids in the order of first appearance, their number, and the position of each id."""
    distinct = np.unique(bits, return_index=True, return_inverse=True, return_counts=True)
    unique, first, inverse, times = distinct
    order = np.argsort(first)
    return unique[order], times[order], np.argsort(order)[inverse]


Choice = Callable[[tuple[Array, ...]], Numbers]
KIND = "ShardedEmbeddingTable"


def read_rows(
    path: PathLike | Sequence[PathLike],
    rank: int,
    ranks: int,
    optimizer: Optimizer | None,
    init: Init | None,
) -> tuple[str, dict[str, Any] | None, bool]:
    """Return the name of a run, fields of a table, and whether they are to be shared.

    If not, the fields have the rows that `rank` owns. Otherwise they have those of some shards, for
    :func:`share_rows`, or are None: each shard is read by one rank, one at a time. For other files
    than those of ranks, the name is empty.

    Raises
    ------
    CheckpointError, OSError
        A file is missing, damaged, of another run or kind, or cannot be read.
    """
    shard: Callable[[int], dict[str, Any]]
    if not isinstance(path, (str, os.PathLike)):
        run, before = "", count("number of directories", len(path))
        shard = lambda k: _read_directory(path[k], k, before, optimizer, init)  # noqa: E731
    else:
        with read_from(path), open(path, "rb") as file:
            index = read(file, optimizer)
        with refusing(f"{path}: not a checkpoint of a table: "):
            if isinstance(index, dict) and "embedding_table" in index:

                def own(records: tuple[Array, ...]) -> Numbers:
                    used = _used(records)
                    chosen: Numbers = used[owners_of(records[0][used], ranks) == rank]
                    return chosen

                return "", index if ranks == 1 else _merged(iter([index]), own), False
            run, before = _checked(index)
        shard = lambda k: read_shard(path, run, k, before, optimizer)["table"]  # noqa: E731
    with refusing(f"{path}: not a checkpoint of a table: "):
        if before == ranks:
            return run, shard(rank), False
        first, last = (before * k // ranks for k in (rank, rank + 1))
        fields = _merged(map(shard, range(first, last)), _used) if first < last else None
        if fields is not None:
            checked(fields, optimizer, init)
        return run, fields, True


def _read_directory(
    path: PathLike, rank: int, ranks: int, optimizer: Optimizer | None, init: Init | None
) -> dict[str, Any]:
    """Fields of a table in files, that of one of several ranks, whose directory is released."""
    directory = Directory(path)
    try:
        table = EmbeddingTable._opened(directory, optimizer, init, verify=True)
        fields: dict[str, Any] = copied(table._described())
    finally:
        directory.close()
    if (owners_of(fields["ids"][0][_used(fields["ids"])], ranks) != rank).any():
        raise CheckpointError(
            f"{path}: it has ids of other ranks than rank {rank} of {ranks}; list the directories "
            "of all ranks that had the table, in the order of the ranks"
        )
    return fields


def _rows(fields: dict[str, Any], decays: bool) -> list[Array]:
    """Arrays with a row for each id: ids, weight and state, and pending decay if any `decays`."""
    rows = [*fields["ids"], fields["weight"], *fields["state"]]
    if decays:
        rows.append(np.zeros(len(rows[0])) if fields["decay"] is None else fields["decay"][0])
    return rows


def _replaced(
    fields: dict[str, Any], rows: Sequence[Array], waiting: Any, total: float | None
) -> dict[str, Any]:
    """Fields with other :func:`_rows` and waiting ids; `total` is the decay of all steps."""
    return {
        **fields,
        "ids": tuple(rows[:3]),
        "weight": rows[3],
        "state": list(rows[4 : 4 + len(fields["state"])]),
        "waiting": None if waiting is None else tuple(waiting),
        "decay": None if total is None else (rows[-1], total),
    }


def _described(fields: dict[str, Any]) -> str:
    """Dtypes of the arrays of checked fields, and shapes of their rows."""
    arrays, rows = [*_rows(fields, False), *(fields["waiting"] or ())], len(fields["weight"])
    if any(len(array) != rows for array in fields["state"]):
        raise CheckpointError(f"state must have {rows} rows")
    return str([(array.dtype.name, array.shape[1:]) for array in arrays])


def share_rows(
    ranks: Ranks, fields: dict[str, Any] | None, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Send all rows to the ranks that own them; return the fields of those of this rank.

    The last rank has fields; ranks without any are sent its own, without rows.
    """
    none = lambda records: np.empty(0, np.int64)  # noqa: E731
    last = fields is not None and ranks.rank == ranks.size - 1
    template = dumps(_merged(iter([fields]), none)) if last else b""  # type: ignore[list-item]
    (data,), _ = agreement.gathered_together(ranks, [np.frombuffer(template, np.uint8)])
    if fields is None:
        fields = loads(data.tobytes(), optimizer)
    assert fields is not None
    rows, error = agreement.attempt(_described, fields)
    agreement.agree(ranks, [Facts(rows=str(rows))], error)
    waiting, decay = fields["waiting"], fields["decay"]
    totals = agreement.of_all(ranks, np.array([np.nan if decay is None else decay[1]]))
    known = totals[~np.isnan(totals)].tolist()
    arrays = _to_owners(ranks, _rows(fields, bool(known)))
    waiting = None if waiting is None else _to_owners(ranks, waiting)
    return _replaced(fields, arrays, waiting, known[0] if known else None)


def _to_owners(ranks: Ranks, arrays: Sequence[Array]) -> list[Array]:
    """Send the rows of arrays, the first of which has their ids; they come in rank order."""
    routes = RowExchange(ranks, [HashedIds(ranks.size)], [arrays[0]])
    return [came for (came,) in routes.there(*([array] for array in arrays[1:]))]


def _checked(index: object) -> tuple[str, int]:
    """Name of the run and number of ranks, from an index file."""
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise CheckpointError(f"not a checkpoint of a table, which {KIND}.save() makes")
    run, ranks = index["run"], index["ranks"]
    if not isinstance(ranks, int) or ranks < 1 or not re.fullmatch(RUN, run):
        raise CheckpointError(f"a run cannot be named {run!r} with {ranks!r} ranks")
    return run, ranks


def _merged(shards: Iterator[dict[str, Any]], choose: Choice) -> dict[str, Any]:
    """Fields of a table with the chosen rows of all shards, in order."""

    def chosen(fields: dict[str, Any]) -> dict[str, Any]:
        rows, waiting, decay = choose(fields["ids"]), fields["waiting"], fields["decay"]
        waiting_rows = None if waiting is None else choose(waiting)
        return _replaced(
            fields,
            [array[rows] for array in _rows(fields, decay is not None)],
            None if waiting is None else [array[waiting_rows] for array in waiting],
            None if decay is None else decay[1],
        )

    parts = [*map(chosen, shards)]
    totals = [part["decay"][1] for part in parts if part["decay"] is not None]
    rows = [_rows(part, bool(totals)) for part in parts]
    waiting = None if parts[0]["waiting"] is None else [part["waiting"] for part in parts]
    return _replaced(
        parts[0],
        [*map(np.concatenate, zip(*rows, strict=True))],
        waiting and map(np.concatenate, zip(*waiting, strict=True)),
        totals[0] if totals else None,
    )


def _used(records: tuple[Array, ...]) -> Numbers:
    """Positions of the records in use."""
    return np.flatnonzero(records[2] != FREE)
