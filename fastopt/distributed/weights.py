"""What a sharded updater does with weights between updates: files, averages, masters and copies."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from fastopt._engine.validate import check_index, check_like, label
from fastopt._interrupts import between_updates
from fastopt._updater.averaged import averages_of, evaluates, held
from fastopt.checkpoint.format.container import can_hold
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.restore.parameters import Skipped
from fastopt.checkpoint.restore.placement import Form, Placement, placed
from fastopt.checkpoint.restore.shards import Saved
from fastopt.distributed.agreement import attempt
from fastopt.distributed.checksum import checksum
from fastopt.distributed.plan import flat
from fastopt.distributed.planning import Planning, check_numpy
from fastopt.distributed.resumable import listing
from fastopt.distributed.slices import Slices, by_index
from fastopt.optimizer.accumulation import Windows
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import HALVES


class WeightKeeper(Planning):
    """Abstract base of :class:`~fastopt.distributed.ShardedUpdater` without updates.

    All ranks have all weights; each rank has the state, the average and the master of its slices.
    """

    _windows: Windows | None

    def save(self, path: PathLike, weights: Mapping[Any, Array] | None = None) -> None:
        """Write a checkpoint from which a later run can continue; all ranks must call it.

        Each rank writes its own shard next to `path`. The index file `path`, which lists the
        shards, is written last and replaces an older one, whose shards are then removed. A crash at
        any moment leaves either the old checkpoint or the new one; a failed save leaves the old
        one. See :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks share, the same on all ranks.
        weights : mapping of index to numpy.ndarray, optional
            Weights to save together with the states, so that they belong to the same step. They
            must have been updated by this updater, or belong to a frozen group. Each rank writes
            its slices; all ranks must pass the same indices, and equal frozen weights.

        Raises
        ------
        TypeError
            See :meth:`Updater.save <fastopt.optimizer.Updater.save>`.
        ValueError
            A weight was not updated yet and is not frozen, or has another shape or dtype, or ranks
            disagree.
        OSError
            A file cannot be written on some rank, or rank 0 does not see the files of other ranks.
            All ranks raise the error; the old checkpoint is unchanged, unless only the directory
            could not be synced: then `path` is the new one, and the files of both are kept.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> old, new = (ShardedUpdater(optimizer.Adam(), MPI.COMM_WORLD) for _ in range(2))
        >>> weight, other = np.ones(2), np.zeros(2)
        >>> old(0, np.ones(2), weight)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old.save(f"{folder}/adam.safetensors", {0: weight})
        ...     new.load(f"{folder}/adam.safetensors", weights={0: other})
        Skipped(missing=[], extra=[])
        >>> other
        array([0.999, 0.999])
        """
        frozen = dict[Index, Placement]()

        def slices() -> dict[Index, Array]:
            if self._windows is not None and self._windows.calls:
                raise ValueError(
                    f"gradients of {len(self._windows.calls)} parameters wait for their update; "
                    "save after the last call of accumulate, or after finish()"
                )
            chosen = by_index(weights)
            frozen.update(self._placed_frozen(chosen))
            for index in chosen.keys() - frozen.keys():
                self._check_like(index, chosen[index], written=False)
            return Slices(self, chosen, placements=frozen).own

        def compared() -> dict[str, str]:
            names, own = self.optimizer.idx2name, by_index(weights)
            return {
                f"frozen weight of {label(i, names)}": f"{place.dtype} of shape {place.shape} with "
                f"checksum {checksum(own[i]):#x}"
                for i, place in frozen.items()
            }

        self._save(path, slices, frozen, compared)

    def _placed_frozen(self, weights: Mapping[Index, Array]) -> dict[Index, Placement]:
        """Return placements of frozen weights that have none, as no update has sharded them.

        They are those of one file: a later update may need another form.
        """
        flat_form: Form = "flat"
        new = []
        for index in sorted(weights.keys() - self.placements.keys(), key=repr):
            if self.shard._is_frozen(index):
                array, context = weights[index], label(index, self.optimizer.idx2name)
                check_numpy(context, "weight", array)
                kind, shape = array.dtype, array.shape
                check_like(context, "weight", array, (kind.name,), shape, written=False)
                if not can_hold(kind):
                    raise TypeError(f"{context}: weight cannot be saved with dtype {kind}")
                new.append((index, shape, kind.name, flat_form))
        return placed(new, self.ranks)

    def load(
        self, path: PathLike, strict: bool = True, weights: Mapping[Any, Array] | None = None
    ) -> Skipped:
        """Restore a checkpoint written on any number of ranks; all ranks must call it.

        Checkpoints of :meth:`fastopt.optimizer.Updater.save` can be loaded too; each rank then
        keeps the whole state of a weight until its first update. Conversely,
        :meth:`fastopt.optimizer.Updater.load` reads sharded checkpoints. The first update after a
        load compares the weights between ranks.

        Parameters
        ----------
        path : str or os.PathLike
            File written by :meth:`save`.
        strict : bool
            Raise an error if the checkpoint lacks parameters of this updater or has additional
            ones. Otherwise missing parameters start from scratch, and additional ones are ignored.
            Default True.
        weights : mapping of index to numpy.ndarray, optional
            Arrays to which the weights of the checkpoint are written, with the same indices on all
            ranks.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the checkpoint, and of the ``extra``
            ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            On some rank, a file is missing, damaged, of another run, or cannot be read, or lacks
            one of `weights`. All ranks raise the error, and nothing changes.
        ValueError
            Ranks disagree, such as on the indices of `weights`.
        """
        found, error = attempt(by_index, weights)
        chosen: dict[Index, Array] = found or {}
        own: dict[Index, Array] = {}

        def check(saved: Saved) -> None:
            own.update((i, part) for i, part in saved.weights.items() if i in chosen)
            for index, array in chosen.items():
                context = label(index, self.optimizer.idx2name)
                placement = saved.frozen.get(index) or saved.placements.get(index)
                if index not in saved.weights or placement is None:
                    raise CheckpointError(f"{os.fspath(path)}: it has no weight of {context}")
                check_like(context, "weight", array, (placement.dtype,), placement.shape)

        with self.optimizer.call_lock:
            skipped = self._load(path, strict, check, chosen, error)
            with self._updating(lambda: True):
                Slices(self, {index: chosen[index] for index in own}, own).gather()
        return skipped

    def _take_up(self, saved: Saved) -> None:
        super()._take_up(saved)
        if self._windows is not None:
            self._windows.clear()
        self._plan = None
        self._plans.clear()
        self._unsure.update(self.placements)

    def flush(self, index: Any, weight: Array | None = None) -> None:
        """Apply deferred weight decay to all rows of a weight; all ranks must call it.

        See :meth:`fastopt.optimizer.Updater.flush`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the parameter.
        weight : numpy.ndarray, optional
            Its weight. Default: the weight in the last call.

        Raises
        ------
        ValueError
            The parameter was never updated, or `weight` is missing and was not in the last call.
        """
        with self.optimizer.call_lock:
            self._together(
                "flush",
                self._flush,
                lambda: self._known(index, weight),
                lambda found: {"index": repr(found[0])},
            )

    def _flush(self, found: tuple[Index, Slices]) -> None:
        """Apply deferred decay to this rank's slice of a weight, and gather the weight."""
        index, slices = found
        self.shard._flush(index, slices.own[index])
        slices.gather()

    def _known(self, index: Any, weight: Array | None) -> tuple[Index, Slices]:
        """Index and this rank's slice of a parameter that has been updated."""
        index = check_index(index)
        context = label(index, self.optimizer.idx2name)
        self._check_free()
        weight = self._latest.get(index) if weight is None else weight
        if weight is None or index not in self.placements:
            raise ValueError(f"{context}: flush needs the weight, and an update before it")
        self._check(index, np.zeros_like(weight), weight)
        return index, Slices(self, {index: weight})

    # Averages of the weights

    @property
    def averages(self) -> dict[Index, Array]:
        """Average of this rank's slice of each parameter; see :attr:`Updater.averages`."""
        return self.shard.averages

    @contextmanager
    def averaged(self, weights: Mapping[Any, Array] | None = None) -> Iterator[None]:
        """Context in which all ranks have the averages in their weights; all ranks must enter it.

        See :meth:`fastopt.optimizer.Updater.averaged`. Each rank restores its weights on exit
        without waiting for others. :meth:`save` inside the context writes the averages as weights,
        and also the replaced values; after loading such a file call :meth:`restore_weights`.

        Parameters
        ----------
        weights : mapping of index to numpy.ndarray, optional
            Weights that this updater has not updated yet, for example after a load. Default: the
            last updated weight of each index.

        Raises
        ------
        RuntimeError
            Neither the updater nor the optimizer has averages, or the weights already hold them.
        TypeError, ValueError
            An index has no known weight, a weight does not match, or ranks disagree.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> from mpi4py import MPI
        >>> from fastopt.mpi import ShardedUpdater
        >>> sgd, ema = fastopt.SGD(learning_rate=1.0), fastopt.EMA(decay=0.5)
        >>> updater = ShardedUpdater(sgd, MPI.COMM_WORLD, average=ema)
        >>> weight = np.zeros(1)
        >>> updater(0, np.array([-1.0]) / MPI.COMM_WORLD.size, weight)
        >>> with updater.averaged():
        ...     print(weight)
        [0.5]
        >>> weight
        array([1.])
        """
        with between_updates(self.optimizer.call_lock, "averaged()"):
            pass
        with ExitStack() as stack:
            self._together(
                "averaged",
                lambda slices: stack.enter_context(slices.averaged(self.shard)),
                lambda: self._evaluated(weights),
                lambda slices: {"weights": listing(slices.weights)},
            )
            yield

    def _evaluated(self, weights: Any) -> Slices:
        """Return this rank's slices of the weights that :meth:`averaged` replaces."""
        shard, names = self.shard, self.optimizer.idx2name
        if not evaluates(shard):
            averages_of(shard)
        self._check_free()
        latest = {i: array for i, array in self._latest.items() if i in self.placements}
        chosen = {**latest, **by_index(weights)}
        for index in chosen.keys() - self.placements.keys():
            if not shard._is_frozen(index):
                raise ValueError(f"{label(index, names)}: the updater has no average of it")
        needed = [index for index in self.placements if not shard._is_frozen(index)]
        for index in needed:
            if index not in chosen:
                raise ValueError(
                    f"{label(index, names)}: its weight was not updated yet by this updater; pass "
                    "it in weights={index: array}"
                )
            self._check_like(index, chosen[index])
        return Slices(self, {index: chosen[index] for index in needed})

    def restore_weights(self, weights: Mapping[Any, Array]) -> None:
        """Restore weights after loading a checkpoint that was saved inside :meth:`averaged`.

        All ranks must call it. See :meth:`fastopt.optimizer.Updater.restore_weights`.

        Parameters
        ----------
        weights : mapping of index to numpy.ndarray
            The weights, which are overwritten, with the same indices on all ranks.

        Raises
        ------
        RuntimeError
            No state that was saved inside :meth:`averaged` has been loaded.
        TypeError, ValueError
            A weight is missing or does not match, or ranks disagree. Nothing changes.
        """

        def check() -> Slices:
            original, chosen = held(self.shard), by_index(weights)
            for index in original.keys() - chosen.keys():
                context = label(index, self.optimizer.idx2name)
                raise ValueError(f"{context}: pass its weight in weights={{index: array}}")
            for index in self._placed_frozen(chosen):
                del chosen[index]
            for index, weight in chosen.items():
                self._check_like(index, weight)
            return Slices(self, chosen)

        def restore(slices: Slices) -> None:
            self.shard.restore_weights(slices.own)
            slices.gather()

        with self.optimizer.call_lock:
            self._together(
                "restore_weights",
                restore,
                check,
                lambda slices: {"weights": listing(slices.weights)},
            )

    def _check_free(self) -> None:
        """Raise RuntimeError while the weights hold their averages."""
        if self.shard._averages is not None:
            self.shard._averages.check_free()

    def _check_like(self, index: Index, array: Any, written: bool = True) -> None:
        """Raise an error unless a weight was updated and still has its shape and dtype."""
        context, placement = label(index, self.optimizer.idx2name), self.placements.get(index)
        if placement is None:
            raise ValueError(
                f"{context}: its weight was not updated yet; call the updater with it before"
            )
        check_like(context, "weight", array, (placement.dtype,), placement.shape, written=written)

    # Masters and copies

    def set_master(self, index: Any, array: Array) -> None:
        """Set the float32 master of a half-precision weight; call it on all ranks.

        See :meth:`fastopt.optimizer.Updater.set_master`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the parameter. The optimizer must have ``multi_precision=True``.
        array : numpy.ndarray
            Exact values of the whole weight, float32, equal on all ranks; they are copied. The next
            update or save compares them between ranks.

        Raises
        ------
        TypeError, ValueError
            The optimizer keeps no masters, or the array does not match. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> sgd = optimizer.SGD(learning_rate=1.0, multi_precision=True)
        >>> updater, exact = ShardedUpdater(sgd, MPI.COMM_WORLD), np.full(2, 0.1, np.float32)
        >>> updater.set_master(0, exact)
        >>> updater(0, np.zeros(2, np.float16), exact.astype(np.float16))
        >>> updater.states[0][1]
        array([0.1, 0.1], dtype=float32)
        """
        index = check_index(index)
        context, placement = label(index, self.optimizer.idx2name), self.placements.get(index)
        check_like(context, "master", array, ("float32",), np.shape(array), written=False)
        if placement is None or index not in self.states:
            if not self.shard.of(index).multi_precision:
                raise ValueError(
                    f"{context}: a master needs an optimizer with multi_precision=True"
                )
            self._masters[index] = array.copy()
        elif array.shape != placement.shape:
            raise ValueError(
                f"{context}: master must have shape {placement.shape}, got {array.shape}"
            )
        else:
            self.shard.set_master(index, placement.slice_of(flat(array), self.rank))
        self._unchecked[f"checksum of the master of {context}"] = f"{checksum(array):#x}"

    def set_copy(self, index: Any, array: Array | None) -> None:
        """Set a half-precision copy of a float32 weight that each update on this rank writes too.

        See :meth:`fastopt.optimizer.Updater.set_copy`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the parameter.
        array : numpy.ndarray or None
            The copy, float16 or bfloat16, in the weight's shape. None removes it.

        Raises
        ------
        TypeError, ValueError
            `array` has another type or dtype, or is read-only; or, at the next update, its shape is
            not that of the weight.
        """
        index = check_index(index)
        if array is None:
            self._copies.pop(index, None)
            return
        context = label(index, self.optimizer.idx2name)
        check_like(context, "copy", array, HALVES, np.shape(array))
        self._copies[index] = array
