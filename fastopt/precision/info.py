"""What an initializer makes of one parameter: its arrays, their names and their updates."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from fastopt.scope import current_scope

__all__ = ["FLOATS", "HALVES", "Array", "ParameterInfo", "Workspace", "entered", "full_name"]

Array = np.ndarray[Any, Any]
Workspace = MutableMapping[str, Array]

SUFFIX = {"float32": "_fp32", "float16": "_fp16", "bfloat16": "_bf16"}
HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64", *HALVES)


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """A weight and its copies in other precisions.

    Attributes
    ----------
    name : str
        Name of the weight.
    blob : numpy.ndarray
        The weight, as an updater takes it.
    blob_copy : dict of str to numpy.ndarray
        Its copies by dtype: ``"float32"`` is the master of a half-precision weight, in which it
        is optimized; ``"float16"`` or ``"bfloat16"`` is the rounded copy of a float32 weight.

    Examples
    --------
    >>> from fastopt.precision import PseudoFP16Initializer
    >>> info = PseudoFP16Initializer("constant", value=0.1).create_param("w", None, (2,))
    >>> info.blob
    array([0.1, 0.1], dtype=float16)
    >>> info.arrays["w_fp32"] is info.blob_copy["float32"]
    True
    """

    name: str
    blob: Array
    blob_copy: Mapping[str, Array] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays by name; a copy has ``_fp32``, ``_fp16`` or ``_bf16`` after the weight's."""
        copies = {self.name + SUFFIX[dtype]: array for dtype, array in self.blob_copy.items()}
        return {self.name: self.blob, **copies}

    def bind(self, updater: Any, index: int | str | None = None) -> Self:
        """Have an updater keep the copies: each of its updates of `index` writes them too.

        The weight and its copies are written in one pass. Call it before the first update.

        Parameters
        ----------
        updater : fastopt.Updater
            Its optimizer needs ``multi_precision=True`` if the weight has a master.
        index : int or str, optional
            Index of the weight in calls of `updater`. Default: its name.

        Returns
        -------
        ParameterInfo
            Itself.
        """
        index = self.name if index is None else index
        for dtype, array in self.blob_copy.items():
            keep = updater.set_master if dtype == "float32" else updater.set_copy
            keep(index, array)
        return self


def full_name(param_name: str) -> str:
    """Return the name of a parameter in the present scope; TypeError if it is not a str."""
    if not isinstance(param_name, str):
        raise TypeError(f"param_name must be a str, got {type(param_name).__name__}")
    return current_scope().gen_name(param_name)


def entered(info: ParameterInfo, init_net: Workspace | None) -> ParameterInfo:
    """Put the arrays into a workspace; ValueError if one of their names is taken there."""
    if init_net is not None:
        if taken := sorted(info.arrays.keys() & init_net.keys()):
            raise ValueError(f"{info.name}: init_net has {', '.join(taken)} already")
        init_net.update(info.arrays)
    return info
