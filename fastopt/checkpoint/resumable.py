"""Updaters that can be saved and go on from what was saved."""

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from fastopt.arguments import flag, without_address
from fastopt.checkpoint.describe import Stateful, describe
from fastopt.checkpoint.errors import CheckpointError, read_from
from fastopt.checkpoint.files import PathLike, write_atomically
from fastopt.checkpoint.fitting import check_states
from fastopt.checkpoint.groups import (
    check_average,
    described_groups,
    restored_groups,
    with_present,
)
from fastopt.checkpoint.mxnet import described_by_mxnet
from fastopt.checkpoint.parameters import Skipped
from fastopt.checkpoint.progress import (
    PROGRESS,
    check_outside,
    checked_progress,
    indices_of,
    progress_of,
)
from fastopt.checkpoint.restore import restore
from fastopt.checkpoint.shards import is_of_ranks, whole
from fastopt.checkpoint.tree import chunks, dumps, loads, read
from fastopt.naming import Constructor
from fastopt.optimizer.optimizer import Optimizer

__all__ = ["HYPER_PARAMETERS", "Resumable"]

HYPER_PARAMETERS = (
    *("learning_rate", "lr", "momentum", "wd", "weight_decay", "betas", "beta1", "beta2", "eps"),
    *("epsilon", "lr_scheduler", "clip_gradient", "rescale_grad", "multi_precision"),
)
"""Arguments of optimizers that are often passed to what takes an optimizer."""


class Resumable(Stateful, metaclass=Constructor):
    """Abstract base of :class:`~fastopt.optimizer.Updater`: its states as bytes and files."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("update", "apply_gradients", "apply", "minimize"),
            "updater.step(grads, weights) updates nested weights, updater(index, grad, weight) "
            "an array or lists",
        ),
        **dict.fromkeys(("init", "build"), "states are made at the first update of an index"),
        "zero_grad": "gradients are arguments of each call, there are none to set to zero",
        "param_groups": "updater.optimizer has the hyper-parameters, updater.groups those of "
        "groups of weights",
        "add_param_group": "a weight is new with its first update; assign updater.groups to "
        "change groups",
        "state": "updater.states has the state of each index",
        "lr": "updater.optimizer.learning_rate is the rate",
        "learning_rate": "updater.optimizer.learning_rate is the rate",
        "set_learning_rate": "updater.optimizer.set_learning_rate() sets the rate",
        "compute_gradients": "gradients are computed by your code, and passed to the call",
    }

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("clip_norm", "max_norm", "max_grad_norm"), ("clip_global_norm",)),
        **dict.fromkeys(("scaler", "grad_scaler"), ("loss_scaler",)),
        **dict.fromkeys(("ema", "use_ema", "ema_decay"), ("average",)),
        **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps"), ("accumulate",)),
        "param_groups": ("groups",),
    }
    argument_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        HYPER_PARAMETERS, "it is an argument of the optimizer: optimizer.create(name, ...)"
    )

    def __repr__(self) -> str:
        own, arguments = vars(self), inspect.signature(type(self).__init__).parameters
        words = ""
        for name, parameter in list(arguments.items())[2:]:
            value = own.get(name)
            if value is not None and value != parameter.default:
                words += f"{name}={_shown(value)}, "
        number = len(own.get("states", ()))
        return f"{type(self).__name__}({own.get('optimizer')!r}, {words}states={number})"

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states of all indices as safetensors bytes.

        Parameters
        ----------
        dump_optimizer : bool
            Put in the optimizer too: hyper-parameters, counts, schedule, everything but
            ``param_dict``. Without it update counts begin anew. Default False.

        Returns
        -------
        bytes
            For :meth:`set_states`.

        Raises
        ------
        TypeError
            A state or an attribute of the optimizer is not made of None, numbers, strings,
            arrays, and tuples, lists and dicts of these; or `dump_optimizer` is not a bool.
        """
        optimizer = self.optimizer if flag("dump_optimizer", dump_optimizer) else None
        progress = progress_of(self, {index: index for index in indices_of(self)})
        tree: dict[str, Any] = {"states": self.states, "optimizer": optimizer, **progress}
        if optimizer is not None and self.groups:
            tree["groups"] = described_groups(self.groups)
        return dumps(tree)

    def set_states(self, states: bytes) -> None:
        """Replace the states by those from :meth:`get_states`, and the optimizer if it is there.

        Parameters
        ----------
        states : bytes
            From :meth:`get_states`.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            The bytes are damaged or cannot be read, or do not fit the optimizer. Nothing changes.

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
        check_outside(self)
        tree = loads(states, self.optimizer)
        match tree:
            case {"states": dict(), "optimizer": None | Optimizer(), **rest} if not (
                rest.keys() - {"groups", *PROGRESS}
            ):
                made, groups = tree["optimizer"] or self.optimizer, self.groups
                try:
                    if "groups" in tree:
                        groups = restored_groups(tree["groups"], groups)
                    check_states(made, tree["states"], groups)
                    average = getattr(self, "average", None)
                    check_average(made, groups, average, tree.get("averages"))
                    restore_progress = checked_progress(self, tree, None)
                except CheckpointError:
                    raise
                except Exception as error:  # whatever else foreign numbers lead to
                    raise CheckpointError(f"not the states of an updater: {error}") from error
                if "groups" in tree:
                    groups = with_present(groups, self.groups)
                    self.groups = None  # which need not fit the new optimizer
                self.states, self.optimizer = tree["states"], made
                if "groups" in tree:
                    self.groups = groups
                self.states_synced = dict.fromkeys(self.states, False)
                restore_progress()
            case _:
                raise CheckpointError(
                    "not the states of an updater, which get_states() makes; load() reads files of "
                    "save()"
                )

    def save(self, path: PathLike) -> None:
        """Write all that a later run needs to go on; see :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file. It replaces an older one whole or not at all.

        Raises
        ------
        TypeError
            A state is not made of None, numbers, arrays, and tuples, lists and dicts of these, or
            an attribute of the optimizer is not.
        fastopt.checkpoint.CheckpointError
            The text besides the arrays is larger than :meth:`load` admits.
        OSError
            The file cannot be written. The older one is as it was.

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
        with self.optimizer.lock:
            write_atomically(path, chunks(describe(self)))

    def load(self, path: PathLike, strict: bool = True) -> Skipped:
        """Take up what :meth:`save` wrote: states, hyper-parameters, counts, loss scale.

        The optimizer stays the same object, with its ``param_dict``. Parameters are found by name
        where names are known, else by index.

        Parameters
        ----------
        path : str or os.PathLike
            From :meth:`save` of an updater whose optimizer is of the same class; also of a
            :class:`fastopt.mpi.ShardedUpdater`, whose files are put together.
        strict : bool
            Refuse a file that lacks parameters of this updater or has others. Else those that it
            lacks begin anew, and the others are left out. Default True.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the file, and of the ``extra`` ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            The file is damaged, does not fit, or cannot be read. Nothing changes.
        """
        with read_from(path), open(os.fspath(path), "rb") as file:
            saved = read(file, self.optimizer)
            if is_of_ranks(saved):
                saved = whole(self.optimizer, path, saved)
            return restore(self, saved, strict)

    def states_dict(self) -> dict[str, Any]:
        """Return what :meth:`save` writes as a dict, with copies of the arrays."""
        with self.optimizer.lock:
            return copy.deepcopy(describe(self))

    def load_states_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Take up what :meth:`states_dict` returned.

        Parameters
        ----------
        states : dict
            What it returned.
        strict : bool
            As :meth:`load` takes it, with the same result and errors.
        """
        return restore(self, copy.deepcopy(states), strict)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`states_dict` does, under torch's name."""
        return self.states_dict()

    def load_state_dict(self, states: dict[str, Any], strict: bool = True) -> Skipped:
        """Take up what :meth:`state_dict` returned; see :meth:`load_states_dict`.

        Parameters
        ----------
        states, strict
            As :meth:`load_states_dict` takes them, with the same result and errors.
        """
        return self.load_states_dict(states, strict)

    def load_mxnet(
        self, path: PathLike | bytes, strict: bool = True, max_bytes: int | None = None
    ) -> Skipped:
        """Take up what MXNet's ``get_states`` wrote.

        If the optimizer is in it, its attributes that this one has too are taken up, but not its
        schedule. Else hyper-parameters and counts stay as they are.

        Parameters
        ----------
        path : str, os.PathLike or bytes
            The file or its contents.
        strict : bool
            As :meth:`load` takes it, with the same result and errors.
        max_bytes : int, optional
            As :func:`~fastopt.checkpoint.load_mxnet_states` takes it.
        """
        return restore(self, described_by_mxnet(self, path, max_bytes), strict)


def _shown(value: Any) -> str:
    """Representation of an argument, without addresses."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(part)}' for key, part in value.items())}}}"
    return without_address(repr(value), value)
