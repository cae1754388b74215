"""Writing of sharded checkpoints: a shard for each rank, then an index file that lists them."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fastopt.checkpoint.format.files import PathLike, write_atomically, write_part
from fastopt.checkpoint.format.tree import chunks
from fastopt.checkpoint.restore.describe import describe, under_keys
from fastopt.checkpoint.restore.parameters import keys_of, names_of
from fastopt.checkpoint.restore.placement import Placement
from fastopt.checkpoint.restore.shards import RUN, shard_path
from fastopt.distributed.agreement import Facts, attempt
from fastopt.distributed.collectives import share_texts
from fastopt.distributed.ranks import listing
from fastopt.optimizer.optimizer import Array, Index


def new_run() -> str:
    """Return a random name for the files of one checkpoint."""
    return secrets.token_hex(8)


def write_together(
    sharded: Any, path: PathLike, shard: Callable[[str], None], index: Callable[[str], None]
) -> None:
    """Write a checkpoint; collective.

    Parameters
    ----------
    sharded : Sharded
        The ranks.
    path : str or os.PathLike
        The index file.
    shard, index : callable
        Functions that write the shard of this rank and the index, given the name of the run. Rank 0
        writes the index if all ranks have written their shards.
    """
    facts = Facts(path=os.fspath(path))
    run = share_texts(sharded._ranks, new_run())[0]
    try:
        _, error = attempt(shard, run)
        sharded._agree(facts, error)
        if sharded.rank == 0:
            _, error = attempt(_write_listed, sharded, path, run, index)
        sharded._agree(facts, error)
    except Exception:
        if not sharded._ranks.broken and not _is_listed(sharded, path, run):
            with suppress(OSError):
                shard_path(path, run, sharded.rank, sharded.ranks).unlink()
        raise
    if sharded.rank == 0:
        with suppress(OSError):  # the next save tries again
            remove_others(path, run)
    sharded._agree(facts, None)


def _write_listed(sharded: Any, path: PathLike, run: str, index: Callable[[str], None]) -> None:
    """Write the index, after checking that all shards exist."""
    _check_shards(path, run, sharded.ranks)
    index(run)


def _is_listed(sharded: Any, path: PathLike, run: str) -> bool:
    """Whether the index may list the shards of a run that failed; collective.

    Writing the index can fail after it has replaced the old one. Rank 0 reads it for all ranks,
    because a network file system may still show the old one to others.
    """
    listed = True
    if sharded.rank == 0:
        with suppress(OSError):
            listed = Path(path).exists() and run.encode() in Path(path).read_bytes()
    return share_texts(sharded._ranks, str(listed))[0] == "True"


def write_shard(
    sharded: Any,
    path: PathLike,
    run: str,
    weights: Mapping[Index, Array],
    frozen: Mapping[Index, Placement],
) -> None:
    """Write the shard of this rank: the data that only this rank has."""
    keys, whole = _keys(sharded), describe(sharded.shard)
    averages = whole.get("averages", {})
    shard = {
        "run": run,
        "rank": sharded.rank,
        "states": under_keys(sharded.states, keys),
        "attributes": arrays_by_index(whole["attributes"]),
        "weights": under_keys(weights, keys | _frozen_keys(sharded, frozen)),
        "averages": {name: averages.get(name, {}) for name in ("arrays", "weights")},
    }
    write_part(shard_path(path, run, sharded.rank, sharded.ranks), path, chunks(shard))


def write_index(
    sharded: Any,
    path: PathLike,
    run: str,
    kind: str,
    masters: Mapping[Index, Array],
    frozen: Mapping[Index, Placement],
) -> None:
    """Write the index: the data common to all ranks."""
    whole, keys = describe(sharded.shard), _keys(sharded)
    cut = arrays_by_index(whole["attributes"])
    common = {name: value for name, value in whole["attributes"].items() if name not in cut}
    placements = sharded.placements
    uncut: dict[str, dict[Index, Any]] = {}
    for index, parts in sharded.uncut.items():
        for name, value in parts.items():
            uncut.setdefault(name, {})[index] = value
    states, averages = (under_keys(uncut.pop(name, {}), keys) for name in ("states", "averages"))
    for name, values in uncut.items():
        common[name] = {**common.get(name, {}), **values}
    updater = {**whole, "attributes": common, "parameters": keys, "states": states}
    if "averages" in whole:
        updater["averages"] = {**whole["averages"], "arrays": averages, "weights": {}}
    index = {
        "run": run,
        "ranks": sharded.ranks,
        "kind": kind,
        "updater": updater,
        "placements": {k: asdict(placements[i]) for k, i in keys.items() if i in placements},
        "masters": under_keys(masters, keys),
    }
    if frozen:
        without_state = _frozen_keys(sharded, frozen).items()
        index["frozen"] = {k: {"index": i, **asdict(frozen[i])} for k, i in without_state}
    write_atomically(path, chunks(index))


def _check_shards(path: PathLike, run: str, ranks: int) -> None:
    """Raise OSError unless all shards are visible, as they are on a shared file system.

    On a network file system, files of other machines may become visible with a delay.
    """
    missing = [*range(ranks)]
    for pause in (0.0, 0.1, 0.4, 1.5):
        time.sleep(pause)
        missing = [r for r in missing if not shard_path(path, run, r, ranks).exists()]
        if not missing:
            return
    folder = Path(path).absolute().parent
    raise OSError(
        f"rank 0 does not see the shards of {listing(missing)} in {folder}: the path must be in a "
        "directory that all ranks share"
    )


def _frozen_keys(sharded: Any, frozen: Mapping[Index, Placement]) -> dict[Index, Index]:
    """Map from the key of each frozen weight without a state to its index."""
    return {key: index for key, index in _keys(sharded, frozen).items() if index in frozen}


def _keys(sharded: Any, more: Iterable[Index] = ()) -> dict[Index, Index]:
    """Map from the key of each parameter to its index."""
    optimizer = sharded.optimizer
    known = [*sharded.placements, *optimizer._index_update_count, *sharded._masters]
    known += [*sharded.uncut, *more]
    return keys_of(names_of(optimizer), known)


def remove_others(path: PathLike, run: str) -> None:
    """Remove the shards of earlier checkpoints, which the index no longer lists."""
    target = Path(path)
    pattern = re.compile(re.escape(target.name) + rf"\.({RUN})\.\d+-of-\d+")
    for file in target.parent.iterdir():
        found = pattern.fullmatch(file.name)
        if found and found[1] != run:
            file.unlink(missing_ok=True)


def arrays_by_index(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that contain arrays by index; each rank has those of its own slices."""
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
