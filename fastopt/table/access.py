"""Which calls of a table may run in the thread that holds its lock."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class Access:
    """State of a table that decides whether a call may read or change it.

    The lock excludes other threads. Its own thread can call the table again in the middle of a
    call: from a signal handler, a schedule, or a function that the call was given.

    Parameters
    ----------
    name : str
        Name of the table, for error messages.

    Attributes
    ----------
    closed : bool
        Whether the table is closed.
    """

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False
        self._change = threading.Lock()
        """Locked during a change. Unlike a flag, an interrupt between two statements frees it."""
        self._in_function = False

    def to_read(self) -> AbstractContextManager[Any]:
        """Context of a call that reads, to be entered after the lock.

        Raises
        ------
        ValueError
            The table is closed.
        RuntimeError
            The thread is in the middle of a change.
        """
        if self.closed:
            raise ValueError(f"table {self.name!r} is closed")
        if self._change.locked() and not self._in_function:
            raise RuntimeError(
                f"table {self.name!r} is inside an update or another change; a signal handler "
                "should set a flag, and the program save or flush after the step"
            )
        return nullcontext()

    def to_change(self) -> AbstractContextManager[Any]:
        """Context of a call that changes the table, to be entered after the lock.

        Raises
        ------
        ValueError, RuntimeError
            See :meth:`to_read`; or a function that a change calls would change the table.
        """
        self.to_read()
        if self._change.locked():
            raise RuntimeError(
                f"table {self.name!r} cannot be changed by a function that it calls, such as init "
                "or keep; change it after the call"
            )
        return self._change

    def to_call(self, change: bool) -> AbstractContextManager[Any]:
        """Context of a call that changes the table, or only reads."""
        return self.to_change() if change else self.to_read()

    def to_flush(self) -> AbstractContextManager[Any]:
        """Context of a flush, which calls of both kinds may start."""
        return nullcontext() if self._change.locked() else self._change

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """Context of a user's function that a change calls before it begins to write."""
        self._in_function = True
        try:
            yield
        finally:
            self._in_function = False
