"""Embedding table with rows for arbitrary ids, created on first use."""

import builtins
import copy
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastopt._advice import Advice
from fastopt._engine.validate import converted, is_half
from fastopt._interrupts import uninterrupted
from fastopt._kernels.hashing import FREE
from fastopt._kernels.layout import bfloat16, kind_of
from fastopt._kernels.threads import start_locks
from fastopt._updater.updater import Updater
from fastopt.arguments import Checked, brief, constructor, count, flag, number
from fastopt.checkpoint.format.errors import CheckpointError, read_from, refusing
from fastopt.checkpoint.format.files import PathLike, write_atomically
from fastopt.checkpoint.format.tree import chunks, read
from fastopt.optimizer import Optimizer, create
from fastopt.sparse import REALS, RowSparse, unmasked
from fastopt.table.access import Access
from fastopt.table.directory import Array, Directory, Rows
from fastopt.table.index import MOST_ROWS, RECORD, Ids, RowIndex
from fastopt.table.saved import FORMAT, checked, checked_description
from fastopt.table.storage import Form, Init, Start, Storage, check_optimizer, of_rows

FEWEST = 1 << 16
"""Fewest rows to reserve if `capacity` is not given."""

LAST_STEP = int(FREE) - 1

BUFFER = 1 << 30
"""Default of `buffer_bytes`."""


class EmbeddingTable(Checked):
    r"""Embedding table for arbitrary 64-bit ids that creates rows as ids appear.

    The initial values of row :math:`r(i)` depend only on the seed and the id :math:`i`. An update
    applies the optimizer's rule to the row with the sum of its gradients,

    .. math:: w_{r(i)} \leftarrow \mathrm{rule}\Big(w_{r(i)}, \sum_{j:\, i_j = i} g_j\Big),

    with the same bits as :class:`~fastopt.optimizer.Updater` with row-sparse gradients. Ids are
    found by open addressing. Rows are numbered in the order of first appearance, the lowest free
    number first. They never move: their address space is reserved in advance, and growth uses more
    of its pages.

    Every method holds the table's lock, so threads can look up rows while another thread updates
    them, and see either all of an update or none of it. The lock does not cover direct access to
    :attr:`weight`. In a signal handler that interrupts a change of the table, methods raise
    RuntimeError: set a flag there, and save after the step. Functions passed as `init` or `keep`
    can read the table, but not change it.

    Parameters
    ----------
    dim : int
        Length of a row.
    optimizer : Optimizer or str
        Optimizer that updates the indexed rows only (``lazy_update=True``, which is set if a name
        is given). Each table counts its own updates in it, see :class:`~fastopt.Updater`.
        Optimizers that override ``update()``, such as Muon, or sum the gradients of several
        calls, such as LBSGD, are not supported.
    dtype : dtype_like
        float32, float64, float16 or bfloat16. Default float32.
    init : str, Initializer or callable
        Initial values of a row: 'uniform', 'normal', 'zeros', 'ones', an instance of
        :class:`~fastopt.initializer.Uniform`, Normal or Constant, or a function that takes an array
        of ids and returns a row for each. Random values are drawn in float32 as a function of the
        id and a seed, which comes from the initializer's generator. Default 'uniform': from -0.07
        to 0.07.
    capacity : int, optional
        Maximum number of rows, at most 2**31 - 2. Address space for the rows and their state is
        reserved. Default: 2**31 - 2, or as many as the system can reserve.
    min_count : int
        Number of appearances in :meth:`lookup` at which an id gets a row. Default 1: the first.
    half_life : float, optional
        Half-life of the counts, in updates. Default None: counts are exact.
    name : str
        Index of the table in the optimizer, for update counts, multipliers and error messages.
        Default 'embedding'.
    path : str or os.PathLike, optional
        New or empty directory to keep the rows and their state in, for tables that are larger than
        memory. Its files are portable between machines. :meth:`flush` writes changes to its files,
        and :meth:`open` reopens the table. Rules that read the whole weight, such as LAMB, and
        ``sparse_decay="dense"`` are not supported.
        Default: rows are in memory.
    buffer_bytes : int
        Limit on the changed pages of the files in memory; if it is exceeded, the next call flushes.
        Default 2**30.

    Attributes
    ----------
    dim, dtype, capacity, min_count, half_life, name
        The arguments, which cannot be changed; `capacity` is the number of reserved rows.
    optimizer : Optimizer
        The optimizer. Its hyper-parameters can be changed at any time.
    step : int
        Number of updates so far.
    id_dtype : numpy.dtype
        int64, or uint64 if the first ids were uint64.
    lock : threading.RLock
        Lock that every method holds.
    flushes : int
        Number of flushes of a table in files. A crash leaves the table as of the last one.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, or the optimizer already has a parameter `name`.
    OSError
        `path` is not empty, or its files cannot be created.
    MemoryError
        The address space for `capacity` rows cannot be reserved.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> sgd = fastopt.SGD(lr=0.5, lazy_update=True)
    >>> table = fastopt.EmbeddingTable(2, sgd, init="zeros")
    >>> ids = np.array([10**18, 7, 10**18])
    >>> table.lookup(ids).shape
    (3, 2)
    >>> table.update(ids, np.ones((3, 2), np.float32))
    >>> table.lookup(ids)
    array([[-1. , -1. ],
           [-0.5, -0.5],
           [-1. , -1. ]], dtype=float32)
    >>> table.rows(ids), table.ids()
    (array([0, 1, 0]), array([1000000000000000000, 7]))
    >>> table
    EmbeddingTable(dim=2, optimizer=SGD(learning_rate=0.5, num_update=1), rows=2, dtype=float32)
    """

    attribute_advice: ClassVar[Mapping[str, str]] = Advice("TABLE_ATTRIBUTES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("TABLE_ARGUMENTS")

    buffer_bytes: int = BUFFER
    _index: RowIndex
    _keys: np.dtype[Any] | None
    _storage: Storage
    _waiting: RowIndex | None
    """Ids that have appeared fewer than `min_count` times."""

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer | str,
        *,
        dtype: DTypeLike = "float32",
        init: Init = "uniform",
        capacity: int | None = None,
        min_count: int = 1,
        half_life: float | None = None,
        name: str = "embedding",
        path: PathLike | None = None,
        buffer_bytes: int = BUFFER,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {brief(name)}")
        opt = create(of_rows(optimizer))
        with _naming(name):
            check_optimizer(opt, in_files=path is not None)
            self.buffer_bytes = count("buffer_bytes", buffer_bytes)
            form = Form(name, dim, _dtype(dtype), Start(init), capacity, min_count, half_life)
            directory = None if path is None else Directory.created(path)
        try:
            with _naming(name):
                self._begin(form, opt, directory)
            self.optimizer._index_update_count[name] = opt.begin_num_update
            self._commit()
        except BaseException:
            if directory is not None:
                directory.discard()
            raise

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self._updater.optimizer

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Dtype of the ids."""
        return np.dtype(np.int64) if self._keys is None else self._keys

    @property
    def weight(self) -> Array:
        """View of the rows up to the last one ever used; free rows are zeros.

        The view is writable unless the table is in files. It does not include rows that are created
        later.
        """
        weight: Array = self._storage.weight[: self._index.high]
        if self._directory is not None:
            weight.flags.writeable = False  # only tracked changes reach the files
        return weight

    @property
    def path(self) -> Path | None:
        """Directory of a table in files, or None."""
        return None if self._directory is None else self._directory.path

    # Ids

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, id: object) -> bool:
        if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)):
            raise TypeError(
                f"table {self.name!r}: an id must be an integer, got {brief(id)}; rows(ids) >= 0 "
                "says it of an array"
            )
        bounds = np.iinfo(self.id_dtype)
        if not bounds.min <= int(id) <= bounds.max:
            return False
        with self.lock, self._access.to_read():
            bits = np.array([int(id)], self.id_dtype).view(np.int64)
            return not self._index.find(bits).missing

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids in row order, as of the start of the iteration."""
        return iter(self.ids().tolist())

    def ids(self) -> NDArray[Any]:
        """Return the ids in row order: the order of first appearance, until rows are evicted.

        Returns
        -------
        numpy.ndarray
            A copy, int64 or uint64.
        """
        with self.lock, self._access.to_read():
            return self._index.ids_of(self._index.in_use(), self.id_dtype)

    def rows(self, ids: ArrayLike, create: bool = False) -> Rows:
        """Return the row numbers of ids in :attr:`weight`.

        Parameters
        ----------
        ids : array_like of int
            int64 or uint64, or other integers, of any shape.
        create : bool
            Create rows for ids that have none, like :meth:`lookup`. Default False: their row number
            is -1.

        Returns
        -------
        numpy.ndarray of int64
            Row numbers, in the shape of `ids`.

        Raises
        ------
        TypeError, ValueError
            See :meth:`lookup`.

        Examples
        --------
        >>> import fastopt
        >>> table = fastopt.EmbeddingTable(2, "adam")
        >>> table.rows([30, 20, 30], create=True), table.rows([20, 10])
        (array([0, 1, 0]), array([ 1, -1]))
        """
        with self.lock, self._access.to_call(change=flag("create", create)):
            bits, shape, keys = self._checked_ids(ids)
            return np.reshape(self._rows(bits, keys, create), shape)

    def lookup(self, ids: ArrayLike, create: bool = True) -> Array:
        """Return the rows of ids.

        Each occurrence of an id adds 1 to its count, and :attr:`step` becomes its last use.

        Parameters
        ----------
        ids : array_like of int
            int64 or uint64, or other integers, of any shape.
        create : bool
            Create the row of an id at its `min_count`-th appearance. False changes nothing, not
            even counts and last uses. Default True.

        Returns
        -------
        numpy.ndarray
            A copy of shape ``(*ids.shape, dim)``, zeros for ids without a row.

        Raises
        ------
        TypeError
            `ids` are not integers.
        ValueError
            An id is out of range for :attr:`id_dtype`, more than `capacity` rows are needed, or an
            `init` function returns an invalid array. Nothing changes.

        Examples
        --------
        >>> import fastopt
        >>> table = fastopt.EmbeddingTable(2, "adam", init="ones", min_count=2)
        >>> table.lookup([5, 6, 5])
        array([[1., 1.],
               [0., 0.],
               [1., 1.]], dtype=float32)
        """
        with self.lock, self._access.to_call(change=flag("create", create)):
            return self._lookup(ids, create)

    def update(self, ids: ArrayLike, grads: ArrayLike) -> None:
        """Update the rows of ids with the optimizer.

        Gradients of repeated ids are summed in their order. If `min_count` is 1, ids without a row
        get one first; otherwise their gradients are ignored. The call is one update of the table,
        even without ids, and becomes the last use of the rows.

        Parameters
        ----------
        ids : array_like of int
            int64 or uint64, or other integers, of any shape.
        grads : numpy.ndarray
            Gradients of shape ``(*ids.shape, dim)``, of any real floating dtype; others than the
            table's, or float32 for half-precision tables, are converted first.

        Raises
        ------
        TypeError, ValueError
            `ids` or `grads` are invalid; see :meth:`lookup`. Nothing changes.
        """
        with self.lock, self._access.to_change():
            self._update(*self._checked_update(ids, grads))

    # Evicting rows

    def counts(self, ids: ArrayLike | None = None) -> NDArray[Any]:
        """Return the number of appearances of ids, decayed with the half-life.

        Parameters
        ----------
        ids : array_like of int, optional
            Ids of any shape. Default: :meth:`ids`.

        Returns
        -------
        numpy.ndarray
            Counts, int64, or float64 with `half_life`; 0 for ids without a row.
        """
        return self._read(ids, lambda rows: self._index.counts_at(rows, self.step), absent=0)

    def last_used(self, ids: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the :attr:`step` at which ids were last used, -1 for ids without a row.

        Parameters
        ----------
        ids : array_like of int, optional
            Ids of any shape. Default: :meth:`ids`.
        """
        return self._read(ids, lambda rows: self._index.last[rows].astype(np.int64), absent=-1)

    def evict(
        self,
        unused_for: int | None = None,
        count_below: float | None = None,
        keep: ArrayLike | Callable[[Array], ArrayLike] | None = None,
    ) -> NDArray[Any]:
        """Remove ids that are no longer used.

        The rows of removed ids become free for other ids. The next id in a row starts with initial
        weight and state, even if it is the removed one. `unused_for` and `count_below` also apply
        to ids that wait for their `min_count`-th appearance.

        Parameters
        ----------
        unused_for : int, optional
            Remove ids that no lookup or update has used in this many updates, 1 or more.
        count_below : float, optional
            Remove ids with a smaller count. With `unused_for`, an id must meet both conditions.
        keep : array_like of int or callable, optional
            Ids to keep in any case; or a function that takes the array of ids to be removed and
            returns a bool for each, True to keep it.

        Returns
        -------
        numpy.ndarray
            The removed ids, in row order.

        Raises
        ------
        TypeError, ValueError
            No argument is given, or an argument is invalid. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> table = fastopt.EmbeddingTable(1, "adagrad")
        >>> _ = table.lookup([1, 2, 3, 2, 3])
        >>> table.evict(count_below=2, keep=[7]), table.ids()
        (array([1]), array([2, 3]))
        >>> table.evict(keep=lambda ids: ids % 2 == 1), table.ids()
        (array([2]), array([3]))
        """
        if unused_for is None and count_below is None and keep is None:
            raise ValueError(f"table {self.name!r}: evict needs unused_for, count_below or keep")
        with self.lock, self._access.to_change():
            with _naming(self.name):
                if unused_for is not None:
                    unused_for = count("unused_for", unused_for)
                if count_below is not None:
                    count_below = number("count_below", count_below, least=0)
                gone = self._unused(self._index, unused_for, count_below)
                ids = self._index.ids[gone]
                if callable(keep):
                    with self._access.in_function():
                        stays = np.asarray(keep(ids.view(self.id_dtype)))
                    if stays.shape != ids.shape or stays.dtype != np.bool_:
                        raise TypeError(
                            f"keep must return an array of {len(ids)} bools, got {brief(stays)}"
                        )
                elif keep is not None:
                    kept, *_ = self._checked_ids(keep, "keep")
                    stays = np.isin(gone, self._index.find(kept).rows)
            if keep is not None:
                gone, ids = gone[~stays], ids[~stays]
            with uninterrupted:
                if self._waiting is not None and (unused_for or count_below):
                    waiting = self._unused(self._waiting, unused_for, count_below)
                    self._waiting.remove(waiting)
                self._index.remove(gone)
                self._storage.clear(gone)
            went: NDArray[Any] = ids.view(self.id_dtype)
            return went

    # Deferred decay, copies, files

    def flush(self, decay: bool = True) -> None:
        """Apply deferred decay to all rows, and write the changes of a table in files.

        After it returns, a crash of the process or the machine leaves the table as of this flush or
        a later one. A crash during the flush leaves it as of the previous flush or this one, never
        a mixture.

        Parameters
        ----------
        decay : bool
            Apply deferred decay, see :meth:`Updater.flush`; this reads and writes all rows.
            Default True.

        Raises
        ------
        OSError
            The disk is full, or cannot be written. The changes stay in the table, and the flush can
            be repeated.

        Examples
        --------
        >>> import tempfile
        >>> import fastopt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/users"
        ...     with fastopt.EmbeddingTable(2, "adam", init="ones", path=path) as table:
        ...         _ = table.lookup([3, 9])
        ...         table.flush()
        ...     with fastopt.EmbeddingTable.open(path) as table:
        ...         table.flushes, table.lookup(9)
        (3, array([1., 1.], dtype=float32))
        """
        with self.lock, self._access.to_change():
            if flag("decay", decay) and self._storage.decay is not None:
                self._decay_all()
            self._commit()

    def prefetch(self, ids: ArrayLike) -> None:
        """Read rows of a table in files ahead of later calls, in a background thread.

        Returns at once. Call it with the ids of the next batch before looking up and updating the
        current one. Ids without a row are ignored. For a table in memory the call does nothing.

        Parameters
        ----------
        ids : array_like of int
            Ids of any shape.

        Raises
        ------
        TypeError, ValueError
            See :meth:`lookup`.
        """
        with self.lock, self._access.to_read():
            bits, _, _ = self._checked_ids(ids)
            if self._directory is not None:
                rows = self._index.find(bits).rows
                self._directory.prefetch(rows[rows >= 0])

    def close(self) -> None:
        """Flush a table in files, without applying deferred decay, and release its directory.

        The table cannot be used afterwards. For a table in memory the call does nothing.

        Raises
        ------
        OSError
            See :meth:`flush`. The table stays open.
        """
        with self.lock:
            if self._directory is None or self._access.closed:
                return
            with self._access.to_change():
                self._commit()
                self._directory.close()
                self._access.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._directory is not None:  # drop the changes since the last flush
            with self.lock:
                self._access.closed = True
                self._directory.close()

    @constructor
    def open(
        cls,
        path: PathLike,
        optimizer: str | Optimizer | None = None,
        init: Init | None = None,
        *,
        buffer_bytes: int = BUFFER,
        verify: bool = False,
    ) -> Self:
        """Open the table in a directory, as of its last flush.

        Parameters
        ----------
        path : str or os.PathLike
            The directory.
        optimizer, init
            See :meth:`load`.
        buffer_bytes : int
            See :class:`EmbeddingTable`.
        verify : bool
            Read all rows and verify their checksums. Default False: verify only the ids.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            There is no table, another process has it open, or a file is missing, damaged, too
            short, a link, or cannot be opened. Nothing changes.
        """
        buffer_bytes, verify = count("buffer_bytes", buffer_bytes), flag("verify", verify)
        directory = Directory(path)
        try:
            made = of_rows(optimizer)
            table = cls._opened(directory, made, init, verify)
            table.buffer_bytes = buffer_bytes
        except BaseException:
            directory.close()
            raise
        if made is not None:
            table._use(made)
        return table

    def to_arrays(self) -> tuple[NDArray[Any], Array]:
        """Return copies of ids and weights as plain arrays, in row order.

        Returns
        -------
        ids : numpy.ndarray
            Ids; see :meth:`ids`.
        weight : numpy.ndarray
            Rows of these ids, of shape ``(len(ids), dim)``.
        """
        with self.lock, self._access.to_read():
            return self.ids(), self._storage.weight[self._index.in_use()]

    def save(self, path: PathLike) -> None:
        """Write the table to a file, with everything that :meth:`load` needs to continue.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file. An existing file is replaced atomically.

        Raises
        ------
        TypeError
            The optimizer has an attribute that cannot be saved.
        OSError
            The file cannot be written. An existing file is unchanged.
        """
        with self.lock, self._access.to_read(), self.optimizer.call_lock:
            write_atomically(path, chunks(self._described()))

    @constructor
    def load(
        cls, path: PathLike, optimizer: str | Optimizer | None = None, init: Init | None = None
    ) -> Self:
        """Return the table that :meth:`save` wrote; it continues exactly like the saved one.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        optimizer : str or Optimizer, optional
            Optimizer, or its name, that receives the saved attributes and is used in place of a new
            one. Needed for classes that are not registered, and for tables that share the settings
            of one.
        init : str, Initializer or callable, optional
            Initial values of new rows. Required if the saved table uses a function, which is not
            saved.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            The file is damaged, does not match, or cannot be read. `optimizer` is unchanged.

        Examples
        --------
        >>> import tempfile
        >>> import fastopt
        >>> table = fastopt.EmbeddingTable(4, "adam")
        >>> before = table.lookup([3, 1, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table.save(f"{folder}/table.safetensors")
        ...     loaded = fastopt.EmbeddingTable.load(f"{folder}/table.safetensors")
        >>> bool((loaded.lookup([3, 1, 2]) == before).all()), list(loaded)
        (True, [3, 1, 2])
        """
        if os.path.isdir(path):
            raise CheckpointError(
                f"{os.fspath(path)} is a directory; EmbeddingTable.open() opens a table in files"
            )
        with read_from(path), builtins.open(os.fspath(path), "rb") as file:
            made = of_rows(optimizer)
            return cls._restored(read(file, made), made, init)

    def _described(self, init: Init | None = None) -> dict[str, Any]:
        """Fields of a checkpoint; weight and state are views."""
        high, waiting = self._index.high, self._waiting
        decay = self.optimizer.row_decay.get(self.name)
        return self._settings(init) | {
            "ids": _records(self._index),
            "waiting": None if waiting is None else _records(waiting),
            "weight": self._storage.weight[:high],
            "state": [array[:high] for array in self._storage.arrays],
            "decay": None if decay is None else (decay[0][:high], decay[1]),
        }

    @classmethod
    def _opened(
        cls, directory: Directory, optimizer: Optimizer | None, init: Init | None, verify: bool
    ) -> Self:
        """Open the table in the files of a directory; nothing is written before all checks pass."""
        table = cls.__new__(cls)
        saved, changes = directory.read(optimizer)
        with read_from(directory.path), refusing("not the checkpoint of a table: "):
            fields = checked_description(saved, optimizer, init)
            check_optimizer(fields["optimizer"], in_files=True)
            numbers = {"rows": fields["used"], "ids": fields["high"]}
            if fields["waiting"] is not None:
                numbers["waiting"] = fields["waiting"]
            if fields["decay"] is not None:
                numbers["decay"] = fields["used"]
            directory.expect(numbers)
            table._begin(fields["form"], fields["optimizer"], directory)
            storage = table._storage
            record = [[dtype.name, list(shape)] for dtype, shape in storage.parts]
            if record != fields["record"] or directory.files.keys() != numbers.keys():
                raise CheckpointError("its rows are not of a weight and state of its optimizer")
            if not fields["high"] <= fields["used"] <= table.capacity:
                raise CheckpointError(f"it has {fields['used']} rows for {table.capacity}")
            directory.apply(changes)
            for name, rows in numbers.items():
                directory.files[name].check_length(rows)
                if verify or name in ("ids", "waiting"):
                    directory.files[name].verify(rows)
            table.step, table.flushes = fields["step"], fields["flushes"]
            table._keys, storage.used = fields["id_dtype"], fields["used"]
            table._index.begin(fields["high"])
            if table._waiting is not None:
                table._waiting.begin(fields["waiting"])
            if storage.decay is not None:
                table.optimizer.row_decay[table.name] = storage.decay[:0], fields["decay"]
            table._grow(fields["used"])
            table._show()
        directory.recover()
        return table

    @classmethod
    def _restored(
        cls,
        saved: object,
        optimizer: Optimizer | None,
        init: Init | None,
        path: PathLike | None = None,
    ) -> Self:
        """Check the fields from :meth:`_described`, and create a table from them.

        Raises
        ------
        CheckpointError
            The fields are not those of a table.
        OSError
            `path` is not empty, or its files cannot be created.
        """
        table = cls.__new__(cls)
        directory = None if path is None else Directory.created(path)
        try:
            with refusing("not the checkpoint of a table: "):
                fields = checked(saved, optimizer, init)
                check_optimizer(fields["optimizer"], in_files=path is not None)
                table._begin(fields["form"], fields["optimizer"], directory)
                table._take_up(fields)
            table._commit()
        except BaseException:
            if directory is not None:
                directory.discard()
            raise
        if optimizer is not None:
            table._use(optimizer)
        return table

    def _use(self, optimizer: Optimizer) -> None:
        """Restore the saved optimizer into the user's, and use the latter from now on."""
        restored, updater = self.optimizer, Updater(optimizer)
        counted = updater.optimizer
        counted.restore_from(restored)
        counted.whole_shapes[self.name] = restored.whole_shapes[self.name]
        self._storage.optimizer, self._updater = counted, updater
        self._show()

    def _take_up(self, fields: dict[str, Any]) -> None:
        """Fill an empty table with checked ids, weights and states."""
        storage, weight = self._storage, fields["weight"]
        high = len(weight)
        if high > self.capacity:
            raise CheckpointError(f"it has {high} rows for a capacity of {self.capacity}")
        self.step, self._keys = fields["step"], fields["id_dtype"]
        self._index.fill(*fields["ids"])
        if self._waiting is not None:
            self._waiting.fill(*fields["waiting"])
        storage._check(fields["state"])
        storage.weight[:high] = weight
        for array, values in zip(storage.arrays, fields["state"], strict=True):
            if len(values) != high:
                raise CheckpointError(f"it has {high} rows, and {len(values)} of a state")
            array[:high] = values
        storage.used = high
        storage.clear(np.flatnonzero(fields["ids"][2] == FREE))
        if (storage.decay is None) != (fields["decay"] is None) and high:
            raise CheckpointError("it must have the deferred decay that the optimizer keeps")
        if storage.decay is not None and fields["decay"] is not None:
            rows, total = fields["decay"]
            storage.decay[:high] = rows
            self.optimizer.row_decay[self.name] = storage.decay[:0], total
        self._grow(high)
        storage.mark(np.arange(high))
        self._show()

    def __reduce__(self) -> tuple[Any, ...]:
        with self.lock, self._access.to_read(), self.optimizer.call_lock:
            init = self._form.start.given if self._form.start.function is not None else None
            return _unpickled, (type(self), copy.deepcopy(self._described(init=init)))

    def __repr__(self) -> str:
        more = "".join(
            f", {name}={value!r}"
            for name, value, default in (
                ("name", self.name, "embedding"),
                ("min_count", self.min_count, 1),
                ("half_life", self.half_life, None),
                ("capacity", self._form.capacity, None),
                ("path", None if self.path is None else str(self.path), None),
            )
            if value != default
        )
        return (
            f"{type(self).__name__}(dim={self.dim}, optimizer={self.optimizer!r}, "
            f"rows={len(self)}, dtype={self.dtype}{more})"
        )

    def _begin(self, form: Form, optimizer: Optimizer, directory: Directory | None = None) -> None:
        """Set the attributes, and reserve the rows."""
        self._form, self._directory, self.flushes = form, directory, 0
        start_locks(self)
        self._updater = Updater(optimizer)
        optimizer = self._updater.optimizer
        self._access = Access(self.name)
        self.step = 0
        self._keys = None
        rate = math.log(2) / form.half_life if form.half_life else 0.0

        def reserve(rows: int) -> tuple[RowIndex, Storage, RowIndex | None]:
            file = None if directory is None else partial(directory.file, capacity=rows)

            def index(name: str) -> RowIndex:
                return RowIndex(rows, rate, None if file is None else file(name, RECORD))

            waiting = index("waiting") if form.min_count > 1 else None
            return index("ids"), Storage(form, optimizer, rows, file), waiting

        self._index, self._storage, self._waiting = _granted(form.capacity, reserve)
        self._grow(1)

    def _start_locks(self) -> None:
        self.lock = threading.RLock()

    def __array__(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise TypeError(f"table {self.name!r} is no array; to_arrays() has its ids and rows")

    # Arguments

    @property
    def name(self) -> str:
        """Name of the table, and of its parameter in the optimizer."""
        return self._form.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._form.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows."""
        return self._form.dtype

    @property
    def capacity(self) -> int:
        """Number of rows that memory is reserved for."""
        return self._index.capacity

    @property
    def min_count(self) -> int:
        """Appearances of an id until it has a row."""
        return self._form.min_count

    @property
    def half_life(self) -> float | None:
        """Updates after which the count of an id has halved, or None."""
        return self._form.half_life

    def _checked_ids(
        self, ids: ArrayLike, argument: str = "ids"
    ) -> tuple[Ids, tuple[int, ...], np.dtype[Any]]:
        """Check ids; return their bits as a flat int64 array, their shape, and the id dtype."""
        context = f"table {self.name!r}: {argument}"
        try:
            array = unmasked(context, ids)
        except ValueError:
            raise TypeError(f"{context} must be an array of integers, got {brief(ids)}") from None
        if not (isinstance(ids, np.ndarray) or array.size):
            array = array.astype(np.int64)  # NumPy converts an empty list to float64
        if array.dtype.kind not in "iu":
            got = brief(ids) if array.dtype == object else array.dtype
            cure = ", np.array(ids, np.uint64) holds them" * (not isinstance(ids, np.ndarray))
            if array.dtype.kind in "SUT" or isinstance(next(iter(array.flat), None), str | bytes):
                cure = ": hash texts to integers that are the same in each process"
            raise TypeError(f"{context} must be integers of at most 64 bits, got {got}{cure}")
        keys = self._keys or np.dtype(np.uint64 if array.dtype == np.uint64 else np.int64)
        flat = np.ascontiguousarray(array, keys).reshape(-1)  # first, as it may not fit into memory
        if array.size and array.dtype.kind != keys.kind:
            bounds = np.iinfo(keys)
            wrong = array.min() if keys.kind == "u" else array.max()
            if not bounds.min <= int(wrong) <= bounds.max:
                raise ValueError(f"{context} must fit into the table's {keys}, got {wrong}")
        return flat.view(np.int64), array.shape, keys

    def _checked_update(self, ids: ArrayLike, grads: ArrayLike) -> tuple[Ids, np.dtype[Any], Array]:
        """Check the arguments of :meth:`update`, and return those of :meth:`_update`."""
        bits, shape, keys = self._checked_ids(ids)
        context = f"table {self.name!r}: grads"
        array = unmasked(context, grads)
        takes = [self.dtype.name] + ["float32"] * is_half(self._storage.weight)
        if array.dtype.name not in takes or not array.dtype.isnative:
            array = converted(context, array, array.dtype, self._storage.weight, takes)
        if array.shape != (*shape, self.dim):
            raise ValueError(f"{context} must have shape {(*shape, self.dim)}, got {array.shape}")
        return bits, keys, array.reshape(-1, self.dim)

    def _read(self, ids: ArrayLike | None, values: Callable[[Rows], Array], absent: int) -> Array:
        """Values of the rows of ids, by default of all ids, and `absent` for ids without a row."""
        with self.lock, self._access.to_read():
            if ids is None:
                return values(self._index.in_use())
            bits, shape, _ = self._checked_ids(ids)
            rows = self._index.find(bits).rows
            numbers = values(np.maximum(rows, 0))
            numbers[rows < 0] = absent
            return numbers.reshape(shape)

    # Rows

    def _lookup(self, ids: ArrayLike, create: bool) -> Array:
        bits, shape, keys = self._checked_ids(ids)
        rows = self._rows(bits, keys, create)
        return self._storage.taken(rows).reshape((*shape, self.dim))

    def _rows(self, ids: Ids, keys: np.dtype[Any], create: bool) -> Rows:
        """Row numbers of ids; with `create`, also create rows and record the use."""
        index = self._index
        if self._directory is not None and self._directory.held > self.buffer_bytes:
            self._commit()
        with uninterrupted:
            rows, missing = index.find(ids)
            if not create:
                return rows
            if missing:
                absent = np.flatnonzero(rows < 0)
                new, waiting = ids[absent], self._waiting
                rows[absent] = (
                    self._insert(new, keys)[0]
                    if waiting is None
                    else self._admit(waiting, new, keys)
                )
            index.touch(rows, (self.step, True))
            self._keys = keys
        return rows

    def _update(self, ids: Ids, keys: np.dtype[Any], grads: Array) -> None:
        """Update rows with checked gradients."""
        index, step = self._index, min(self.step + 1, LAST_STEP)
        if self._directory is not None and self._directory.held > self.buffer_bytes:
            self._commit()
        with uninterrupted:
            (rows, missing), high = index.find(ids), index.high
            new = rows[:0]
            try:
                if missing and self.min_count == 1:
                    absent = np.flatnonzero(rows < 0)
                    rows[absent], new = self._insert(ids[absent], keys)
                elif missing:
                    rows, grads = rows[rows >= 0], grads[rows >= 0]
                grad = RowSparse(grads, rows, self._view.shape)
                self._storage.mark(rows)
                self._updater(self.name, grad, self._view)
            except BaseException:
                if len(new):
                    self._withdraw(new, high)
                raise
            index.touch(rows, (step, False))
            self.step, self._keys = step, keys

    def _insert(self, ids: Ids, keys: np.dtype[Any]) -> tuple[Rows, Rows]:
        """Create rows, with weight and state; return the row of each id, and the new rows."""
        index, high = self._index, self._index.high
        self._check_room(ids)
        with _naming(self.name):
            values = self._computed(ids, keys)
            rows, new = index.insert(ids)
            try:
                self._grow(index.high)
                self._storage.start(new, index.ids[new], self._form.start, values)
            except BaseException:
                self._withdraw(new, high)
                raise
        return rows, new

    def _computed(self, ids: Ids, keys: np.dtype[Any]) -> Array | None:
        """Initial values of distinct new ids from the user's function, if there is one."""
        if self._form.start.function is None:
            return None
        distinct = ids[np.sort(np.unique(ids, return_index=True)[1])]
        with self._access.in_function():
            return self._form.start.computed(distinct.view(keys), self.dim, self.dtype)

    def _withdraw(self, new: Rows, high: int) -> None:
        self._storage.clear(new)
        self._index.withdraw(new, high)

    def _check_room(self, ids: Ids) -> None:
        """Raise ValueError if the ids, none of which has a row, need more than `capacity` rows."""
        if len(self._index) + len(ids) > self.capacity:
            needed = len(self._index) + len(np.unique(ids))
            if needed > self.capacity:
                raise ValueError(
                    f"table {self.name!r}: ids need {needed} rows, and capacity is {self.capacity}"
                )

    def _admit(self, waiting: RowIndex, ids: Ids, keys: np.dtype[Any]) -> Rows:
        """Count ids without a row, and create rows for those that reach `min_count`."""
        unique = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        distinct, first, inverse, times = unique
        places, unknown = waiting.find(distinct)
        before = waiting.counts_at(np.maximum(places, 0), self.step)
        before[places < 0] = 0
        waits = before + times < self.min_count
        chosen = np.flatnonzero(~waits)
        chosen = chosen[np.argsort(first[chosen])]
        if len(waiting) + unknown > waiting.capacity:
            raise ValueError(
                f"table {self.name!r}: {len(waiting) + unknown} ids wait for a row, and capacity "
                f"is {waiting.capacity}"
            )
        rows, left = np.full(len(distinct), -1), ids[waits[inverse]]
        absent = places[inverse][waits[inverse]] < 0
        waiting.reserve(int((waits & (places < 0)).sum()))  # may fail: before rows are created
        if len(chosen):
            admitted, _ = self._insert(distinct[chosen], keys)
            rows[chosen] = admitted
            self._index.counts[admitted], self._index.last[admitted] = before[chosen], self.step
            waiting.remove(places[chosen][places[chosen] >= 0])
        if len(left):
            waiting.insert(left[absent])
            waiting.touch(waiting.find(left).rows, (self.step, True))
        return rows[inverse]

    def _unused(self, index: RowIndex, unused_for: int | None, count_below: float | None) -> Rows:
        """Rows that meet the conditions, in ascending order."""
        last = index.last[: index.high]
        chosen = last != FREE
        if unused_for is not None:
            chosen &= last <= self.step - unused_for
        if count_below is not None and index.rate:
            chosen &= index.counts_at(slice(index.high), self.step) < count_below
        elif count_below is not None:
            chosen &= index.counts[: index.high] < count_below
        return np.flatnonzero(chosen)

    def _decay_all(self) -> None:
        """Apply deferred decay to all rows."""
        storage = self._storage
        if self._directory is None:
            self._updater._flush(self.name, self._view)
            return
        height, storage.height = storage.height, max(storage.used, 1)
        self._show()  # rows that were never used are not in the file
        try:
            storage.mark(np.arange(storage.height))
            self._updater._flush(self.name, self._view)
        finally:
            storage.height = height
            self._show()

    # Memory and files

    def _commit(self) -> None:
        """Write the changes of a table in files."""
        if self._directory is not None:
            with uninterrupted, self._access.to_flush(), self._updater.lock:
                self._directory.flush(self._description(), self._logged)

    def _description(self) -> dict[str, Any]:
        """Fields of a table in files except its records, for the next flush."""
        storage, waiting = self._storage, self._waiting
        decay = self._updater.optimizer.row_decay.get(self.name)
        return self._settings() | {
            "flushes": self.flushes + 1,
            "high": self._index.high,
            "used": max(storage.used, self._index.high),
            "waiting": None if waiting is None else waiting.high,
            "decay": None if storage.decay is None or decay is None else decay[1],
            "record": [[dtype.name, list(shape)] for dtype, shape in storage.parts],
        }

    def _settings(self, init: Init | None = None) -> dict[str, Any]:
        """Fields of both kinds of tables: arguments, step and optimizer."""
        return {
            "embedding_table": FORMAT,
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype.name,
            "init": self._form.start.text if init is None else init,
            "seed": self._form.start.seed,
            "capacity": self._form.capacity,
            "min_count": self.min_count,
            "half_life": self.half_life,
            "id_dtype": None if self._keys is None else self._keys.name,
            "step": self.step,
            "optimizer": _alone(self._updater.optimizer),
        }

    def _logged(self) -> None:
        self.flushes += 1

    def _grow(self, rows: int) -> None:
        """Extend the updater's view of weight and state to at least `rows` rows."""
        if self._storage.grow(rows):
            self._show()

    def _show(self) -> None:
        """Pass views of weight and state up to the current height to the updater."""
        storage, optimizer = self._storage, self._updater.optimizer
        self._view = storage.weight[: storage.height]
        self._updater.states[self.name] = storage.state()
        self._updater.states_synced[self.name] = True
        if storage.decay is not None:
            total = optimizer.row_decay.get(self.name, (None, 0.0))[1]
            optimizer.row_decay[self.name] = storage.decay[: storage.height], total


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context that adds the table's name to the message of a TypeError or ValueError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {name!r}: {error}") from error


def _granted(capacity: int | None, reserve: Callable[[int], Any]) -> Any:
    """Call `reserve` with the capacity, or with as many rows as the system can reserve."""
    rows = MOST_ROWS if capacity is None else capacity
    while True:
        try:
            return reserve(rows)
        except MemoryError as error:
            if capacity is not None or rows // 2 < FEWEST:
                raise MemoryError(f"capacity of {rows} rows: {error}; pass a smaller one") from None
            rows //= 2


def _alone(optimizer: Optimizer) -> Optimizer:
    """Copy of an optimizer without its arrays of single parameters."""
    alone = copy.copy(optimizer)
    alone.row_decay, alone.masters_given = {}, {}
    return alone


def _records(index: RowIndex) -> tuple[Array, Array, Array]:
    """Copies of the ids, counts and last uses of all rows."""
    high = index.high
    ids, counts, last = (column[:high].copy() for column in (index.ids, index.counts, index.last))
    ids[last == FREE] = 0
    return ids, counts, last


def _unpickled(klass: type[EmbeddingTable], described: dict[str, Any]) -> EmbeddingTable:
    """Restore a table that was pickled or copied."""
    init = described["init"]
    return klass._restored(described, None, init if callable(init) else None)


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    result: np.dtype[Any] = (
        bfloat16() if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    )
    if kind_of(result) is None or not result.isnative:
        raise TypeError(f"dtype must be {', '.join(REALS[:-1])} or {REALS[-1]}, got {result}")
    return result
