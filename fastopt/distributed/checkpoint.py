"""Files of sharded updaters and tables: a shard for each rank, and an index that lists them.

Reason: a crash or an error of one rank leaves the old checkpoint or the new one on all of them.
"""

import copy
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastopt._engine.averaging import Averages
from fastopt.arguments import brief
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike, write_atomically, write_part
from fastopt.checkpoint.format.objects import is_registered
from fastopt.checkpoint.format.tree import chunks
from fastopt.checkpoint.restore import shards
from fastopt.checkpoint.restore.describe import describe, under_keys
from fastopt.checkpoint.restore.parameters import Skipped, keys_of, match, names_of
from fastopt.checkpoint.restore.restore import check_outside, restore
from fastopt.checkpoint.restore.shards import Placement, Reading, Saved
from fastopt.distributed.agreement import Facts, agree, attempt, is_agreed, share_texts
from fastopt.distributed.fingerprint import holds_array
from fastopt.distributed.job import private
from fastopt.distributed.ranks import Ranks, listing, time_limit
from fastopt.distributed.sharded import Sharded
from fastopt.lr_scheduler.base import restored
from fastopt.optimizer.accumulation import Windows
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Array, Index

Tree = dict[str, Any]
"""Contents of a file."""

NOTHING: Mapping[Index, Placement] = MappingProxyType({})


class Trial:
    """Temporary updater, with this rank's parameters, into which a checkpoint is restored first."""

    states_synced: dict[Index, bool]

    def __init__(self, sharded: "Resumable") -> None:
        windows = sharded._windows
        self._windows = None if windows is None else Windows(windows.every)
        self.optimizer = sharded.optimizer
        self.loss_scaler, self.clip_global_norm = sharded.loss_scaler, sharded.clip_global_norm
        self.states_synced = {}  # set first in the updater, which forgets parameters without state
        self.states = {index: sharded.states.get(index) for index in sharded.placements}
        self.groups, self.average = sharded.shard.groups, sharded.shard.average
        self._averages = None if self.average is None else Averages(self.average)

    def _has_records(self) -> bool:
        return False

    def _put_states(self, states: dict[Index, Any], alike: bool) -> None:
        self.states_synced, self.states = dict.fromkeys(states, False), states


class Resumable(Sharded):
    """Abstract base of sharded updaters and tables that saves and loads their states."""

    _windows: Windows | None = None

    def save(self, path: PathLike) -> None:
        """Write a checkpoint from which a later run can continue; all ranks must call it.

        Each rank writes its own shard next to `path`. The index file `path`, which lists the
        shards, is written last and replaces an older one, whose shards are then removed. A crash at
        any moment leaves either the old checkpoint or the new one. See :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks can write to, the same on all ranks.

        Raises
        ------
        TypeError
            See :meth:`Updater.save <fastopt.optimizer.Updater.save>`.
        OSError
            A file cannot be written on some rank. All ranks raise the error; the old checkpoint is
            unchanged.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> old, new = (ShardedUpdater(optimizer.Adam(), MPI.COMM_WORLD) for _ in range(2))
        >>> old(0, np.ones(2), np.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old.save(f"{folder}/adam.safetensors")
        ...     new.load(f"{folder}/adam.safetensors")
        Skipped(nothing)
        >>> new.states[0]
        (array([0.1, 0.1]), array([0.001, 0.001]))
        """
        self._save(path, self._weights)

    def _save(
        self,
        path: PathLike,
        weights: Callable[[], Mapping[Index, Array]],
        frozen: Mapping[Index, Placement] = NOTHING,
        compared: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Save, together with the slices of weights that the function `weights` returns.

        `frozen` has the placements of those without a state, and the function `compared` returns
        what must be equal on all ranks.
        """

        def write(slices: Mapping[Index, Array]) -> None:
            self._unchecked.clear()
            write_together(self, path, lambda: self._contents(slices, frozen))

        with self.optimizer.call_lock:
            self._together(
                "save",
                write,
                weights,
                lambda slices: {
                    "path": os.fspath(path),
                    "weights": listing_of(slices),
                    **self._unchecked,
                    **compared(),
                },
            )

    def _contents(
        self, slices: Mapping[Index, Array], frozen: Mapping[Index, Placement]
    ) -> tuple[Tree, Tree]:
        """Return the data that only this rank has, and those common to all ranks."""
        whole, keys = describe(self.shard), self._keys()
        without_state = {k: i for k, i in self._keys(frozen).items() if i in frozen}
        cut, averages = arrays_by_index(whole["attributes"]), whole.get("averages", {})
        shard = {
            "states": under_keys(self.states, keys),
            "attributes": cut,
            "weights": under_keys(slices, keys | without_state),
            "averages": {name: averages.get(name, {}) for name in ("arrays", "weights")},
        }
        common = {name: value for name, value in whole["attributes"].items() if name not in cut}
        uncut: dict[str, dict[Index, Any]] = {"states": {}, "averages": {}}
        for index, parts in self.uncut.items():
            for name, value in parts.items():
                uncut.setdefault(name, {})[index] = value
        states, means = (under_keys(uncut.pop(name), keys) for name in ("states", "averages"))
        for name, values in uncut.items():
            common[name] = {**common.get(name, {}), **values}
        updater = {**whole, "attributes": common, "parameters": keys, "states": states}
        if averages:
            updater["averages"] = {**averages, "arrays": means, "weights": {}}
        places = self.placements
        contents: Tree = {
            "kind": self._kind,
            "updater": updater,
            "placements": {k: asdict(places[i]) for k, i in keys.items() if i in places},
            "masters": under_keys(self._masters, keys),
        }
        if frozen:
            of = {key: {"index": i, **asdict(frozen[i])} for key, i in without_state.items()}
            contents["frozen"] = of
        return shard, contents

    def _keys(self, more: Iterable[Index] = ()) -> dict[Index, Index]:
        """Map from the key of each parameter to its index."""
        counts = self.optimizer._index_update_count
        known = [*self.placements, *counts, *self._masters, *self.uncut, *more]
        return keys_of(names_of(self.optimizer), known)

    def load(self, path: PathLike, strict: bool = True) -> Skipped:
        """Restore a checkpoint written on any number of ranks; all ranks must call it.

        A :class:`ShardedUpdater` also loads checkpoints of :meth:`fastopt.optimizer.Updater.save`;
        each rank then keeps the whole state of a weight until its first update.

        Parameters
        ----------
        path : str or os.PathLike
            File written by :meth:`save`.
        strict : bool
            Raise an error if the checkpoint lacks parameters of this updater or has additional
            ones. Otherwise missing parameters start from scratch, and additional ones are ignored.
            Default True.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the checkpoint, and of the ``extra``
            ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            On some rank, a file is missing, damaged, of another run, or cannot be read. All ranks
            raise the error, and nothing changes.
        """
        return self._load("load", lambda: self._read(path), strict, {"path": os.fspath(path)})

    def _load(
        self,
        call: str,
        read: Callable[[], tuple[str, Saved]],
        strict: bool,
        compared: Mapping[str, str] = MappingProxyType({}),
        check: Callable[[Saved], object] = lambda saved: None,
    ) -> Skipped:
        """Load what the function `read` returns, if `check` raises no error for it.

        `compared` must be equal on all ranks.
        """
        facts = Facts({**compared, "strict": str(strict)})
        with self.optimizer.call_lock:
            self._begin(call)
            content, error = attempt(read)
            self._agree(Facts({**facts, "run": content[0] if content else ""}), error)
            saved: Saved = content[1]
            before, trial = self._snapshot(), Trial(self)
            schedules = [  # which are restored in place
                opt.lr_scheduler for opt in before[0] if is_registered(opt.lr_scheduler)
            ]
            copies = copy.deepcopy(schedules)
            skipped, error = attempt(self._restored, trial, saved, strict)
            _, problem = attempt(check, saved)
            error = error or problem
            try:
                self._agree(facts, error)
            except BaseException:
                self._roll_back(*before)
                restored(schedules, copies)
                raise
            known = self.placements.keys() | saved.placements.keys()
            self.uncut = {}
            tables = arrays_by_index(vars(self.optimizer))
            if trial._averages is not None:
                tables["averages"] = trial._averages.arrays
            for index in [index for index in trial.states if index not in known]:
                self.uncut[index] = {"states": trial.states.pop(index)}
                del trial.states_synced[index]
                for name, table in tables.items():
                    if index in table:
                        self.uncut[index][name] = table.pop(index)
            for name, value in vars(trial).items():
                if name != "_windows":  # ranks add up before they send
                    setattr(self.shard, name, value)
            self._restore_rest(saved)
            result: Skipped = skipped
            return result

    def _read(self, path: PathLike) -> tuple[str, Saved]:
        """Read the part of a checkpoint that this rank loads."""
        check_outside(self.shard)
        reading = Reading(self.optimizer, self.rank, self.ranks, self.placements)
        return shards.read_saved(reading, path, self._kind)

    def _restored(self, trial: Trial, saved: Saved, strict: bool) -> Skipped:
        """Restore a checkpoint into `trial`, slicing whole states if their placement is known."""
        optimizer, tree = self.optimizer, saved.updater
        if isinstance(tree, dict) and isinstance(tree.get("parameters"), dict):
            keys = tree["parameters"]
            present = match(keys, keys_of(names_of(optimizer), self.placements)).index
            for key, index in keys.items():
                placement = self.placements.get(present.get(index, index))
                if placement is None or key in saved.cut:
                    continue
                context = f"parameter {key!r}"
                states, *averages = shards.tables_of(tree)
                attributes = arrays_by_index(tree["attributes"])
                for kind, table, name in [
                    ("states", states, key),
                    *(("averages", average, key) for average in averages),
                    *((kind, attribute, index) for kind, attribute in attributes.items()),
                ]:
                    if isinstance(table, dict) and name in table:
                        value = table.pop(name)
                        if self._takes(kind, placement):
                            by_row = kind in shards.BY_ROW
                            table[name] = shards.cut_state(
                                value, placement, self.rank, context, by_row
                            )
            saved.masters = {present.get(i, i): array for i, array in saved.masters.items()}
        skipped = restore(trial, tree, strict)
        if trial._windows is not None and trial._windows.calls:
            raise CheckpointError(
                "it was saved by one process between two updates of accumulate: use "
                "Updater.finish() and save again"
            )
        if trial.groups is not None:
            try:
                groups = Groups(trial.groups, trial.optimizer)
                self.backend.check([trial.optimizer, *groups.optimizers()])
            except TypeError as error:
                raise CheckpointError(str(error)) from error
        held = trial._averages and trial._averages.held
        if held and not held.keys() <= self.placements.keys() | saved.placements.keys():
            raise CheckpointError(
                "it was saved by one process inside of averaged(), so weights must be restored "
                "before ranks load it: use Updater.restore_weights() and save again"
            )
        return skipped

    def _cut(self, index: Index, placement: Placement) -> dict[str, Any]:
        """Slices of the loaded state of a whole weight, and of attributes that contain arrays."""
        context = self._label(index)
        return {
            name: shards.cut_state(value, placement, self.rank, context, name in shards.BY_ROW)
            for name, value in self.uncut[index].items()
            if self._takes(name, placement)
        }

    def _takes(self, name: str, placement: Placement) -> bool:
        """Whether this rank has a slice of what is loaded; every rank has one of an average."""
        return name == "averages" or placement.has_state(self.rank)

    @property
    def _kind(self) -> str:
        """Kind of object that is saved, as recorded in the index file."""
        return type(self).__name__

    def _weights(self) -> dict[Index, Array]:
        """Weights that only this rank has."""
        return {}

    def _restore_rest(self, saved: Saved) -> None:
        """Restore the parts of a checkpoint other than the states."""
        self.placements.update(saved.placements)
        self._masters = saved.masters
        self._unchecked.clear()

    def _snapshot(self) -> tuple[Any, ...]:
        """Snapshot of what :meth:`load` changes before the ranks have agreed."""
        scaler = self.loss_scaler
        optimizers = {opt: opt.snapshot() for opt in self.shard.parameters.optimizers()}
        return optimizers, scaler.state_dict() if scaler else None

    def _roll_back(self, optimizers: Mapping[Any, Any], scale: Mapping[str, Any]) -> None:
        for optimizer, saved in optimizers.items():
            optimizer.put_back(saved)
        if self.loss_scaler:
            self.loss_scaler.load_state_dict(scale)


def listing_of(indices: Iterable[Index]) -> str:
    """Indices in an order that does not depend on that of a dictionary, for comparison."""
    return ", ".join(sorted(map(repr, indices))) or "none"


def new_run() -> str:
    """Return a random name for the files of one checkpoint."""
    return secrets.token_hex(8)


def write_together(
    sharded: Sharded, path: PathLike, contents: Callable[[], tuple[Tree, Tree]]
) -> None:
    """Write a checkpoint; collective.

    Parameters
    ----------
    sharded : Sharded
        The ranks.
    path : str or os.PathLike
        The index file, which rank 0 writes if all ranks have written their shards.
    contents : callable
        Function that returns the contents of the shard of this rank, and of the index.
    """
    ranks, rank, size = sharded._ranks, sharded.rank, sharded.ranks
    run = share_texts(ranks, new_run())[0]
    shard_file = shards.shard_path(path, run, rank, size)

    def write_shard() -> Tree:
        shard, index = contents()
        write_part(shard_file, path, chunks({"run": run, "rank": rank, **shard}))
        return index

    def write_index() -> None:
        if rank == 0:
            _check_shards(path, run, size)
            write_atomically(path, chunks({"run": run, "ranks": size, **index}))

    try:
        index = _agreed(ranks, write_shard)
        _agreed(ranks, write_index)
    except Exception:
        if not ranks.broken and not _is_listed(ranks, path, run):
            with suppress(OSError):
                shard_file.unlink()
        raise
    if rank == 0:
        with suppress(OSError):  # the next save tries again
            remove_others(path, run)
    agree(ranks)


def _is_listed(ranks: Ranks, path: PathLike, run: str) -> bool:
    """Whether the index may list the shards of a run that failed; collective.

    Writing the index can fail after it has replaced the old one. Rank 0 reads it for all ranks,
    because a network file system may still show the old one to others.
    """
    listed = True
    if ranks.rank == 0:
        with suppress(OSError):
            listed = Path(path).exists() and run.encode() in Path(path).read_bytes()
    return share_texts(ranks, str(listed))[0] == "True"


def _check_shards(path: PathLike, run: str, ranks: int) -> None:
    """Raise OSError unless all shards are visible, as they are on a shared file system.

    On a network file system, files of other machines may become visible with a delay.
    """
    missing = [*range(ranks)]
    for pause in (0.0, 0.1, 0.4, 1.5):
        time.sleep(pause)
        missing = [r for r in missing if not shards.shard_path(path, run, r, ranks).exists()]
        if not missing:
            return
    folder = Path(path).absolute().parent
    raise OSError(
        f"rank 0 does not see the shards of {listing(missing)} in {folder}: the path must be in a "
        "directory that all ranks share"
    )


def remove_others(path: PathLike, run: str) -> None:
    """Remove the shards of earlier checkpoints, which the index no longer lists."""
    target = Path(path)
    pattern = re.compile(re.escape(target.name) + rf"\.({shards.RUN})\.\d+-of-\d+")
    for file in target.parent.iterdir():
        shard = pattern.fullmatch(file.name)
        if shard and shard[1] != run:
            file.unlink(missing_ok=True)


def arrays_by_index(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that contain arrays by index; each rank has those of its own slices."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, Mapping) and any(map(holds_array, value.values()))
    }


LATEST = "latest.json"
CALL = "save_checkpoint"

Save = Callable[[Path], Any]


def save_checkpoint(
    folder: PathLike, parts: Mapping[str, Save], comm: object, timeout: float | None = None
) -> None:
    """Save several updaters and tables as one checkpoint; all ranks must call it.

    The parts are saved in a new directory in `folder`. Then the file ``latest.json``, which names
    it, is replaced, and older checkpoints are removed. A crash at any moment leaves either all
    parts of the old checkpoint or all of the new one. The parts can be loaded on any number of
    ranks, see :func:`latest_checkpoint`.

    Parameters
    ----------
    folder : str or os.PathLike
        Directory that all ranks share, created if necessary, the same on all ranks.
    parts : mapping of str to callable
        Functions that save a part to a path, by file name, such as ``table.save``. They are called
        in order, on all ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Raises
    ------
    TypeError, ValueError
        `parts` are no functions by file name, or ranks disagree.
    OSError
        A file cannot be written on some rank.
    Exception
        Any error of a part. All ranks raise the error; the old checkpoint is unchanged.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from fastopt import Adam, EmbeddingTable
    >>> from mpi4py import MPI
    >>> from fastopt.distributed import ShardedEmbeddingTable, ShardedUpdater
    >>> from fastopt.distributed import latest_checkpoint, save_checkpoint
    >>> comm, weights = MPI.COMM_WORLD, {"w": np.zeros(3)}
    >>> updater = ShardedUpdater(Adam(), comm)
    >>> updater("w", np.ones(3), weights["w"])
    >>> table = ShardedEmbeddingTable(EmbeddingTable(4, "adam"), comm)
    >>> def save_model(path):
    ...     updater.save(path, weights)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     folder = comm.bcast(folder)
    ...     save_checkpoint(folder, {"model": save_model, "words": table.save}, comm)
    ...     found = latest_checkpoint(folder)
    ...     updater.load(found["model"], weights=weights)
    ...     table = ShardedEmbeddingTable.load(found["words"], comm)
    Skipped(nothing)
    """
    limit = time_limit(timeout)
    ranks = private(comm, limit).ranks
    ranks.begin(CALL, limit)
    run = share_texts(ranks, new_run())[0]
    target, latest = Path(folder, run), Path(folder, LATEST)

    def check() -> Facts:
        for name, save in parts.items():
            if not (_is_file_name(name) and callable(save)):
                raise TypeError(f"parts must be functions by file name, got {brief(name)}")
            if hasattr(save, "save"):
                raise TypeError(
                    f"parts[{name!r}] must be a function of a path, such as {name}.save, got "
                    f"{brief(save)}"
                )
        return Facts(folder=str(folder), parts=", ".join(parts))

    def finish() -> None:
        if ranks.rank == 0:
            write_atomically(latest, [json.dumps({"run": run, "parts": [*parts]}).encode()])

    facts, error = attempt(check)
    agree(ranks, [facts or Facts()], error)
    try:
        _agreed(ranks, lambda: target.mkdir(parents=True, exist_ok=True))
        for name, save in parts.items():
            _agreed(ranks, partial(save, target / name))
            ranks.begin(CALL, limit)
        _agreed(ranks, finish)
    except Exception:
        if ranks.rank == 0 and not (latest.exists() and run in latest.read_text("utf-8")):
            shutil.rmtree(target, ignore_errors=True)
        raise
    if ranks.rank == 0:
        for other in Path(folder).iterdir():
            if re.fullmatch(shards.RUN, other.name) and other.name != run:
                shutil.rmtree(other, ignore_errors=True)
    agree(ranks)


def latest_checkpoint(folder: PathLike) -> dict[str, Path]:
    """Return the paths of the parts of the latest complete checkpoint, by name.

    Parameters
    ----------
    folder : str or os.PathLike
        Directory of :func:`save_checkpoint`.

    Returns
    -------
    dict of str to pathlib.Path
        Arguments of the ``load`` methods; empty if there is no checkpoint yet.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        ``latest.json`` is damaged.
    """
    path = Path(folder, LATEST)
    try:
        latest = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    match latest:
        case {"run": str(run), "parts": [*names]} if re.fullmatch(shards.RUN, run):
            if all(map(_is_file_name, names)):
                return {name: Path(folder, run, name) for name in names}
    raise CheckpointError(f"{path}: not a file of save_checkpoint()")


def _is_file_name(name: object) -> bool:
    """Whether a name is that of a file in the folder."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _agreed(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """Do the work of this rank, and return its result; an error is raised on all ranks."""
    result, error = attempt(work)
    if error is not None and is_agreed(error):
        raise error
    agree(ranks, (), error)
    return result
