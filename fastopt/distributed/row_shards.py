"""Checkpoints of embedding tables whose rows are distributed over ranks."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._kernels.hashing import FREE
from fastopt.checkpoint.format.errors import CheckpointError, read_from
from fastopt.checkpoint.format.files import PathLike, write_atomically, write_part
from fastopt.checkpoint.format.tree import chunks, read
from fastopt.checkpoint.restore.shards import RUN, read_shard, shard_path
from fastopt.optimizer import Optimizer
from fastopt.table import EmbeddingTable
from fastopt.table.index import Ids

__all__ = ["read_rows", "write_rows", "write_rows_index"]

Array = np.ndarray[Any, Any]
Owners = Callable[[Ids], NDArray[np.int64]]
KIND = "ShardedEmbeddingTable"


def write_rows(path: PathLike, run: str, rank: int, ranks: int, table: EmbeddingTable) -> None:
    """Write the shard of a rank: all rows of its table."""
    shard = {"run": run, "rank": rank, "table": table._described()}
    write_part(shard_path(path, run, rank, ranks), path, chunks(shard))


def write_rows_index(path: PathLike, run: str, ranks: int) -> None:
    """Write the index file, which lists the shards."""
    write_atomically(path, chunks({"run": run, "ranks": ranks, "kind": KIND}))


def read_rows(
    path: PathLike, rank: int, ranks: int, owners: Owners, optimizer: Optimizer | None
) -> tuple[str, dict[str, Any]]:
    """Return the name of a run, and fields of a table with the rows that `rank` owns.

    For the file of :meth:`EmbeddingTable.save`, the name is empty. One shard is read at a time.

    Raises
    ------
    CheckpointError, OSError
        A file is missing, damaged, of another run or kind, or cannot be read.
    """
    with read_from(path), open(path, "rb") as file:
        index = read(file, optimizer)
    try:
        if isinstance(index, dict) and "embedding_table" in index:
            return "", index if ranks == 1 else _merged(iter([index]), rank, owners)
        run, before = _checked(index)
        if before == ranks:
            return run, read_shard(path, run, rank, before, optimizer)["table"]
        shards = (read_shard(path, run, k, before, optimizer)["table"] for k in range(before))
        return run, _merged(shards, rank, owners)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # an invalid checkpoint can raise anything
        raise CheckpointError(f"{path}: not a checkpoint of a table: {error!r}") from error


def _checked(index: Any) -> tuple[str, int]:
    """Name of the run and number of ranks, from an index file."""
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise CheckpointError(f"not a checkpoint of a table, which {KIND}.save() makes")
    run, ranks = index["run"], index["ranks"]
    if not isinstance(ranks, int) or ranks < 1 or not re.fullmatch(RUN, run):
        raise CheckpointError(f"a run cannot be named {run!r} with {ranks!r} ranks")
    return run, ranks


def _merged(shards: Iterator[dict[str, Any]], rank: int, owners: Owners) -> dict[str, Any]:
    """Fields of a table with the rows of all shards that a rank owns, in order."""
    parts = []
    for fields in shards:
        chosen = _owned(fields["ids"], rank, owners)
        part = dict(fields)
        part["ids"] = tuple(array[chosen] for array in fields["ids"])
        part["weight"] = fields["weight"][chosen]
        part["state"] = [array[chosen] for array in fields["state"]]
        if (waiting := fields["waiting"]) is not None:
            own = _owned(waiting, rank, owners)
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


def _owned(records: tuple[Array, ...], rank: int, owners: Owners) -> NDArray[np.int64]:
    """Positions of the records in use whose ids a rank owns."""
    ids, _, last = records
    return np.flatnonzero((last != FREE) & (owners(ids) == rank))
