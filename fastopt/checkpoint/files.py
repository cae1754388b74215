"""Files that are replaced whole or not at all."""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where no file can be removed that a process has open
    fcntl = None  # type: ignore[assignment]

__all__ = ["PathLike", "lock", "write_atomically", "write_part"]

PathLike = str | os.PathLike[str]


def write_atomically(path: PathLike, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file so that a crash at any moment leaves the old file or the new one.

    The bytes go to a temporary file in the same directory and to the disk; then the temporary
    file takes the place of `path`, and that goes to the disk too. A process that is killed may
    leave the temporary file, whose name begins with a dot and ends in ``.tmp``; the next call for
    the same `path` removes it. Temporary files of living processes are locked and stay.

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
    _write(path, chunks, None)


def write_part(path: PathLike, of: PathLike, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that belongs to the file `of`, like :func:`write_atomically`.

    What a killed process leaves of it is removed by the next :func:`write_atomically` for `of`.
    """
    _write(path, chunks, Path(of).name)


def _write(path: PathLike, chunks: Iterable[bytes | memoryview], of: str | None) -> None:
    try:
        target = _target(path)
        if of is None:
            _remove_leftovers(target)
        _replace(target, target.name if of is None else of, chunks)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _target(path: PathLike) -> Path:
    """Return the file that a path or a link leads to; a link without end is an OSError."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _replace(target: Path, of: str, chunks: Iterable[bytes | memoryview]) -> None:
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, "not a regular file")
    temporary, file = _temporary(target, of)
    try:
        with file:
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


def _temporary(target: Path, of: str) -> tuple[Path, BufferedWriter]:
    """Create a temporary file beside `target`, locked as long as it is open."""
    while True:
        temporary = target.with_name(f"{_prefix(of)}{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115
        if lock(file.fileno()) is False or os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # removed as a leftover before it was locked


def _prefix(of: str) -> str:
    """First part of the names of temporary files; its length does not depend on the name."""
    return f".{hashlib.blake2b(os.fsencode(of), digest_size=8).hexdigest()}-"


def lock(descriptor: int, wait: bool = True) -> bool | None:
    """Whether a file could be locked, None if another process has; the lock ends with it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return None
    except OSError:  # the file system has no locks
        return False
    return True


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files for `target` whose processes have ended; errors are left alone."""
    prefix = _prefix(target.name)
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            name = entry.name
            if (
                name.startswith(prefix)
                and name.endswith(".tmp")
                and entry.is_file(follow_symlinks=False)
            ):
                with suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    if fcntl is None:
        os.unlink(path)
        return
    with open(path, "r+b") as file:
        if lock(file.fileno(), wait=False):
            os.unlink(path)


def _sync_directory(directory: Path) -> None:
    """Bring a renaming to the disk; Windows has no way to ask for it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
