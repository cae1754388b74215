"""Safetensors files of named arrays."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from fastopt.checkpoint import CheckpointError, write_atomically
from fastopt.checkpoint.container import METADATA
from fastopt.parameter.checks import Array, as_dtype

__all__ = ["opened", "save"]

PathLike = str | os.PathLike[str]


def save(path: PathLike, arrays: Mapping[str, Array]) -> None:
    """Write a file that holds all arrays; bfloat16 is a type of the format."""
    if METADATA in arrays:
        raise ValueError(f"{METADATA!r} cannot name an array, the format has something else there")
    # safetensors writes the memory of an array whatever its strides
    contiguous = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    write_atomically(path, [safetensors.numpy.save(contiguous)])


@contextmanager
def opened(path: PathLike) -> Iterator[Any]:
    """Open a file for its ``keys()`` and ``get_tensor(name)``.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        It is not such a file.
    OSError
        It cannot be read.
    """
    try:
        file: Any = safe_open(path, framework="np")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    with file:
        names = file.keys()
        if any(file.get_slice(name).get_dtype() == "BF16" for name in names):
            as_dtype("bfloat16")  # lets NumPy know the type
        yield file
