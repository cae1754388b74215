"""Checkpoints of embedding tables whose rows are distributed over ranks."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.hashing import FREE
from fastopt.checkpoint.format.errors import CheckpointError, read_from, refusing
from fastopt.checkpoint.format.files import PathLike, write_atomically, write_part
from fastopt.checkpoint.format.tree import chunks, read
from fastopt.checkpoint.restore.shards import RUN, read_shard, shard_path
from fastopt.distributed.collectives import of_all
from fastopt.distributed.ranks import Ranks
from fastopt.distributed.rows import Routes
from fastopt.optimizer import Optimizer
from fastopt.table import EmbeddingTable
from fastopt.table.index import Ids
from fastopt.table.saved import checked

Array = np.ndarray[Any, Any]
Owners = Callable[[Ids], NDArray[np.int64]]
Choice = Callable[[tuple[Array, ...]], NDArray[np.int64]]
KIND = "ShardedEmbeddingTable"


def write_rows(path: PathLike, run: str, rank: int, ranks: int, table: EmbeddingTable) -> None:
    """Write the shard of a rank: all rows of its table."""
    shard = {"run": run, "rank": rank, "table": table._described()}
    write_part(shard_path(path, run, rank, ranks), path, chunks(shard))


def write_rows_index(path: PathLike, run: str, ranks: int) -> None:
    """Write the index file, which lists the shards."""
    write_atomically(path, chunks({"run": run, "ranks": ranks, "kind": KIND}))


def read_rows(
    path: PathLike, rank: int, ranks: int, owners: Owners, optimizer: Optimizer | None, init: Any
) -> tuple[str, dict[str, Any], str]:
    """Return the name of a run, fields of a table, and a description of their arrays.

    If the description is empty, the fields have the rows that `rank` owns. Otherwise it must be
    equal on all ranks, and the rows are those of some shards, for :func:`share_rows`: each shard is
    read by one rank, one at a time. For a file of :meth:`EmbeddingTable.save`, the name is empty.

    Raises
    ------
    CheckpointError, OSError
        A file is missing, damaged, of another run or kind, or cannot be read.
    """
    with read_from(path), open(path, "rb") as file:
        index = read(file, optimizer)
    with refusing(f"{path}: not a checkpoint of a table: "):
        if isinstance(index, dict) and "embedding_table" in index:

            def own(records: tuple[Array, ...]) -> NDArray[np.int64]:
                used = _used(records)
                chosen: NDArray[np.int64] = used[owners(records[0][used]) == rank]
                return chosen

            return "", index if ranks == 1 else _merged(iter([index]), own), ""
        run, before = _checked(index)
        if before == ranks:
            return run, read_shard(path, run, rank, before, optimizer)["table"], ""
        first, last = (before * k // ranks for k in (rank, rank + 1))
        numbers = range(first, last) or [first]  # without rows, for the other fields
        shards = (read_shard(path, run, k, before, optimizer)["table"] for k in numbers)
        fields = _merged(shards, _used if first < last else _none)
        checked(fields, optimizer, init)
        return run, fields, _described(fields)


def _described(fields: dict[str, Any]) -> str:
    """Dtypes of the arrays of checked fields, and shapes of their rows."""
    waiting = fields["waiting"] or ()
    arrays = [*fields["ids"], fields["weight"], *fields["state"], *waiting]
    rows = len(fields["weight"])
    if any(len(array) != rows for array in fields["state"]):
        raise CheckpointError(f"state must have {rows} rows")
    return str([(array.dtype.name, array.shape[1:]) for array in arrays])


def share_rows(ranks: Ranks, fields: dict[str, Any], owners: Owners) -> dict[str, Any]:
    """Send all rows to the ranks that own them; return the fields of those of this rank."""
    ids, state, waiting, decay = (fields[k] for k in ("ids", "state", "waiting", "decay"))
    totals = of_all(ranks, np.array([np.nan if decay is None else decay[1]]))
    known = totals[~np.isnan(totals)].tolist()
    rows = [*ids, fields["weight"], *state]
    if known:
        rows.append(np.zeros(len(ids[0])) if decay is None else decay[0])
    rows = _to_owners(ranks, rows, owners)
    shared = {
        **fields,
        "ids": tuple(rows[:3]),
        "weight": rows[3],
        "state": rows[4 : 4 + len(state)],
        "decay": (rows[-1], known[0]) if known else None,
    }
    if waiting is not None:
        shared["waiting"] = tuple(_to_owners(ranks, waiting, owners))
    return shared


def _to_owners(ranks: Ranks, arrays: Sequence[Array], owners: Owners) -> list[Array]:
    """Send the rows of arrays, the first of which has their ids; they come in rank order."""
    routes = Routes(ranks, [owners(arrays[0])])
    return [came for (came,) in routes.there(*([array] for array in arrays))]


def _checked(index: Any) -> tuple[str, int]:
    """Name of the run and number of ranks, from an index file."""
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise CheckpointError(f"not a checkpoint of a table, which {KIND}.save() makes")
    run, ranks = index["run"], index["ranks"]
    if not isinstance(ranks, int) or ranks < 1 or not re.fullmatch(RUN, run):
        raise CheckpointError(f"a run cannot be named {run!r} with {ranks!r} ranks")
    return run, ranks


def _merged(shards: Iterator[dict[str, Any]], choose: Choice) -> dict[str, Any]:
    """Fields of a table with the chosen rows of all shards, in order."""
    parts = []
    for fields in shards:
        chosen = choose(fields["ids"])
        part = dict(fields)
        part["ids"] = tuple(array[chosen] for array in fields["ids"])
        part["weight"] = fields["weight"][chosen]
        part["state"] = [array[chosen] for array in fields["state"]]
        if (waiting := fields["waiting"]) is not None:
            own = choose(waiting)
            part["waiting"] = tuple(array[own] for array in waiting)
        if (decay := fields["decay"]) is not None:
            part["decay"] = decay[0][chosen], decay[1]
        parts.append(part)

    def joined(name: str) -> Iterator[Array]:
        return map(np.concatenate, zip(*(part[name] for part in parts), strict=True))

    merged = dict(parts[0])
    merged["ids"], merged["state"] = tuple(joined("ids")), list(joined("state"))
    merged["weight"] = np.concatenate([part["weight"] for part in parts])
    if merged["waiting"] is not None:
        merged["waiting"] = tuple(joined("waiting"))
    decays = [part["decay"] for part in parts if part["decay"] is not None]
    if decays:
        merged["decay"] = np.concatenate([rows for rows, _ in decays]), decays[0][1]
    return merged


def _used(records: tuple[Array, ...]) -> NDArray[np.int64]:
    """Positions of the records in use."""
    return np.flatnonzero(records[2] != FREE)


def _none(records: tuple[Array, ...]) -> NDArray[np.int64]:
    return np.empty(0, np.int64)
