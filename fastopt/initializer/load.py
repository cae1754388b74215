"""Initialization with arrays from a file."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import safetensors

from fastopt.initializer.arrays import Array, assign, is_real, target
from fastopt.initializer.base import log
from fastopt.initializer.text import Filler, filler

__all__ = ["Load"]

_entries: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


class Load:
    """Copy each array from those of a file or dictionary that have its name.

    Parameters
    ----------
    param : mapping of str to array_like, or path
        Arrays by name, or a file of them: ``.safetensors`` or ``.npz``. The beginnings ``arg:``
        and ``aux:`` of names are dropped.
    default_init : Initializer, optional
        Initializes arrays that are not among them: an initializer, its text or name, or a
        function of (name, array).
    verbose : bool, default False
        Log where each array comes from, at level INFO of logger "fastopt.initializer".

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be, the array of a call has another shape than the one of
        that name, or there is none and no `default_init`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> init = initializer.Load({"arg:fc_weight": np.arange(3)}, default_init="ones")
    >>> known, unknown = np.empty(3), np.empty(3)
    >>> init(initializer.InitDesc("fc_weight"), known)
    >>> init(initializer.InitDesc("other_weight"), unknown)
    >>> known, unknown
    (array([0., 1., 2.]), array([1., 1., 1.]))
    """

    def __init__(
        self,
        param: Mapping[str, Any] | str | os.PathLike[str],
        default_init: Filler | str | None = None,
        verbose: bool = False,
    ) -> None:
        if isinstance(param, (str, os.PathLike)):
            param = _read(Path(param))
        if not isinstance(param, Mapping):
            raise TypeError(f"param must be a mapping or the path of a file, got {param!r}")
        self.param: dict[str, Array] = {}
        for name, value in param.items():
            if not isinstance(name, str):
                raise TypeError(f"param must have names as keys, got {name!r}")
            array = np.asarray(value)
            short = re.sub("^(arg|aux):", "", name)
            if not is_real(array.dtype):
                raise TypeError(f"param[{name!r}] must hold real numbers, got dtype {array.dtype}")
            if short in self.param:
                raise ValueError(f"param has {short!r} twice, with and without 'arg:' or 'aux:'")
            self.param[short] = array
        self.default_init = None if default_init is None else filler("default_init", default_init)
        self.verbose = verbose

    def __call__(self, name: str, arr: Array) -> None:
        """Fill `arr` in place; `name` is an :class:`InitDesc`, or a string as in `param`."""
        values = self.param.get(name)
        if values is not None:
            arr = target(name, arr)
            if values.shape != arr.shape:
                raise ValueError(
                    f"{name}: the loaded array has shape {values.shape}, expected {arr.shape}"
                )
            assign(name, arr, values, "the loaded array")
        elif self.default_init is not None:
            self.default_init(name, arr)
        else:
            raise ValueError(f"{name} is not among the loaded arrays, and default_init is None")
        if self.verbose:
            log.info("Initialized %s by %s", name, "default" if values is None else "loading")


def _read(path: Path) -> dict[str, Array]:
    """Arrays of a file by name."""
    try:
        if path.suffix == ".npz":
            with path.open("rb") as stream, np.load(stream) as file:
                return dict(file)
        if path.suffix == ".safetensors":
            return {name: _decoded(**entry) for name, entry in _entries(path.read_bytes())}
    except (safetensors.SafetensorError, BadZipFile, ValueError) as error:
        raise ValueError(f"param must be an intact file, got {path}: {error}") from error
    raise ValueError(f"param must be a .safetensors or .npz file, got {path}")


def _decoded(dtype: str, shape: list[int], data: bytes) -> Array:
    """Array of a safetensors entry; bfloat16 becomes float32, where its bits are the upper half."""
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if not re.fullmatch("[FIU](8|16|32|64)", dtype):
        raise TypeError(f"param must hold real numbers, got safetensors dtype {dtype}")
    kind = np.dtype(f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    return np.frombuffer(data, kind).reshape(shape)
