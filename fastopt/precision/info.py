"""Result of a precision initializer: the arrays of one parameter, their names and updates."""

from collections.abc import Mapping, MutableMapping
from typing import Any, Self

from fastopt._engine.mixed_precision import split_state
from fastopt._engine.validate import check_index
from fastopt._updater.updater import Updater
from fastopt.checkpoint.restore.describe import check_updater
from fastopt.optimizer.unbound import bound, expect_bind
from fastopt.parameter.checks import Array
from fastopt.scope import current_scope

Workspace = MutableMapping[str, Array]

SUFFIX = {"float32": "_fp32", "float16": "_fp16", "bfloat16": "_bf16"}
HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64", *HALVES)


class ParameterInfo:
    """A weight and its copies in other precisions.

    Parameters
    ----------
    name : str
        Name of the weight.
    blob : numpy.ndarray
        The weight, as passed to an updater.
    blob_copy : dict of str to numpy.ndarray, optional
        Copies by dtype. ``"float32"`` is the master copy of a half-precision weight, to which
        updates are applied; ``"float16"`` or ``"bfloat16"`` is the rounded copy of a float32
        weight.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> from fastopt.precision import PseudoFP16Initializer
    >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.5, multi_precision=True))
    >>> init = PseudoFP16Initializer("constant", value=0.75)
    >>> weight = init.create_param("w", None, 1).bind(updater)
    >>> updater("w", np.array([2**-12], np.float16), weight.blob)
    >>> weight.arrays
    {'w': array([0.75], dtype=float16), 'w_fp32': array([0.7498779], dtype=float32)}
    """

    def __init__(
        self, name: str, blob: Array, blob_copy: Mapping[str, Array] | None = None
    ) -> None:
        self.name = name
        self.blob = blob
        self._copies = dict(blob_copy or {})
        self._bound: tuple[Any, int | str] | None = None
        self._workspace: Workspace | None = None
        if "float32" in self._copies:
            expect_bind(blob)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {array.dtype}" for name, array in self.arrays.items())
        return f"<ParameterInfo {arrays}, shape {self.blob.shape}>"

    @property
    def blob_copy(self) -> dict[str, Array]:
        """Copies of the weight by dtype; the master is the array that updates write.

        With ``master="split"`` there is no separate array for the master.
        """
        if "float32" not in self._copies or self._bound is None:
            return dict(self._copies)
        updater, index = self._bound
        if index not in updater.states:
            return dict(self._copies)
        exact, _ = split_state(updater.optimizer, self.name, self.blob, updater.states[index])
        return {"float32": exact[0]} if exact[0] is not self.blob else {}

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays by name; copies have the suffix ``_fp32``, ``_fp16`` or ``_bf16``."""
        copies = {self.name + SUFFIX[dtype]: array for dtype, array in self.blob_copy.items()}
        return {self.name: self.blob, **copies}

    def bind(self, updater: Updater, index: int | str | None = None) -> Self:
        """Attach the copies to an updater: its updates of `index` write them in the same pass.

        Call it before the first update of `index`, and after ``updater.set_states``. A restored
        master keeps its values. From then on, the workspace holds the master that is updated; if
        no single array holds the whole master, with ``master="split"`` or under MPI, it is removed
        from the workspace.

        Parameters
        ----------
        updater : fastopt.optimizer.Updater
            Its optimizer needs ``multi_precision=True`` if the weight has a master.
        index : int or str, optional
            Index of the weight in calls of `updater`. Default: its name.

        Returns
        -------
        ParameterInfo
            The object itself.

        Raises
        ------
        TypeError
            `updater` is not an updater, or `index` is not an index.
        ValueError
            The weight has a master, but the optimizer does not use masters.
        """
        check_updater(updater)
        index = self.name if index is None else check_index(index)
        for dtype, array in self._copies.items():
            if dtype != "float32":
                updater.set_copy(index, array)
            elif index not in updater.states:
                updater.set_master(index, array)
                given = updater.optimizer.masters_given
                if index in given:
                    given[index] = array  # this very array, so that the workspace sees updates
        self._bound = updater, index
        bound(self.blob)
        self._enter_master()
        return self

    def _enter_master(self) -> None:
        """Put the master that updates write into the workspace, if it is a single array."""
        name = self.name + SUFFIX["float32"]
        if self._workspace is None or self._bound is None or name not in self._workspace:
            return
        updater, index = self._bound
        whole = index in updater.states or index in updater.optimizer.masters_given
        if whole and updater.optimizer.master != "split":
            self._workspace[name] = self.blob_copy["float32"]
        else:
            del self._workspace[name]


def full_name(param_name: str) -> str:
    """Return the full name of a parameter in the current scope; TypeError if it is not a str."""
    if not isinstance(param_name, str):
        raise TypeError(f"param_name must be a str, got {type(param_name).__name__}")
    return current_scope().gen_name(param_name)


def entered(info: ParameterInfo, init_net: Workspace | None) -> ParameterInfo:
    """Add the arrays to a workspace; ValueError if one of their names is taken."""
    if not isinstance(init_net, MutableMapping | None):
        raise TypeError(f"init_net must be a dict of arrays or None, got {init_net!r}")
    if init_net is not None:
        if taken := sorted(info.arrays.keys() & init_net.keys()):
            raise ValueError(f"{info.name}: init_net has {', '.join(taken)} already")
        init_net.update(info.arrays)
        info._workspace = init_net
    return info
