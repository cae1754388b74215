"""Files of named arrays: safetensors, and MXNet ``.params`` files (read-only)."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BufferedReader

from fastopt.checkpoint import CheckpointError, write_atomically
from fastopt.checkpoint.foreign.ndarray import LIST_HEAD, Allowance, list_from_bytes
from fastopt.checkpoint.format.container import (
    METADATA,
    Entry,
    from_bits,
    layout,
    read_bits,
    written,
)
from fastopt.checkpoint.format.errors import read_from
from fastopt.parameter.checks import Array

PathLike = str | os.PathLike[str]


def save(path: PathLike, arrays: Mapping[str, Array]) -> None:
    """Write all arrays to a safetensors file; the format supports bfloat16."""
    if METADATA in arrays:
        raise ValueError(f"{METADATA!r} cannot name an array, the format has something else there")
    write_atomically(path, written(arrays))


def _of_mxnet(data: bytes) -> dict[str, Array]:
    """Arrays of an MXNet ``.params`` file."""
    arrays = list_from_bytes(data, Allowance.of(len(data)))
    found = {re.sub("^(arg|aux):", "", name): array for name, array in arrays.items()}
    if len(found) < len(arrays):
        raise CheckpointError("it has a name twice, with and without 'arg:' or 'aux:'")
    return found


@contextmanager
def opened(path: PathLike) -> Iterator[dict[str, Callable[[], Array]]]:
    """Open a file of arrays: functions that read them, by name.

    MXNet files are recognized by their first bytes; the prefixes ``arg:`` and ``aux:`` of their
    names are dropped.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        The file is in neither format, or damaged.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as stream, read_from(path):
        is_list = stream.read(len(LIST_HEAD)) == LIST_HEAD
        stream.seek(0)
        if is_list:
            yield {name: array.view for name, array in _of_mxnet(stream.read()).items()}
        else:
            yield {name: partial(_read, stream, entry) for name, entry in layout(stream)[1].items()}


def _read(stream: BufferedReader, entry: Entry) -> Array:
    bits, _ = read_bits(stream, entry)
    return from_bits(bits, entry.dtype)
