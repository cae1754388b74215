"""Atomic replacement of files."""

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
except ImportError:  # on Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

PathLike = str | os.PathLike[str]


def write_atomically(path: PathLike, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file so that a crash at any moment leaves either the old file or the new one.

    The bytes are written to a temporary file in the same directory and synced to disk; then the
    temporary file is renamed to `path`, and the directory is synced. A process that is killed can
    leave the temporary file behind; its name starts with a dot and ends in ``.tmp``, and the next
    call for the same `path` removes it. Temporary files of running processes are locked and kept.

    Parameters
    ----------
    path : str or os.PathLike
        A new file or a regular file. A symbolic link is followed. The permissions of an existing
        file are kept.
    chunks : iterable of bytes-like objects
        The contents, in order; may be a generator.

    Raises
    ------
    TypeError
        `chunks` is a bytes-like object or a string.
    OSError
        The file cannot be written: the disk is full, the directory is missing or not writable, or
        `path` is a directory or a device. The old file is unchanged. If only the directory cannot
        be synced, the new file is in place, and a power failure may restore the old one.

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
    write_part(path, None, chunks)


def write_part(path: PathLike, of: PathLike | None, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that belongs to the file `of`, like :func:`write_atomically`.

    The next :func:`write_atomically` for `of` removes temporary files that killed processes left.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # links in a loop
        if of is None:
            _remove_leftovers(target)
        _replace(target, Path(of or target).name, chunks)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


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
    sync_directory(target.parent)


def _temporary(target: Path, of: str) -> tuple[Path, BufferedWriter]:
    """Create a temporary file next to `target`, locked while it is open."""
    while True:
        temporary = target.with_name(f"{_prefix(of)}{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115
        if lock(file.fileno()) is False or os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another process removed it before it was locked


def _prefix(of: str) -> str:
    """Prefix of the names of temporary files, of a length that does not depend on `of`."""
    return f".{hashlib.blake2b(os.fsencode(of), digest_size=8).hexdigest()}-"


def is_temporary(name: str, of: str) -> bool:
    """Whether a name is that of a temporary file for the file `of`."""
    return name.startswith(_prefix(of)) and name.endswith(".tmp")


def lock(descriptor: int, wait: bool = True) -> bool | None:
    """Lock a file until it is closed; return None if it is locked already, False if unsupported."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return None
    except OSError:  # the file system has no locks
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock of a file for all processes that have inherited its descriptor."""
    if fcntl is not None:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files for `target` whose processes have ended; ignore errors."""
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if is_temporary(entry.name, target.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    if fcntl is None:
        os.unlink(path)
        return
    with open(path, "r+b") as file:
        if lock(file.fileno(), wait=False):
            os.unlink(path)


NO_SYNC = errno.EBADF, errno.EINVAL, errno.ENOTSUP
"""Errors of file systems that cannot sync directories, such as some network file systems."""


def sync_directory(directory: Path) -> None:
    """Sync a renamed file's directory to disk, where the system and the file system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)
