"""Files of named arrays: safetensors, and MXNet ``.params`` files (read-only)."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from fastopt.checkpoint import CheckpointError, write_atomically
from fastopt.checkpoint.foreign.ndarray import LIST_HEAD, Allowance, list_from_bytes
from fastopt.checkpoint.format.container import METADATA
from fastopt.checkpoint.format.errors import read_from
from fastopt.parameter.checks import Array, as_dtype

PathLike = str | os.PathLike[str]


def save(path: PathLike, arrays: Mapping[str, Array]) -> None:
    """Write all arrays to a safetensors file; the format supports bfloat16."""
    if METADATA in arrays:
        raise ValueError(f"{METADATA!r} cannot name an array, the format has something else there")
    # safetensors writes the memory of an array without regard to its strides
    contiguous = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    write_atomically(path, [safetensors.numpy.save(contiguous)])


class _OfMXNet:
    """Arrays of an MXNet ``.params`` file."""

    def __init__(self, path: PathLike, data: bytes) -> None:
        with read_from(path):
            arrays = list_from_bytes(data, Allowance.of(len(data)))
            self.arrays = {re.sub("^(arg|aux):", "", name): a for name, a in arrays.items()}
            if len(self.arrays) < len(arrays):
                raise CheckpointError("it has a name twice, with and without 'arg:' or 'aux:'")

    def keys(self) -> list[str]:
        return list(self.arrays)

    def get_tensor(self, name: str) -> Array:
        return self.arrays[name]


@contextmanager
def opened(path: PathLike) -> Iterator[Any]:
    """Open a file of arrays, with methods ``keys()`` and ``get_tensor(name)``.

    MXNet files are recognized by their first bytes; the prefixes ``arg:`` and ``aux:`` of their
    names are dropped.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        The file is in neither format, or damaged.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as stream:
        if stream.read(len(LIST_HEAD)) == LIST_HEAD:
            stream.seek(0)
            yield _OfMXNet(path, stream.read())
            return
    try:
        file: Any = safe_open(path, framework="np")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    with file:
        names = file.keys()
        if any(file.get_slice(name).get_dtype() == "BF16" for name in names):
            as_dtype("bfloat16")  # registers the dtype with NumPy
        yield file
