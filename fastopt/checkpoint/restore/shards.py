"""Placement of tensors on ranks, and the files of a checkpoint that has one for each rank."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fastopt._engine.validate import mapped
from fastopt.checkpoint.format.errors import CheckpointError, check_types, read_from, refusing
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.tree import read
from fastopt.checkpoint.restore.parameters import Keys, keys_of, match, names_of
from fastopt.optimizer.optimizer import Array, Index, Optimizer

LINE = 1 << 22
"""Bytes of gradients in a line, which are sent together."""

LINE_OF_RANK = 1 << 18
"""Bytes of a line for each rank: with smaller shares, latency dominates the transfer time."""

MOST = 1 << 30
"""Limit on the bytes of a line, for any number of ranks."""

Form = Literal["flat", "rows", "whole"]
"""How a tensor can be split: between elements, between rows, or not at all, with one owner."""


@dataclass(frozen=True)
class Placement:
    """Position of a tensor in a line of elements that is split into equal shares, one per rank.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor.
    dtype : str
        Dtype of the tensor.
    form : {'flat', 'rows', 'whole'}
        How the tensor can be split.
    position : int
        Position of its first element in the line.
    share : int
        Number of elements in a share.

    Examples
    --------
    >>> from fastopt.checkpoint.restore.shards import Placement
    >>> placement = Placement((4, 3), "float32", "flat", position=5, share=10)
    >>> [placement.part(rank) for rank in range(3)]
    [(0, 5), (5, 12), (12, 12)]
    """

    shape: tuple[int, ...]
    dtype: str
    form: Form
    position: int
    share: int

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def unit(self) -> int:
        """Number of elements in an indivisible unit."""
        lengths = {"flat": (), "rows": self.shape[1:], "whole": self.shape}[self.form]
        return max(math.prod(lengths), 1)

    def cut(self, rank: int) -> int:
        """Number of elements on the ranks before `rank`."""
        before = min(max(rank * self.share - self.position, 0), self.size)
        return before // self.unit * self.unit

    def part(self, rank: int) -> tuple[int, int]:
        """Start and stop of a rank's slice."""
        return self.cut(rank), self.cut(rank + 1)

    def has_state(self, rank: int) -> bool:
        """Whether a rank has state of the tensor; that of an unsplit tensor is on its owner."""
        first, last = self.part(rank)
        return self.form != "whole" or first < last

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's slice."""
        return self._shape_of(*self.part(rank))

    def _shape_of(self, first: int, last: int) -> tuple[int, ...]:
        if self.form == "whole" and first < last:
            return self.shape
        if self.form == "flat":
            return (last - first,)
        inner = self.shape[1:]
        return ((last - first) // max(math.prod(inner), 1), *inner)

    def slice_of(self, elements: Array, rank: int) -> Array:
        """A rank's slice, from the flat elements in C order."""
        first, last = self.part(rank)
        cut: Array = elements[first:last].reshape(self._shape_of(first, last))
        return cut

    def owners(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Rank, start and stop of every slice that is not empty."""
        position, size, unit, share = self.position, self.size, self.unit, max(self.share, 1)
        first = 0
        for rank in range(position // share, min(ranks, -(-(position + size) // share))):
            last = min((rank + 1) * share - position, size) // unit * unit  # cut(rank + 1), faster
            if first < last:
                yield rank, first, last
            first = last


def line_bytes(ranks: int) -> int:
    """Bytes of gradients in a line: 4 MiB, or 256 KiB per rank if that is more, at most 1 GiB.

    Examples
    --------
    >>> from fastopt.checkpoint.restore.shards import line_bytes
    >>> line_bytes(4) >> 20, line_bytes(1024) >> 20, line_bytes(10_000) >> 20
    (4, 256, 1024)
    """
    return min(max(LINE, LINE_OF_RANK * ranks), MOST)


def placed(
    tensors: Iterable[tuple[Index, tuple[int, ...], str, Form]], ranks: int
) -> dict[Index, Placement]:
    """Lay out the tensors of each dtype in lines, in order.

    Consecutive tensors share a line of at most :func:`line_bytes`, which can be sent once their
    gradients are ready; a larger tensor has its own line. Tensors that cannot be split never start
    a new line, so that the ranks have equal shares of them.

    Parameters
    ----------
    tensors : iterable of (index, shape, dtype, form)
        The tensors.
    ranks : int
        Number of shares.
    """
    limit = line_bytes(ranks)
    lines: list[int] = []
    last: dict[str, int] = {}
    rows: list[tuple[Index, tuple[int, ...], str, Form, int, int]] = []
    for index, shape, dtype, form in tensors:
        size, line = math.prod(shape), last.get(dtype)
        most = limit // (8 if dtype == "float64" else 4)
        if line is None or (form != "whole" and lines[line] > 0 and lines[line] + size > most):
            line = last[dtype] = len(lines)
            lines.append(0)
        rows.append((index, shape, dtype, form, lines[line], line))
        lines[line] += size
    return {
        index: Placement(shape, dtype, form, position, -(-lines[line] // ranks))
        for index, shape, dtype, form, position, line in rows
    }


Shards = Callable[[int], dict[str, Any]]
"""Function of a rank that returns the contents of its shard."""

RUN = r"[0-9a-f]{16}"
"""Pattern of the names of runs. A run is one call of ``save()`` on all ranks."""

BY_ROW = ("row_decay",)
"""Attributes whose arrays have one number for each row of a weight."""

FROZEN = "frozen"
"""Field of an index file with weights that have no state, which may be missing."""

FIELDS = {"run": str, "ranks": int, "kind": str}
FIELDS |= dict.fromkeys(("updater", "placements", "masters", FROZEN), dict)
"""Fields of the index file, which lists the shards."""

TENSOR = ("shape", "dtype", "form")
"""Attributes of a placement that are those of a tensor, on whatever ranks."""


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


def is_of_ranks(tree: object) -> bool:
    """Whether the tree is the index file of a sharded checkpoint."""
    return isinstance(tree, dict) and "ranks" in tree


@dataclass
class Reading:
    """Who reads a checkpoint: a rank, by default the only one."""

    optimizer: Optimizer
    rank: int = 0
    ranks: int = 1
    placements: Mapping[Index, Placement] = field(default_factory=dict)


def read_whole(optimizer: Optimizer, path: PathLike) -> Any:
    """Read the checkpoint of an updater, or merge that of ranks to one.

    Raises
    ------
    CheckpointError, OSError
        See :func:`read_saved`.
    """
    if isinstance(path, Mapping):
        raise TypeError("path must be that of a file, got a dict: load_states_dict() takes dicts")
    with open(path, "rb") as file:
        index = read(file, optimizer)
    shard = re.fullmatch(rf"(.+)\.{RUN}\.\d+-of-\d+", Path(os.fspath(path)).name)
    if shard and isinstance(index, dict) and "rank" in index:
        raise CheckpointError(f"it is a shard of {shard[1]}: load that")
    return merged(optimizer, index, _shards(path, index)) if is_of_ranks(index) else index


def merged(optimizer: Optimizer, index: dict[str, Any], shard: Shards) -> Any:
    """Merge the checkpoint of ranks to that of an updater.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer, for the names of parameters.
    index : dict
        Contents of the index file.
    shard : callable
        Function of a rank that returns the contents of its shard.

    Raises
    ------
    CheckpointError
        It is not the checkpoint of a ShardedUpdater.
    """
    _check(index, "ShardedUpdater")
    with refusing("not a checkpoint of ranks: "):
        reader = _Reader(Reading(optimizer), index, shard)
        tree = reader.saved().updater
    keys: Keys = tree["parameters"]
    for key, placement in reader.before.items():
        for table in tables_of(tree):
            if key in table:
                table[key] = _joined_state(table[key], placement)
        for name, table in tree["attributes"].items():
            if isinstance(table, dict) and keys[key] in table:
                value, by_row = table.pop(keys[key]), name in BY_ROW
                if placement.shape or not by_row:  # a number has no rows
                    table[keys[key]] = _joined_state(value, placement, by_row)
    if index["masters"]:
        waiting = {keys[key]: array for key, array in index["masters"].items()}
        tree["attributes"]["masters_given"] = tree["attributes"]["masters_given"] | waiting
    return tree


def tables_of(tree: Mapping[str, Any]) -> list[dict[Index, Any]]:
    """Tables of a checkpoint with arrays that are split like their weights: states and averages."""
    averages = tree.get("averages", {})
    return [tree["states"], *(averages[name] for name in ("arrays", "weights") if averages)]


def _joined_state(tree: object, placement: Placement, by_row: bool = False) -> Any:
    """Inverse of :func:`cut_state` for the only rank: flat arrays get the tensor's shape."""

    def shaped(array: Array) -> Array:
        if placement.form != "flat" or array.shape != (placement.size,):
            return array
        if not by_row:
            return array.reshape(placement.shape)
        rows = placement.shape[0]
        return array[:: placement.size // rows] if placement.size else np.zeros(rows)

    return mapped(shaped, tree)


def cut_state(
    tree: object, placement: Placement, rank: int, context: str, by_row: bool = False
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

    return mapped(cut, tree)


def read_saved(reading: Reading, path: PathLike, kind: str) -> tuple[str, Saved]:
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
            index = read(file, reading.optimizer)
            file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            header = hashlib.blake2b(file.read(size), digest_size=8).hexdigest()
        if kind == "ShardedUpdater" and not is_of_ranks(index):
            return header, of_one(index)
        _check(index, kind)
        with refusing("not a checkpoint of ranks: "):
            return index["run"], _Reader(reading, index, _shards(path, index)).saved()


def _shards(path: PathLike, index: dict[str, Any]) -> Shards:
    """Function that reads the shards that an index file lists."""
    return lambda rank: read_shard(path, index["run"], rank, index["ranks"])


def of_one(tree: Any) -> Saved:
    """Convert the checkpoint of an updater without ranks; :func:`~.restore.restore` checks it."""
    masters = {}
    if isinstance(tree, dict) and isinstance(tree.get("attributes"), dict):
        masters = tree["attributes"].pop("masters_given", {})
        tree["attributes"]["masters_given"] = {}
    return Saved(tree, {}, masters if isinstance(masters, dict) else {})


def _check(index: Any, kind: str) -> None:
    if not is_of_ranks(index) or set(index) | {FROZEN} != {*FIELDS}:
        raise CheckpointError("not a checkpoint of ranks, which ShardedUpdater.save makes")
    check_types({FROZEN: {}, **index}, FIELDS)
    if not re.fullmatch(RUN, index["run"]):
        raise CheckpointError(f"a run cannot be named {index['run']!r}")
    if index["kind"] != kind:
        raise CheckpointError(f"it was saved from {index['kind']}, this is {kind}")


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(**{**fields, "shape": tuple(fields["shape"])})


Source = tuple[dict[str, Any], int, int, int]
"""A shard with a part of a tensor, the length of its slice, and the part of that to use.

They are in units of the first axis of a state: elements or rows.
"""


class _Reader:
    """Merges the slices of one rank from shards that any number of ranks wrote."""

    def __init__(self, reading: Reading, index: dict[str, Any], shard: Shards) -> None:
        self.rank, self.now = reading.rank, reading.ranks
        self.ranks, self.index = index["ranks"], index
        self.keys: Keys = index["updater"]["parameters"]
        present = keys_of(names_of(reading.optimizer), reading.placements)
        self.found = match(self.keys, present).index
        self.before = {key: _placement(fields) for key, fields in index["placements"].items()}
        self.after = self._anew(self.before)
        for key, placement in self.after.items():
            at = self.found.get(self.keys[key])
            now = None if at is None else reading.placements.get(at)
            if now is not None:
                if any(getattr(now, of) != getattr(placement, of) for of in TENSOR):
                    raise CheckpointError(
                        f"parameter {key!r} was saved with shape {placement.shape} and "
                        f"{placement.dtype}, it has {now.shape} and {now.dtype} now"
                    )
                self.after[key] = now
        frozen = {key: dict(fields) for key, fields in index.get(FROZEN, {}).items()}
        indices = {key: fields.pop("index") for key, fields in frozen.items()}
        known = match(indices, present).index
        self.frozen = {key: known[i] for key, i in indices.items() if i in known}
        """Current index of each weight without a state, by its key."""
        without = {key: _placement(frozen[key]) for key in self.frozen}
        self.before_all = self.before | without
        self.after_all = self.after | self._anew(without)
        self.shard = cache(shard)
        self.nearest = min(self.rank, self.ranks - 1)
        """Rank whose shard is read for what every shard has."""

    def _anew(self, before: Mapping[Index, Placement]) -> dict[Index, Placement]:
        """Placements on the current ranks of what the saved ranks had."""
        lines = [(k, p.shape, p.dtype, p.form) for k, p in before.items()]
        return dict(before) if self.now == self.ranks else placed(lines, self.now)

    def saved(self) -> Saved:
        """The part of the checkpoint that this rank loads."""
        self.shard(self.nearest)  # detect missing shards even if not needed
        updater, keys = self.index["updater"], self.keys
        states: dict[Index, Any] = dict(updater["states"])
        weights: dict[Index, Array] = {}
        attributes = dict(updater["attributes"])
        saved_averages = updater.get("averages", {})
        averages = {
            name: dict(saved_averages[name]) for name in ("arrays", "weights") if saved_averages
        }
        for key in self.before:
            sources, index = list(self._sources(key)), keys[key]
            names = dict.fromkeys(name for shard, *_ in sources for name in shard["attributes"])
            for name in names:
                table = attributes[name] = dict(attributes.get(name, {}))
                table |= _taken(sources, index, index, "attributes", name)
            states |= _taken(sources, key, key, "states")
            every = sources or self._without(key)
            for name, arrays in averages.items():
                arrays |= _taken(every, key, key, "averages", name)
            if index in self.found:
                weights |= _taken(every, key, self.found[index], "weights")
        for key, now in self.frozen.items():
            every = list(self._sources(key)) or self._without(key)
            weights |= _taken(every, key, now, "weights")
        whole = {**updater, "attributes": attributes, "states": states}
        if saved_averages:
            whole["averages"] = {**saved_averages, **averages}
        common = {keys[key]: key for key in self.before if keys[key] in self.found}
        return Saved(
            whole,
            weights,
            {self.found[keys[k]]: a for k, a in self.index["masters"].items()},
            {self.found[index]: self.after[key] for index, key in common.items()},
            frozenset(self.before),
            {now: self.after_all[key] for key, now in self.frozen.items()},
        )

    def _sources(self, key: Index) -> Iterator[Source]:
        """Sources of this rank's slice."""
        before, after = self.before_all[key], self.after_all[key]
        first, last = after.part(self.rank)
        owners = [o for o in before.owners(self.ranks) if o[1] < last and o[2] > first]
        if before.form == "whole":
            for rank, *_ in owners:
                yield self.shard(rank), 1, 0, 1
            return
        # the state of a parameter without elements is read from some shard
        for rank, begin, end in owners or [(self.nearest, *before.part(self.nearest))]:
            ends = (min(max(at, begin), end) - begin for at in (first, last))
            start, stop = (at // before.unit for at in ends)
            yield self.shard(rank), (end - begin) // before.unit, start, stop

    def _without(self, key: Index) -> list[Source]:
        """Source of no elements of a tensor that another rank has, whose weight all shards have."""
        shard, shape = self.shard(self.nearest), self.after_all[key].slice_shape(self.rank)

        def empty(table: Mapping[Index, Array]) -> dict[Index, Array]:
            return {key: table[key].reshape(-1)[:0].reshape(shape)} if key in table else {}

        averages = {name: empty(table) for name, table in shard.get("averages", {}).items()}
        return [({"averages": averages, "weights": empty(shard["weights"])}, 0, 0, 0)]


def _taken(sources: list[Source], key: Index, to: Index, *where: str) -> dict[Index, Any]:
    """Merge the values of `key` in the tables of the shards at path `where`, if all have it."""
    tables: list[Any] = [
        reduce(lambda tree, name: tree.get(name, {}), where, shard) for shard, *_ in sources
    ]
    if not tables or not all(key in table for table in tables):
        return {}

    def joined(*arrays: Array) -> Array:
        """Concatenate arrays of the length of their slice."""
        first, (_, length, *used) = arrays[0], sources[0]
        if len(arrays) == 1 and used == [0, length]:
            return first
        parts = [(array, *source[1:]) for array, source in zip(arrays, sources, strict=True)]
        if all(array.ndim and len(array) == length for array, length, *_ in parts):
            return np.concatenate([array[start:stop] for array, _, start, stop in parts])
        if first.ndim == 0:
            return first
        raise CheckpointError(
            f"parameter {key!r} has an array of shape {first.shape} that is not cut like its "
            "slice; load it with as many ranks as there were"
        )

    return {to: mapped(joined, *(table[key] for table in tables))}
