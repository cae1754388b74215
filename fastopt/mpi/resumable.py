"""Sharded updaters and tables that can be saved and go on from what was saved."""

import os
from contextlib import suppress
from typing import Any

from fastopt.checkpoint.describe import Stateful
from fastopt.checkpoint.files import PathLike
from fastopt.checkpoint.parameters import Skipped
from fastopt.checkpoint.restore import restore
from fastopt.mpi.agreement import Facts, attempt
from fastopt.mpi.checkpoint import new_run, remove_others, shard_path, write_index, write_shard
from fastopt.mpi.collectives import share_texts
from fastopt.mpi.reading import Saved, read_saved
from fastopt.mpi.sharded import Sharded
from fastopt.optimizer.optimizer import Array, Index

__all__ = ["Resumable"]


class Trial(Stateful):
    """What takes up a checkpoint at first; it knows all parameters that this rank knows."""

    def __init__(self, sharded: Sharded) -> None:
        self.optimizer = sharded.optimizer
        self.loss_scaler, self.clip_global_norm = sharded.loss_scaler, sharded.clip_global_norm
        self.states = {index: sharded.states.get(index) for index in sharded.placements}
        self.states_synced = {}


class Resumable(Sharded):
    """Abstract base of sharded updaters and tables: their states as files."""

    def save(self, path: PathLike) -> None:
        """Write all that a later run needs to go on; all ranks call. See :meth:`load`.

        Each rank writes a file of its own next to `path`; the file `path`, which lists them, comes
        last and takes the place of an older one, whose files are then removed. A job that ends at
        any moment leaves the old checkpoint or the new one.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks can write to, the same on all ranks.

        Raises
        ------
        TypeError
            See :meth:`Updater.save <fastopt.optimizer.Updater.save>`.
        OSError
            A file cannot be written, on some rank. All ranks raise it; the old checkpoint is as it
            was.

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
        facts = Facts(path=os.fspath(path))
        with self.optimizer.lock:
            self._begin("save")
            self._agree(facts, None)
            run = share_texts(self._ranks, new_run())[0]
            try:
                _, error = attempt(write_shard, self, path, run, self._weights())
                self._agree(facts, error)
                if self.rank == 0:
                    _, error = attempt(write_index, self, path, run, self._kind, self._masters)
                self._agree(facts, error)
            except BaseException:
                with suppress(OSError):
                    shard_path(path, run, self.rank, self.ranks).unlink()
                raise
            if self.rank == 0:
                with suppress(OSError):  # the next save tries again
                    remove_others(path, run)
            self._agree(facts, None)

    def load(self, path: PathLike, strict: bool = True) -> Skipped:
        """Take up what :meth:`save` wrote on any number of ranks; all ranks call.

        Parameters
        ----------
        path : str or os.PathLike
            From :meth:`save`.
        strict : bool
            Refuse a checkpoint that lacks parameters of this updater or has others. Else those that
            it lacks begin anew, and the others are left out. Default True.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the checkpoint, and of the ``extra``
            ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            A file is missing, damaged, of another run, or cannot be read, on some rank. All ranks
            raise it, and nothing changes.
        """
        facts = Facts(path=os.fspath(path), strict=str(strict))
        with self.optimizer.lock:
            self._begin("load")
            found, error = attempt(read_saved, self, path, self._kind)
            self._agree(Facts({**facts, "run": found[0] if found else ""}), error)
            saved: Saved = found[1]
            before, trial = self._snapshot(), Trial(self)
            skipped, error = attempt(restore, trial, saved.updater, strict)
            try:
                self._agree(facts, error)
            except BaseException:
                self._put_back(*before)
                raise
            for name, value in vars(trial).items():
                setattr(self.shard, name, value)
            self._take_up(saved)
            result: Skipped = skipped
            return result

    @property
    def _kind(self) -> str:
        """What files of this kind are from."""
        return type(self).__name__

    def _weights(self) -> dict[Index, Array]:
        """Weights that live here only."""
        return {}

    def _take_up(self, saved: Saved) -> None:
        """Go on from what was saved besides the states."""
        self.placements.update(saved.placements)
        self._masters = saved.masters

    def _snapshot(self) -> tuple[Any, ...]:
        """What :meth:`load` replaces before the ranks have agreed."""
        scaler = self.loss_scaler
        return vars(self.optimizer).copy(), scaler.state_dict() if scaler else None

    def _put_back(self, optimizer: dict[str, Any], scale: Any) -> None:
        vars(self.optimizer).update(optimizer)
        self.optimizer._changed_tables()
        if self.loss_scaler:
            self.loss_scaler.load_state_dict(scale)
