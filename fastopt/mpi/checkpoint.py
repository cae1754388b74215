"""Checkpoints of sharded updaters and tables: a file for each rank, then one that lists them."""

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fastopt.checkpoint.describe import describe
from fastopt.checkpoint.errors import CheckpointError, read_from
from fastopt.checkpoint.files import PathLike, write_atomically
from fastopt.checkpoint.parameters import keys_of, match, names_of
from fastopt.checkpoint.tree import chunks, read
from fastopt.mpi.placement import Placement, placed
from fastopt.optimizer.base import Array, Index

__all__ = ["Saved", "new_run", "read_saved", "remove_others", "write_index", "write_shard"]

FIELDS = {
    "run": str,
    "ranks": int,
    "kind": str,
    "updater": dict,
    "placements": dict,
    "masters": dict,
}
"""What the file that lists the others holds."""


@dataclass
class Saved:
    """What one rank takes up of a checkpoint."""

    updater: dict[str, Any]
    """For :func:`fastopt.checkpoint.restore.restore`."""
    weights: dict[Index, Array]
    """Weights that live on one rank each."""
    masters: dict[Index, Array]
    """Masters that no update has taken over yet."""
    placements: dict[Index, Placement] = field(default_factory=dict)
    """Placement of each parameter, by its present index."""


def shard_path(path: PathLike, run: str, rank: int, ranks: int) -> Path:
    """Where the shard of a rank is."""
    return Path(f"{os.fspath(path)}.{run}.{rank}-of-{ranks}")


def new_run() -> str:
    """Name that tells the files of one checkpoint from those of others."""
    return secrets.token_hex(8)


def write_shard(sharded: Any, path: PathLike, run: str, weights: Mapping[Index, Array]) -> None:
    """Write what this rank alone has."""
    keys, states = _keys(sharded), sharded.states
    shard = {
        "run": run,
        "rank": sharded.rank,
        "states": {key: states[i] for key, i in keys.items() if i in states},
        "attributes": _cut(describe(sharded.shard)["attributes"]),
        "weights": {key: weights[i] for key, i in keys.items() if i in weights},
    }
    write_atomically(shard_path(path, run, sharded.rank, sharded.ranks), chunks(shard))


def write_index(
    sharded: Any, path: PathLike, run: str, kind: str, masters: Mapping[Index, Array]
) -> None:
    """Write what all ranks have in common, once their shards are there."""
    whole, keys = describe(sharded.shard), _keys(sharded)
    cut = _cut(whole["attributes"])
    common = {name: value for name, value in whole["attributes"].items() if name not in cut}
    placements = sharded.placements
    index = {
        "run": run,
        "ranks": sharded.ranks,
        "kind": kind,
        "updater": {**whole, "attributes": common, "parameters": keys, "states": {}},
        "placements": {k: asdict(placements[i]) for k, i in keys.items() if i in placements},
        "masters": {key: masters[i] for key, i in keys.items() if i in masters},
    }
    write_atomically(path, chunks(index))


def _keys(sharded: Any) -> dict[Index, Index]:
    """Index of each parameter by its key."""
    optimizer = sharded.optimizer
    known = [*sharded.placements, *optimizer._index_update_count, *sharded._masters]
    return keys_of(names_of(optimizer), known)


def remove_others(path: PathLike, run: str) -> None:
    """Remove the shards of earlier checkpoints, which the index does not list any more."""
    target = Path(path)
    pattern = re.compile(re.escape(target.name) + r"\.([0-9a-f]{16})\.\d+-of-\d+")
    for file in target.parent.iterdir():
        found = pattern.fullmatch(file.name)
        if found and found[1] != run:
            file.unlink(missing_ok=True)


def _cut(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that hold arrays by index: each rank has those of its own slices."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, Mapping) and any(map(_has_array, value.values()))
    }


def _has_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_array, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_has_array, value))
    return isinstance(value, np.ndarray)


def read_saved(sharded: Any, path: PathLike, kind: str) -> tuple[str, Saved]:
    """Name of the run of a checkpoint, and what this rank takes up of it.

    Raises
    ------
    CheckpointError, OSError
        A file is missing, damaged, of another run or kind, or cannot be read.
    """
    with read_from(path):
        with open(path, "rb") as file:
            index = read(file)
        _check(index, kind)
        reader = _Reader(sharded, path, index)
        try:
            return index["run"], reader.saved()
        except (CheckpointError, OSError, MemoryError):
            raise
        except Exception as error:  # whatever else foreign numbers lead to
            raise CheckpointError(f"not a checkpoint of ranks: {error!r}") from error


def _check(index: Any, kind: str) -> None:
    if not isinstance(index, dict) or set(index) != set(FIELDS):
        raise CheckpointError("not a checkpoint of ranks, which ShardedUpdater.save makes")
    for name, expected in FIELDS.items():
        if not isinstance(index[name], expected):
            raise CheckpointError(f"{name!r} is of type {type(index[name]).__name__}")
    if index["kind"] != kind:
        raise CheckpointError(f"it was saved from {index['kind']}, this is {kind}")


class _Reader:
    """Puts slices for one rank together from the shards of as many ranks as there were."""

    def __init__(self, sharded: Any, path: PathLike, index: dict[str, Any]) -> None:
        self.rank: int = sharded.rank
        self.path, self.run, self.ranks = path, index["run"], index["ranks"]
        self.index = index
        self.before = {
            key: Placement(**{**fields, "shape": tuple(fields["shape"])})
            for key, fields in index["placements"].items()
        }
        self.after = self._after(sharded)
        self.shard = cache(self._shard)

    def _after(self, sharded: Any) -> dict[Index, Placement]:
        """Placement of each saved parameter now."""
        lines = [(k, p.shape, p.dtype, p.form) for k, p in self.before.items()]
        same = sharded.ranks == self.ranks
        made = dict(self.before) if same else placed(lines, sharded.ranks)
        optimizer = sharded.optimizer
        present = keys_of(names_of(optimizer), sharded.placements)
        saved = self.index["updater"]["parameters"]
        self.found = match(saved, present).index
        for key in made:
            now = sharded.placements.get(self.found.get(saved[key]))
            if now is not None:
                if (now.shape, now.dtype, now.form) != (
                    made[key].shape,
                    made[key].dtype,
                    made[key].form,
                ):
                    raise CheckpointError(
                        f"parameter {key!r} was saved with shape {made[key].shape} and "
                        f"{made[key].dtype}, it has {now.shape} and {now.dtype} now"
                    )
                made[key] = now
        return made

    def _shard(self, rank: int) -> dict[str, Any]:
        path = shard_path(self.path, self.run, rank, self.ranks)
        try:
            with open(path, "rb") as file, read_from(path):
                shard: dict[str, Any] = read(file)
        except FileNotFoundError:
            raise CheckpointError(f"shard {rank} of {self.ranks} is missing: {path}") from None
        if shard["run"] != self.run or shard["rank"] != rank:
            raise CheckpointError(
                f"{path} is shard {shard['rank']} of run {shard['run']}, not {rank} of {self.run}"
            )
        return shard

    def saved(self) -> Saved:
        """All that this rank takes up."""
        self.shard(min(self.rank, self.ranks - 1))  # so that a shard without use is missed too
        updater = self.index["updater"]
        keys: Mapping[Index, Index] = updater["parameters"]
        states: dict[Index, Any] = {}
        weights: dict[Index, Array] = {}
        attributes = dict(updater["attributes"])
        for key in self.before:
            sources, index = list(self._sources(key)), keys[key]
            names = dict.fromkeys(name for shard, *_ in sources for name in shard["attributes"])
            for name in names:
                table = attributes[name] = dict(attributes.get(name, {}))
                table |= _taken(sources, ("attributes", name), index, index)
            states |= _taken(sources, ("states",), key, key)
            if index in self.found:
                weights |= _taken(sources, ("weights",), key, self.found[index])
        whole = {**updater, "attributes": attributes, "states": states}
        found = {keys[key]: key for key in self.before if keys[key] in self.found}
        return Saved(
            whole,
            weights,
            {self.found[keys[k]]: a for k, a in self.index["masters"].items()},
            {self.found[index]: self.after[key] for index, key in found.items()},
        )

    def _sources(self, key: Index) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Shards with parts of a slice, how long theirs are, and what to take of them.

        Lengths count what the first axis of a state counts: elements or rows.
        """
        before, after = self.before[key], self.after[key]
        first, last = after.part(self.rank)
        owners = [o for o in before.owners(self.ranks) if o[1] < last and o[2] > first]
        if before.form == "whole":
            for rank, *_ in owners:
                yield self.shard(rank), 1, 0, 1
            return
        if not owners:  # a state without elements is like any other
            rank = min(self.rank, self.ranks - 1)
            owners = [(rank, *before.part(rank))]
        for rank, begin, end in owners:
            ends = (min(max(at, begin), end) - begin for at in (first, last))
            start, stop = (at // before.unit for at in ends)
            yield self.shard(rank), (end - begin) // before.unit, start, stop


def _taken(
    sources: list[tuple[dict[str, Any], int, int, int]], where: Sequence[str], key: Index, to: Index
) -> dict[Index, Any]:
    """What shards have under `key` in one of their tables, put together, under the key `to`."""
    parts: list[tuple[Any, int, int, int]] = []
    for shard, *numbers in sources:
        table: Any = reduce(lambda tree, name: tree.get(name, {}), where, shard)
        if key not in table:
            return {}
        parts.append((table[key], *numbers))
    return {to: _merged(parts, f"parameter {key!r}")} if parts else {}


def _merged(parts: list[tuple[Any, int, int, int]], words: str) -> Any:
    """One tree of the parts ``tree, length, start, stop``: arrays of that length are cut."""
    first = parts[0][0]
    if isinstance(first, np.ndarray):
        return _joined(parts, words)
    if isinstance(first, Mapping):
        return {key: _merged([(t[key], *part) for t, *part in parts], words) for key in first}
    if isinstance(first, (tuple, list)):
        inner = [_merged([(t[k], *p) for t, *p in parts], words) for k in range(len(first))]
        return type(first)(inner)
    return first


def _joined(parts: list[tuple[Array, int, int, int]], words: str) -> Array:
    if len(parts) == 1 and parts[0][1:] == (parts[0][1], 0, parts[0][1]):
        return parts[0][0]
    if all(array.ndim and len(array) == length for array, length, _, _ in parts):
        return np.concatenate([array[start:stop] for array, _, start, stop in parts])
    first = parts[0][0]
    if first.ndim == 0:
        return first
    raise CheckpointError(
        f"{words} has an array of shape {first.shape} that is not cut like its slice; load it with "
        "as many ranks as there were"
    )
