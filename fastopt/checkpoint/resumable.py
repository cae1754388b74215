"""Saving and loading of updaters."""

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fastopt._advice import UPDATER_ARGUMENTS, UPDATER_ATTRIBUTES, UPDATER_NAMES
from fastopt._interrupts import between_updates
from fastopt.arguments import flag, without_address
from fastopt.checkpoint.foreign.mxnet import described_by_mxnet
from fastopt.checkpoint.format.errors import read_from
from fastopt.checkpoint.format.files import PathLike, write_atomically
from fastopt.checkpoint.format.objects import PLAIN
from fastopt.checkpoint.format.tree import chunks, dumps, loads, read
from fastopt.checkpoint.restore.describe import Stateful, describe
from fastopt.checkpoint.restore.groups import (
    described_groups,
)
from fastopt.checkpoint.restore.parameters import Skipped
from fastopt.checkpoint.restore.progress import (
    indices_of,
    progress_of,
)
from fastopt.checkpoint.restore.restore import restore, restore_states
from fastopt.checkpoint.restore.shards import is_of_ranks, whole


class Resumable(Stateful):
    """Abstract base of :class:`~fastopt.optimizer.Updater` that saves and loads its states."""

    elsewhere: ClassVar[Mapping[str, str]] = UPDATER_ATTRIBUTES

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATER_NAMES
    argument_advice: ClassVar[Mapping[str, str]] = UPDATER_ARGUMENTS

    def __repr__(self) -> str:
        own, arguments = vars(self), inspect.signature(type(self).__init__).parameters
        settings = ""
        for name, parameter in list(arguments.items())[2:]:
            value = own.get(name)
            if value is not None and value != parameter.default:
                settings += f"{name}={_shown(value)}, "
        number = len(own.get("states", ()))
        return f"{type(self).__name__}({own.get('optimizer')!r}, {settings}states={number})"

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states of all indices as safetensors bytes.

        Parameters
        ----------
        dump_optimizer : bool
            Include the optimizer: hyper-parameters, update counts, schedule, everything except
            ``param_dict``. Without it, update counts are not saved: an updater that loads the
            states keeps its own. Default False.

        Returns
        -------
        bytes
            Argument for :meth:`set_states`.

        Raises
        ------
        TypeError
            A state or an attribute of the optimizer contains something other than None, numbers,
            strings, arrays, tuples, lists and dicts; or `dump_optimizer` is not a bool.
        RuntimeError
            See :meth:`save`.
        """
        optimizer = self.optimizer if flag("dump_optimizer", dump_optimizer) else None
        with between_updates(self.lock, "get_states()"):
            progress = progress_of(self, {index: index for index in indices_of(self)})
            tree: dict[str, Any] = {"states": self.states, "optimizer": optimizer, **progress}
            if optimizer is not None and self.groups:
                tree["groups"] = described_groups(self.groups)
            return dumps(tree)

    def set_states(self, states: bytes) -> None:
        """Replace the states by those from :meth:`get_states`, and restore the optimizer if saved.

        An optimizer of the same class is restored in place, another one is replaced; either has no
        ``param_dict`` then. A schedule of the same class stays the same object, as in
        :meth:`load`.

        Parameters
        ----------
        states : bytes
            Result of :meth:`get_states`.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            The bytes are damaged, cannot be read, or do not match the optimizer. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> old, new = (optimizer.get_updater(optimizer.Adam()) for _ in range(2))
        >>> weight = np.ones(2)
        >>> old(0, np.ones(2), weight)
        >>> new.set_states(old.get_states())
        >>> new.states[0]
        (array([0.1, 0.1]), array([0.001, 0.001]))
        """
        restore_states(self, loads(states, self.optimizer))

    def save(self, path: PathLike) -> None:
        """Write a checkpoint from which a later run can continue; see :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file. An existing file is replaced atomically.

        Raises
        ------
        TypeError
            A state or an attribute of the optimizer contains something other than None, numbers,
            strings, arrays, tuples, lists and dicts.
        fastopt.checkpoint.CheckpointError
            The metadata is larger than :meth:`load` accepts.
        OSError
            The file cannot be written. An existing file is unchanged.
        RuntimeError
            The call comes from inside an update, for example from a signal handler.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> old, new = (optimizer.get_updater(optimizer.Adam(wd=wd)) for wd in (0.1, 0.0))
        >>> old(0, np.ones(2), np.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old.save(f"{folder}/adam.safetensors")
        ...     new.load(f"{folder}/adam.safetensors")
        Skipped(missing=[], extra=[])
        >>> new.optimizer.wd, new.optimizer.num_update
        (0.1, 1)
        """
        with between_updates(self.lock, "save()"):
            write_atomically(path, chunks(describe(self)))

    def load(self, path: PathLike, strict: bool = True) -> Skipped:
        """Load a checkpoint of :meth:`save`: states, hyper-parameters, update counts, loss scale.

        The optimizer stays the same object and keeps its ``param_dict``. A schedule of the same
        class, of the optimizer or a group, stays the same object too. Parameters are matched by
        name where names are known, otherwise by index.

        Parameters
        ----------
        path : str or os.PathLike
            File written by :meth:`save` of an updater whose optimizer has the same class, or of a
            :class:`fastopt.distributed.ShardedUpdater`, whose shards are merged.
        strict : bool
            Raise an error if the file lacks parameters of this updater or has additional ones.
            Otherwise missing parameters start from scratch, and additional ones are ignored.
            Default True.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the file, and of the ``extra`` ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            The file is damaged, does not match, or cannot be read. Nothing changes.
        """
        with read_from(path), open(os.fspath(path), "rb") as file:
            saved = read(file, self.optimizer)
            if is_of_ranks(saved):
                saved = whole(self.optimizer, path, saved)
            return restore(self, saved, strict)

    def states_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint as a dict, with copies of the arrays.

        Raises
        ------
        TypeError, RuntimeError
            See :meth:`save`.
        """
        with between_updates(self.lock, "states_dict()"):
            copied: dict[str, Any] = _copied(describe(self))
            return copied

    def load_states_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Restore the result of :meth:`states_dict`.

        Parameters
        ----------
        states : dict
            Result of :meth:`states_dict`.
        strict : bool
            See :meth:`load`, also for the result and errors.
        """
        return restore(self, _copied(states), strict)

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint; alias of :meth:`states_dict` with torch's name."""
        return self.states_dict()

    def load_state_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Restore the result of :meth:`state_dict`; alias of :meth:`load_states_dict`.

        Parameters
        ----------
        states, strict
            See :meth:`load_states_dict`, also for the result and errors.
        """
        return self.load_states_dict(states, strict)

    def load_mxnet(
        self, path: PathLike | bytes, strict: bool = True, max_bytes: int | None = None
    ) -> Skipped:
        """Load states that MXNet's ``get_states`` wrote.

        If the file contains the optimizer, those of its attributes that this optimizer also has are
        loaded, except the schedule. Otherwise hyper-parameters and update counts are unchanged.

        Parameters
        ----------
        path : str, os.PathLike or bytes
            The file or its contents.
        strict : bool
            See :meth:`load`, also for the result and errors.
        max_bytes : int, optional
            See :func:`~fastopt.checkpoint.load_mxnet_states`.
        """
        return restore(self, described_by_mxnet(self, path, max_bytes), strict)


def _copied(tree: Any) -> Any:
    """Deep copy of a checkpoint, fast for arrays, numbers and strings."""
    kind = type(tree)
    if kind is dict:
        return {key: _copied(part) for key, part in tree.items()}
    if kind is tuple or kind is list:
        return kind(map(_copied, tree))
    if kind is np.ndarray:
        return tree.copy("K")
    return tree if kind in PLAIN else copy.deepcopy(tree)


def _shown(value: Any) -> str:
    """Representation of an argument, without addresses."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(part)}' for key, part in value.items())}}}"
    return without_address(repr(value), value)
