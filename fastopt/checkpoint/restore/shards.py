"""Reading of sharded checkpoints on any number of ranks: slices are merged from the shards.

An updater without ranks reads a sharded checkpoint as the only rank. Conversely, ranks read the
file of an updater without ranks as whole states, and slice them once the weights are known.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fastopt.checkpoint.format.errors import CheckpointError, read_from, refusing
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.tree import read
from fastopt.checkpoint.restore.parameters import keys_of, match, names_of
from fastopt.checkpoint.restore.placement import Placement, placed
from fastopt.optimizer.optimizer import Array, Index, Optimizer

RUN = r"[0-9a-f]{16}"
"""Pattern of the names of runs. A run is one call of ``save()`` on all ranks."""

BY_ROW = ("row_decay",)
"""Attributes whose arrays have one number for each row of a weight."""

FIELDS = {
    "run": str,
    "ranks": int,
    "kind": str,
    "updater": dict,
    "placements": dict,
    "masters": dict,
}
"""Fields of the index file, which lists the shards."""

FROZEN = "frozen"
"""Field of an index file with weights that have no state."""


@dataclass
class Saved:
    """The part of a checkpoint that one rank loads."""

    updater: dict[str, Any]
    """Argument of :func:`fastopt.checkpoint.restore.restore.restore`."""
    weights: dict[Index, Array]
    """Slices of saved weights for this rank."""
    masters: dict[Index, Array]
    """Masters set by the user that no update has used yet."""
    placements: dict[Index, Placement] = field(default_factory=dict)
    """Placement of each parameter, by its current index."""
    cut: frozenset[Index] = frozenset()
    """Keys of parameters whose states are slices for this rank; other states are whole."""
    frozen: dict[Index, Placement] = field(default_factory=dict)
    """Placement of each weight that has no state, by its current index."""


def shard_path(path: PathLike, run: str, rank: int, ranks: int) -> Path:
    """Path of the shard of a rank."""
    return Path(f"{os.fspath(path)}.{run}.{rank}-of-{ranks}")


def read_shard(
    path: PathLike, run: str, rank: int, ranks: int, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read the shard of a rank.

    Raises
    ------
    CheckpointError, OSError
        It is missing, damaged, of another run, or cannot be read.
    """
    name = shard_path(path, run, rank, ranks)
    try:
        with open(name, "rb") as file, read_from(name):
            shard: dict[str, Any] = read(file, optimizer)
    except FileNotFoundError:
        raise CheckpointError(f"shard {rank} of {ranks} is missing: {name}") from None
    if shard["run"] != run or shard["rank"] != rank:
        raise CheckpointError(
            f"{name} is shard {shard['rank']} of run {shard['run']}, not {rank} of {run}"
        )
    return shard


def is_of_ranks(tree: Any) -> bool:
    """Whether the tree is the index file of a sharded checkpoint."""
    return isinstance(tree, dict) and "ranks" in tree


@dataclass
class Alone:
    """Adapter that presents an updater without ranks as the only rank."""

    optimizer: Optimizer
    rank: int = 0
    ranks: int = 1
    placements: Mapping[Index, Placement] = field(default_factory=dict)


def whole(optimizer: Optimizer, path: PathLike, index: Any) -> dict[str, Any]:
    """Merge a sharded checkpoint, in the form of :func:`~.restore.describe.describe`.

    Raises
    ------
    CheckpointError, OSError
        See :func:`read_saved`.
    """
    _check(index, "ShardedUpdater")
    with refusing("a checkpoint of ranks"):
        reader = _Reader(Alone(optimizer), path, index)
        tree = reader.saved().updater
    keys: Mapping[Index, Index] = tree["parameters"]
    for key, placement in reader.before.items():
        for table in tables_of(tree):
            if key in table:
                table[key] = _reshaped(table[key], placement)
        for name, table in tree["attributes"].items():
            if isinstance(table, dict) and keys[key] in table:
                change = _by_row if name in BY_ROW else _reshaped
                value = table.pop(keys[key])
                if placement.shape or name not in BY_ROW:  # a number has no rows
                    table[keys[key]] = change(value, placement)
    if index["masters"]:
        waiting = {keys[key]: array for key, array in index["masters"].items()}
        tree["attributes"]["masters_given"] = tree["attributes"]["masters_given"] | waiting
    return tree


def tables_of(tree: Mapping[str, Any]) -> list[dict[Index, Any]]:
    """Tables of a checkpoint with arrays that are split like their weights: states and averages."""
    averages = tree.get("averages", {})
    return [tree["states"], *(averages[name] for name in ("arrays", "weights") if averages)]


def _reshaped(tree: Any, placement: Placement) -> Any:
    """State whose flat arrays are reshaped to the tensor's shape."""

    def shaped(array: Array) -> Array:
        flat = placement.form == "flat" and array.shape == (placement.size,)
        return array.reshape(placement.shape) if flat else array

    return _mapped(tree, shaped)


def _by_row(tree: Any, placement: Placement) -> Any:
    """Numbers of rows; of a tensor that is split between elements, arrays have one for each."""
    rows = placement.shape[0]

    def first(array: Array) -> Array:
        if placement.form != "flat":
            return array
        return array[:: placement.size // rows] if placement.size else np.zeros(rows)

    return _mapped(tree, first)


def cut_state(
    tree: Any, placement: Placement, rank: int, context: str, by_row: bool = False
) -> Any:
    """Return a rank's slice of a whole state; `by_row`: its arrays have one number for each row.

    Rows of a tensor that is split between elements have one for each element.

    Raises
    ------
    CheckpointError
        An array of the state cannot be sliced like the tensor.
    """
    rows = placement.shape[:1]

    def cut(array: Array) -> Array:
        if by_row and placement.form == "flat":
            array = array.repeat(placement.size // max(len(array), 1)).reshape(placement.shape)
        if array.shape == placement.shape:
            return placement.slice_of(array.reshape(-1), rank).copy()
        if placement.form == "rows" and array.shape[:1] == rows:
            first, last = (at // placement.unit for at in placement.part(rank))
            return array[first:last].copy()
        if placement.form == "whole" or array.ndim == 0:
            return array
        raise CheckpointError(
            f"{context}: the checkpoint has an array of shape {array.shape} for a weight of shape "
            f"{placement.shape}"
        )

    return _mapped(tree, cut)


def _mapped(tree: Any, change: Callable[[Array], Array]) -> Any:
    if isinstance(tree, np.ndarray):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(part, change) for part in tree])
    return tree


def read_saved(sharded: Any, path: PathLike, kind: str) -> tuple[str, Saved]:
    """Return the run name of a checkpoint, and the part of it that this rank loads.

    For the file of an updater without ranks, states are whole and the name is a digest of the
    file's header, which contains checksums of all arrays.

    Raises
    ------
    CheckpointError, OSError
        A file is missing, damaged, of another run or kind, or cannot be read.
    """
    with read_from(path):
        with open(path, "rb") as file:
            index = read(file, sharded.optimizer)
            file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            header = hashlib.blake2b(file.read(size), digest_size=8).hexdigest()
        if kind == "ShardedUpdater" and not is_of_ranks(index):
            return header, _of_one(index)
        _check(index, kind)
        with refusing("a checkpoint of ranks"):
            return index["run"], _Reader(sharded, path, index).saved()


def _of_one(tree: Any) -> Saved:
    """Convert the checkpoint of an updater without ranks; :func:`~.restore.restore` checks it."""
    masters = {}
    if isinstance(tree, dict) and isinstance(tree.get("attributes"), dict):
        masters = tree["attributes"].pop("masters_given", {})
        tree["attributes"]["masters_given"] = {}
    return Saved(tree, {}, masters if isinstance(masters, dict) else {})


def _check(index: Any, kind: str) -> None:
    if not is_of_ranks(index) or set(index) | {FROZEN} != {*FIELDS, FROZEN}:
        raise CheckpointError("not a checkpoint of ranks, which ShardedUpdater.save makes")
    for name, expected in FIELDS.items():
        if not isinstance(index[name], expected):
            raise CheckpointError(f"{name!r} is of type {type(index[name]).__name__}")
    if not isinstance(index.get(FROZEN, {}), dict):
        raise CheckpointError(f"{FROZEN!r} is of type {type(index[FROZEN]).__name__}")
    if not re.fullmatch(RUN, index["run"]):
        raise CheckpointError(f"a run cannot be named {index['run']!r}")
    if index["kind"] != kind:
        raise CheckpointError(f"it was saved from {index['kind']}, this is {kind}")


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(**{**fields, "shape": tuple(fields["shape"])})


class _Reader:
    """Merges the slices of one rank from shards that any number of ranks wrote."""

    def __init__(self, sharded: Any, path: PathLike, index: dict[str, Any]) -> None:
        self.rank: int = sharded.rank
        self.path, self.run, self.ranks = path, index["run"], index["ranks"]
        self.index = index
        self.before = {key: _placement(fields) for key, fields in index["placements"].items()}
        self.after = self._after(sharded)
        frozen = {key: dict(fields) for key, fields in index.get(FROZEN, {}).items()}
        indices = {key: fields.pop("index") for key, fields in frozen.items()}
        present = keys_of(names_of(sharded.optimizer), sharded.placements)
        known = match(indices, present).index
        self.frozen = {key: known[i] for key, i in indices.items() if i in known}
        """Current index of each weight without a state, by its key."""
        without = {key: _placement(frozen[key]) for key in self.frozen}
        self.before_all = self.before | without
        self.after_all = self.after | self._anew(sharded, without)
        self.shard = cache(self._shard)

    def _after(self, sharded: Any) -> dict[Index, Placement]:
        """Placement of each saved parameter on the current ranks."""
        placements = self._anew(sharded, self.before)
        optimizer = sharded.optimizer
        present = keys_of(names_of(optimizer), sharded.placements)
        saved = self.index["updater"]["parameters"]
        self.found = match(saved, present).index
        for key in placements:
            now = sharded.placements.get(self.found.get(saved[key]))
            if now is not None:
                if (now.shape, now.dtype, now.form) != (
                    placements[key].shape,
                    placements[key].dtype,
                    placements[key].form,
                ):
                    raise CheckpointError(
                        f"parameter {key!r} was saved with shape {placements[key].shape} and "
                        f"{placements[key].dtype}, it has {now.shape} and {now.dtype} now"
                    )
                placements[key] = now
        return placements

    def _anew(self, sharded: Any, before: Mapping[Index, Placement]) -> dict[Index, Placement]:
        """Placements on the current ranks of what the saved ranks had."""
        lines = [(k, p.shape, p.dtype, p.form) for k, p in before.items()]
        return dict(before) if sharded.ranks == self.ranks else placed(lines, sharded.ranks)

    def _shard(self, rank: int) -> dict[str, Any]:
        return read_shard(self.path, self.run, rank, self.ranks)

    def saved(self) -> Saved:
        """The part of the checkpoint that this rank loads."""
        self.shard(min(self.rank, self.ranks - 1))  # detect missing shards even if not needed
        updater = self.index["updater"]
        keys: Mapping[Index, Index] = updater["parameters"]
        states: dict[Index, Any] = dict(updater["states"])
        weights: dict[Index, Array] = {}
        attributes = dict(updater["attributes"])
        given = updater.get("averages", {})
        averages = {name: dict(given[name]) for name in ("arrays", "weights") if given}
        for key in self.before:
            sources, index = list(self._sources(key)), keys[key]
            names = dict.fromkeys(name for shard, *_ in sources for name in shard["attributes"])
            for name in names:
                table = attributes[name] = dict(attributes.get(name, {}))
                table |= _taken(sources, ("attributes", name), index, index)
            states |= _taken(sources, ("states",), key, key)
            for name, own in averages.items():
                own |= _taken(sources or self._without(key), ("averages", name), key, key)
            if index in self.found and (weight := self._weight(key)) is not None:
                weights[self.found[index]] = weight
        for key, now in self.frozen.items():
            if (weight := self._weight(key)) is not None:
                weights[now] = weight
        whole = {**updater, "attributes": attributes, "states": states}
        if given:
            whole["averages"] = {**given, **averages}
        found = {keys[key]: key for key in self.before if keys[key] in self.found}
        return Saved(
            whole,
            weights,
            {self.found[keys[k]]: a for k, a in self.index["masters"].items()},
            {self.found[index]: self.after[key] for index, key in found.items()},
            frozenset(self.before),
            {now: self.after_all[key] for key, now in self.frozen.items()},
        )

    def _without(self, key: Index) -> list[tuple[dict[str, Any], int, int, int]]:
        """Source of no elements of a tensor that other ranks have; every shard has its average."""
        shard, shape = (
            self.shard(min(self.rank, self.ranks - 1)),
            self.after[key].slice_shape(self.rank),
        )
        averages = {
            name: {key: table[key].reshape(-1)[:0].reshape(shape)} if key in table else {}
            for name, table in shard.get("averages", {}).items()
        }
        return [({"averages": averages}, 0, 0, 0)]

    def _owners(self, key: Index) -> list[tuple[int, int, int]]:
        """Rank, start and stop of the saved slices that overlap this rank's slice."""
        first, last = self.after_all[key].part(self.rank)
        return [o for o in self.before_all[key].owners(self.ranks) if o[1] < last and o[2] > first]

    def _weight(self, key: Index) -> Array | None:
        """Slice of a weight for this rank; None if the weight was not saved.

        Every shard has a slice of each saved weight, perhaps an empty one.
        """
        first, last = self.after_all[key].part(self.rank)
        owners = self._owners(key) or [(min(self.rank, self.ranks - 1), 0, 0)]
        slices = [(self.shard(rank)["weights"], begin) for rank, begin, _ in owners]
        if not all(key in weights for weights, _ in slices):
            return None
        parts = [w[key].reshape(-1)[max(first - at, 0) : last - at] for w, at in slices]
        merged: Array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return merged.reshape(self.after_all[key].slice_shape(self.rank))

    def _sources(self, key: Index) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Shards with parts of this rank's slice: shard, length, start and stop.

        `length` is the length of the shard's slice, `start` and `stop` the part of it to use, all
        in units of the first axis of a state: elements or rows.
        """
        before, after = self.before[key], self.after[key]
        first, last = after.part(self.rank)
        owners = self._owners(key)
        if before.form == "whole":
            for rank, *_ in owners:
                yield self.shard(rank), 1, 0, 1
            return
        if not owners:  # read the state of a parameter without elements from some shard
            rank = min(self.rank, self.ranks - 1)
            owners = [(rank, *before.part(rank))]
        for rank, begin, end in owners:
            ends = (min(max(at, begin), end) - begin for at in (first, last))
            start, stop = (at // before.unit for at in ends)
            yield self.shard(rank), (end - begin) // before.unit, start, stop


def _taken(
    sources: list[tuple[dict[str, Any], int, int, int]], where: Sequence[str], key: Index, to: Index
) -> dict[Index, Any]:
    """Merge the shards' values of `key` in the table at path `where`; return them as key `to`."""
    parts: list[tuple[Any, int, int, int]] = []
    for shard, *numbers in sources:
        table: Any = reduce(lambda tree, name: tree.get(name, {}), where, shard)
        if key not in table:
            return {}
        parts.append((table[key], *numbers))
    return {to: _merged(parts, f"parameter {key!r}")} if parts else {}


def _merged(parts: list[tuple[Any, int, int, int]], context: str) -> Any:
    """Merge the parts ``tree, length, start, stop``; arrays of that length are concatenated."""
    first = parts[0][0]
    if isinstance(first, np.ndarray):
        return _joined(parts, context)
    if isinstance(first, Mapping):
        return {key: _merged([(t[key], *part) for t, *part in parts], context) for key in first}
    if isinstance(first, (tuple, list)):
        inner = [_merged([(t[k], *p) for t, *p in parts], context) for k in range(len(first))]
        return type(first)(inner)
    return first


def _joined(parts: list[tuple[Array, int, int, int]], context: str) -> Array:
    if len(parts) == 1 and parts[0][1:] == (parts[0][1], 0, parts[0][1]):
        return parts[0][0]
    if all(array.ndim and len(array) == length for array, length, _, _ in parts):
        return np.concatenate([array[start:stop] for array, _, start, stop in parts])
    first = parts[0][0]
    if first.ndim == 0:
        return first
    raise CheckpointError(
        f"{context} has an array of shape {first.shape} that is not cut like its slice; load it "
        "with as many ranks as there were"
    )
