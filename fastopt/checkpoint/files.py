"""Files that are replaced whole or not at all."""

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["PathLike", "write_atomically"]

PathLike = str | os.PathLike[str]


def write_atomically(path: PathLike, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file so that a crash at any moment leaves the old file or the new one.

    The bytes go to a temporary file in the same directory and to the disk; then the temporary
    file takes the place of `path`, and that goes to the disk too. A process that is killed may
    leave the temporary file, whose name begins with a dot and ends in ``.tmp``.

    Parameters
    ----------
    path : str or os.PathLike
        A new file or a regular file; a link leads to the file that is replaced. Its permissions
        are kept.
    chunks : iterable of bytes-like objects
        The contents, in order. They may be made on the way.

    Raises
    ------
    TypeError
        `chunks` are the bytes themselves, or a text.
    OSError
        The file cannot be written: the disk is full, the directory is missing or not writable,
        `path` is a directory or a device. The old file is as it was.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from fastopt.checkpoint import write_atomically
    >>> with TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes"), [b"one ", b"two"])
    ...     Path(folder, "notes").read_text()
    'one two'
    """
    if isinstance(chunks, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"chunks must be a list of bytes, got {type(chunks).__name__}")
    try:
        _replace(Path(os.path.realpath(path)), chunks)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(target: Path, chunks: Iterable[bytes | memoryview]) -> None:
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, "not a regular file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            temporary.unlink()
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    """Bring a renaming to the disk; Windows has no way to ask for it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
