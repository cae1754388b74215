"""The exception that all readers of checkpoints raise."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read or does not match; the message names the cause.

    Examples
    --------
    >>> import fastopt
    >>> from fastopt.checkpoint import CheckpointError
    >>> updater = fastopt.Updater(fastopt.SGD())
    >>> try:
    ...     updater.set_states(updater.get_states()[:-1])
    ... except CheckpointError as error:
    ...     print(type(error).__bases__)
    (<class 'ValueError'>,)
    """

    __module__ = "fastopt.checkpoint"  # the public location


class ForeignValue(CheckpointError):
    """Raised for values other than numbers, strings, arrays and containers of these."""


def check_types(saved: Mapping[str, object], kinds: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless each field is of its type, or one of its types."""
    for field, kind in kinds.items():
        if not isinstance(saved[field], kind) or isinstance(saved[field], bool):
            raise CheckpointError(f"{field!r} is of type {type(saved[field]).__name__}")


@contextmanager
def read_from(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context that adds the file name to the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        error.args = (f"{os.fspath(path)}: {error}",)
        raise


@contextmanager
def refusing(context: str) -> Iterator[None]:
    """Context that turns what invalid contents raise into a CheckpointError, after `context`."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # invalid contents can raise anything
        known = isinstance(error, (TypeError, ValueError, ImportError))
        raise CheckpointError(f"{context}{error if known else repr(error)}") from error
