"""The error of everything that reads saved states."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CheckpointError", "read_from"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit; the message says what is wrong and where.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> from fastopt.checkpoint import CheckpointError
    >>> updater = optimizer.get_updater(optimizer.SGD())
    >>> try:
    ...     updater.set_states(updater.get_states()[:-1])
    ... except CheckpointError as error:
    ...     print(type(error).__bases__)
    (<class 'ValueError'>,)
    """

    __module__ = "fastopt.checkpoint"  # where it is to be imported from


@contextmanager
def read_from(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in errors about what was read from it."""
    try:
        yield
    except CheckpointError as error:
        error.args = (f"{os.fspath(path)}: {error}",)
        raise
