"""Which calls of a table may run in the thread that holds its lock."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["Access"]


class Access:
    """State of a table that decides whether a call may read or change it.

    The lock excludes other threads. Its own thread can call the table again in the middle of a
    call: from a signal handler, a schedule, or a function that the call was given. Use the contexts
    after the lock has been acquired.

    Parameters
    ----------
    name : str
        Name of the table, for error messages.

    Attributes
    ----------
    reading : context manager
        Context of a call that reads. It raises ValueError if the table is closed, and RuntimeError
        in the middle of a change.
    changing : context manager
        Context of a call that changes the table. It also raises RuntimeError in a user's function.
    closed : bool
        Whether the table is closed.
    """

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False
        self._partial = False
        """Whether a change is in progress, and the table has only a part of it."""
        self._changing = False
        """Whether a call that changes the table is in progress."""
        self.reading, self.changing = _Reading(self), _Changing(self)

    def to(self, change: bool) -> "_Reading | _Changing":
        """Context of a call that changes the table, or only reads."""
        return self.changing if change else self.reading

    def in_function(self) -> AbstractContextManager[None]:
        """Context of a user's function that a change calls before it begins to write."""
        return self._with(partial=False)

    def flushing(self) -> AbstractContextManager[None]:
        """Context of a flush, which a call that reads may start too."""
        return self._with(partial=True)

    @contextmanager
    def _with(self, partial: bool) -> Iterator[None]:
        before, self._partial = self._partial, partial
        try:
            yield
        finally:
            self._partial = before

    def _check_readable(self) -> None:
        if self.closed:
            raise ValueError(f"table {self.name!r} is closed")
        if self._partial:
            raise RuntimeError(
                f"table {self.name!r} is inside an update or another change; a signal handler "
                "should set a flag, and the program save or flush after the step"
            )


class _Reading:
    def __init__(self, access: Access) -> None:
        self._access = access

    def __enter__(self) -> None:
        self._access._check_readable()

    def __exit__(self, *_: object) -> None:
        pass


class _Changing:
    def __init__(self, access: Access) -> None:
        self._access = access

    def __enter__(self) -> None:
        access = self._access
        access._check_readable()
        if access._changing:
            raise RuntimeError(
                f"table {access.name!r} cannot be changed by a function that it calls, such as "
                "init or keep; change it after the call"
            )
        access._changing = access._partial = True

    def __exit__(self, *_: object) -> None:
        self._access._changing = self._access._partial = False
