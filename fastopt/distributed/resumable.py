"""Saving and loading of sharded updaters and tables."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastopt._engine.averaging import Averages
from fastopt._engine.validate import label
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.objects import is_registered
from fastopt.checkpoint.restore.parameters import Skipped, keys_of, match, names_of
from fastopt.checkpoint.restore.placement import Placement
from fastopt.checkpoint.restore.restore import check_outside, restore
from fastopt.checkpoint.restore.shards import (
    BY_ROW,
    Reading,
    Saved,
    cut_state,
    read_saved,
    tables_of,
)
from fastopt.distributed.agreement import Facts, attempt
from fastopt.distributed.checkpoint import arrays_by_index, write_index, write_shard, write_together
from fastopt.distributed.sharded import Sharded
from fastopt.distributed.slices import NOTHING
from fastopt.lr_scheduler.base import restored
from fastopt.optimizer.accumulation import Windows
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Array, Index


class Trial:
    """Temporary updater, with this rank's parameters, into which a checkpoint is restored first."""

    states_synced: dict[Index, bool]
    _windows: Windows | None = None

    def __init__(self, sharded: Sharded) -> None:
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
        Skipped(missing=[], extra=[])
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
            write_together(
                self,
                path,
                lambda run: write_shard(self, path, run, slices, frozen),
                lambda run: write_index(self, path, run, self._kind, self._masters, frozen),
            )

        with self.optimizer.call_lock:
            self._together(
                "save",
                write,
                weights,
                lambda slices: {
                    "path": os.fspath(path),
                    "weights": listing(slices),
                    **self._unchecked,
                    **compared(),
                },
            )

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
        return self._load(path, strict, _nothing_more)

    def _load(
        self,
        path: PathLike,
        strict: bool,
        check: Callable[[Saved], None],
        weights: Iterable[Index] = (),
        error: Exception | None = None,
    ) -> Skipped:
        """Load a checkpoint for which the function `check` does not raise an error.

        `weights` are the indices of the weights to load, or there is an `error` in them.
        """
        facts = Facts(path=os.fspath(path), strict=str(strict), weights=listing(weights))
        with self.optimizer.call_lock:
            self._begin("load")
            found: Any = None
            if error is None:
                found, error = attempt(self._read, path)
            self._agree(Facts({**facts, "run": found[0] if found else ""}), error)
            saved: Saved = found[1]
            before, trial = self._snapshot(), Trial(self)
            schedules = [  # which are restored in place
                each.lr_scheduler for each in before[0] if is_registered(each.lr_scheduler)
            ]
            copies = copy.deepcopy(schedules)
            skipped, error = attempt(self._restored, trial, saved, strict)
            _, problem = attempt(check, saved)
            error = error or problem
            try:
                self._agree(facts, error)
            except BaseException:
                self._put_back(*before)
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
                setattr(self.shard, name, value)
            self._take_up(saved)
            result: Skipped = skipped
            return result

    def _read(self, path: PathLike) -> tuple[str, Saved]:
        """Read the part of a checkpoint that this rank loads."""
        check_outside(self.shard)
        reading = Reading(self.optimizer, self.rank, self.ranks, self.placements)
        return read_saved(reading, path, self._kind)

    def _restored(self, trial: Trial, saved: Saved, strict: bool) -> Skipped:
        """Restore a checkpoint into `trial`, slicing whole states if their placement is known."""
        optimizer, tree = self.optimizer, saved.updater
        if isinstance(tree, dict) and isinstance(tree.get("parameters"), dict):
            keys = tree["parameters"]
            found = match(keys, keys_of(names_of(optimizer), self.placements)).index
            for key, index in keys.items():
                placement = self.placements.get(found.get(index, index))
                if placement is None or key in saved.cut:
                    continue
                context = f"parameter {key!r}"
                states, *averages = tables_of(tree)
                attributes = arrays_by_index(tree["attributes"])
                for kind, table, name in [
                    ("states", states, key),
                    *(("averages", each, key) for each in averages),
                    *((kind, each, index) for kind, each in attributes.items()),
                ]:
                    if isinstance(table, dict) and name in table:
                        value = table.pop(name)
                        if self._takes(kind, placement):
                            by_row = kind in BY_ROW
                            table[name] = cut_state(value, placement, self.rank, context, by_row)
            saved.masters = {found.get(i, i): array for i, array in saved.masters.items()}
        skipped = restore(trial, tree, strict)
        if trial.groups is not None:
            try:
                self.shard.check_rules(Groups(trial.groups, trial.optimizer))
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
        context = label(index, self.optimizer.idx2name)
        return {
            name: cut_state(value, placement, self.rank, context, name in BY_ROW)
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

    def _take_up(self, saved: Saved) -> None:
        """Restore the parts of a checkpoint other than the states."""
        self.placements.update(saved.placements)
        self._masters = saved.masters
        self._unchecked.clear()

    def _snapshot(self) -> tuple[Any, ...]:
        """Snapshot of what :meth:`load` changes before the ranks have agreed."""
        scaler = self.loss_scaler
        optimizers = {each: each.snapshot() for each in self.shard.parameters.optimizers()}
        return optimizers, scaler.state_dict() if scaler else None

    def _put_back(self, optimizers: Mapping[Any, Any], scale: Any) -> None:
        for optimizer, saved in optimizers.items():
            optimizer.put_back(saved)
        if self.loss_scaler:
            self.loss_scaler.load_state_dict(scale)


def listing(indices: Iterable[Index]) -> str:
    """Indices in an order that does not depend on that of a dictionary, for comparison."""
    return ", ".join(sorted(map(repr, indices))) or "none"


def _nothing_more(saved: Saved) -> None:
    """Accept every checkpoint."""
