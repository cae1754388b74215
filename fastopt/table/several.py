"""Lookups and updates of several tables in one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from numpy.typing import ArrayLike

from fastopt.arguments import brief, flag
from fastopt.table.directory import Array
from fastopt.table.embedding import EmbeddingTable

Tables = Mapping[str, EmbeddingTable]
PerTable = Mapping[str, ArrayLike]


def lookup(tables: Tables, ids: PerTable, create: bool = True) -> dict[str, Array]:
    """Return the rows of ids from several tables, like :meth:`EmbeddingTable.lookup` for each.

    Parameters
    ----------
    tables : mapping of str to EmbeddingTable
        The tables, all different.
    ids : mapping of str to array_like of int
        Ids for some or all tables, by name.
    create : bool
        See :meth:`EmbeddingTable.lookup`. Default True.

    Returns
    -------
    dict of str to numpy.ndarray
        A row for each id, by name.

    Raises
    ------
    TypeError, ValueError
        `ids` has the name of no table, or ids are invalid. The ids of all tables are checked before
        any table changes.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt.table
    >>> tables = {n: fastopt.EmbeddingTable(2, "adam", name=n) for n in ("users", "items")}
    >>> batch = {"users": np.array([7, 9]), "items": np.array([[1, 2], [3, 1]])}
    >>> rows = fastopt.table.lookup(tables, batch)
    >>> rows["users"].shape, rows["items"].shape
    ((2, 2), (2, 2, 2))
    >>> fastopt.table.update(tables, batch, rows)
    >>> [len(table) for table in tables.values()]
    [2, 3]
    """
    _check(tables, ids)
    with _locked([tables[name] for name in ids], flag("create", create)):
        for name, some in ids.items():
            bits, *_ = tables[name]._checked_ids(some)
            if create and tables[name].min_count == 1:
                tables[name]._check_room(bits[tables[name]._index.find(bits).rows < 0])
        return {name: tables[name]._lookup(some, create) for name, some in ids.items()}


def update(tables: Tables, ids: PerTable, grads: PerTable) -> None:
    """Update rows of several tables, like :meth:`EmbeddingTable.update` for each.

    Parameters
    ----------
    tables : mapping of str to EmbeddingTable
        The tables, all different.
    ids : mapping of str to array_like of int
        Ids for some or all tables, by name.
    grads : mapping of str to numpy.ndarray
        Gradients of the ids, with the same names.

    Raises
    ------
    TypeError, ValueError
        `ids` has the name of no table, or ids or gradients are invalid. The arguments of all tables
        are checked before any table changes.
    """
    _check(tables, ids)
    if not isinstance(grads, Mapping) or grads.keys() != ids.keys():
        got = sorted(grads) if isinstance(grads, Mapping) else brief(grads)
        raise ValueError(f"grads must have the names of ids, {sorted(ids)}, got {got}")
    with _locked([tables[name] for name in ids], True):
        calls = []
        for name, some in ids.items():
            table = tables[name]
            bits, keys, values = table._checked_update(some, grads[name])
            if table.min_count == 1:
                table._check_room(bits[table._index.find(bits).rows < 0])
            calls.append((table, bits, keys, values))
        for table, bits, keys, values in calls:
            table._update(bits, keys, values)


def _check(tables: Tables, ids: PerTable) -> None:
    for name, mapping in (("tables", tables), ("ids", ids)):
        if not isinstance(mapping, Mapping):
            raise TypeError(f"{name} must be a mapping by name, got {brief(mapping)}")
    for name, table in tables.items():
        if not isinstance(table, EmbeddingTable):
            raise TypeError(f"tables[{name!r}] must be an EmbeddingTable, got {brief(table)}")
    if len({*map(id, tables.values())}) < len(tables):
        raise ValueError("tables must be different, one is under two names")
    if extra := sorted(ids.keys() - tables.keys()):
        raise ValueError(f"ids are for tables {extra}, and tables has {sorted(tables)}")


@contextmanager
def _locked(tables: Sequence[EmbeddingTable], change: bool) -> Iterator[None]:
    """Context that holds the locks of tables, acquired in a fixed order to avoid deadlocks."""
    with ExitStack() as stack:
        for table in sorted(tables, key=id):
            stack.enter_context(table.lock)
            stack.enter_context(table._access.to_call(change))
        yield
