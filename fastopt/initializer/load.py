"""Initializers that choose by name: among the arrays of a file, or among initializers."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED

import numpy as np
from numpy.lib.npyio import NpzFile

from fastopt.initializer.base import Array, Filler, assign, filler, is_real, log, target


class Load:
    """Initialize arrays by copying the array of the same name from a file or dictionary.

    Parameters
    ----------
    param : mapping of str to array_like, or path
        Arrays by name, or the path of a ``.safetensors`` file, a ``.npz`` file or a ``.params``
        file of MXNet, whose row-sparse arrays are loaded as dense ones. The prefixes ``arg:`` and
        ``aux:`` of names are dropped.
    default_init : Initializer, optional
        Initializes arrays whose name is not in `param`: an initializer, its text or name, or a
        function of (name, array).
    verbose : bool, default False
        Log the source of each array, at level INFO of logger "fastopt.initializer".

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, a file is damaged or of an unknown format, an array to be filled
        differs in shape from the one in `param`, or its name is not in `param` and there is no
        `default_init`.
    OSError
        The file cannot be opened.

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
    """Read the arrays of a file by name."""
    read = _READERS.get(path.suffix)
    if read is None:
        raise ValueError(f"param must be a .safetensors, .npz or .params file, got {path}")
    with path.open("rb") as stream:
        try:
            return read(stream)
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(f"param must be an intact file, got {path}: {error}") from error


def _read_npz(stream: BufferedReader) -> dict[str, Array]:
    with NpzFile(stream) as file:
        for entry in file.zip.infolist():  # type: ignore[union-attr]
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise ValueError(f"{entry.filename} is compressed otherwise than NumPy does it")
        return dict(file)


def _read_safetensors(stream: BufferedReader) -> dict[str, Array]:
    from fastopt.checkpoint.format.container import layout, read_bits  # imports optimizers

    arrays = {}
    for name, entry in layout(stream)[1].items():
        bits, _ = read_bits(stream, entry)
        if entry.dtype == "bfloat16":  # the upper 16 bits of float32 values
            bits = (bits.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = bits
    return arrays


def _read_params(stream: BufferedReader) -> dict[str, Array]:
    from fastopt.checkpoint.foreign.ndarray import list_from_bytes  # imports optimizers

    return list_from_bytes(stream.read())


_READERS: dict[str, Callable[[BufferedReader], dict[str, Array]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".params": _read_params,
}


class Mixed:
    """Fill each array with the initializer of the first pattern that matches its name.

    A pattern must match from the first character on: ``"bias"`` does not match ``fc_bias``,
    ``".*bias"`` does. The selected initializer still applies its rules for name endings, so a
    bias becomes 0 with any initializer.

    Parameters
    ----------
    patterns : sequence of str
        Regular expressions.
    initializers : sequence of Initializer
        One for each pattern: initializers, their texts or names, or functions of (name, array).

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, the numbers of patterns and initializers differ, or the name of a
        call matches no pattern.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> init = initializer.Mixed(["embed", ".*"], [initializer.Constant(3), "ones"])
    >>> embed, weight = np.empty(2), np.empty(2)
    >>> init(initializer.InitDesc("embed_weight"), embed)
    >>> init(initializer.InitDesc("fc_weight"), weight)
    >>> embed, weight
    (array([3., 3.]), array([1., 1.]))
    """

    def __init__(self, patterns: Sequence[str], initializers: Sequence[Any]) -> None:
        for name, values in {"patterns": patterns, "initializers": initializers}.items():
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise TypeError(f"{name} must be a list, got {values!r}")
        if len(patterns) != len(initializers):
            raise ValueError(
                "there must be one initializer for each pattern, "
                f"got {len(patterns)} patterns and {len(initializers)} initializers"
            )
        self.map = [
            (_compiled(f"patterns[{i}]", pattern), filler(f"initializers[{i}]", initializer))
            for i, (pattern, initializer) in enumerate(zip(patterns, initializers, strict=True))
        ]

    def __call__(self, name: str, arr: Array) -> None:
        """Fill `arr` in place; `name` is an :class:`InitDesc`."""
        for pattern, initializer in self.map:
            if pattern.match(name):
                initializer(name, arr)
                return
        tried = ", ".join(repr(pattern.pattern) for pattern, _ in self.map)
        raise ValueError(
            f"{name} does not match, from its first character on, any of the patterns {tried}; "
            "a last pattern '.*' matches all names"
        )


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r}: {error}") from None
