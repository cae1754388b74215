"""Deferral of Ctrl-C until an update is complete, and reads that see complete updates."""

import importlib
import os
import signal
from threading import get_ident, main_thread
from typing import Any

# The public functions are ten times slower, because they convert to enumerations.
_signal: Any = importlib.import_module("_signal")
_INTERRUPT = int(signal.SIGINT)


class _Uninterrupted:
    """Context manager that defers Ctrl-C until it exits; nested contexts have no effect.

    It has no effect outside the main thread, since Python delivers signals only there.
    """

    __slots__ = ("_came", "_depth", "_handler", "_main", "delivering")

    def __init__(self) -> None:
        self._main = main_thread().ident  # in a forked child, the thread that called fork
        self._depth = 0
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None
        self.delivering = False

    def __enter__(self) -> None:
        if get_ident() == self._main:
            if not self._depth:
                self._came, self._handler = None, _signal.getsignal(_INTERRUPT)
                if self._handler is not None:  # None: the handler was not set from Python
                    _signal.signal(_INTERRUPT, self._wait)  # may raise an earlier KeyboardInterrupt
            self._depth += 1

    @property
    def pending(self) -> bool:
        """Whether a Ctrl-C is pending, for code that may block for long."""
        return self._depth > 0 and self._came is not None

    def _wait(self, *came: object) -> None:
        self._came = came

    def __exit__(self, *error: object) -> None:
        if get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        _signal.signal(_INTERRUPT, self._handler)
        came, self._came = self._came, None
        if came is None:
            return
        if callable(self._handler):
            self.delivering = True
            try:
                self._handler(*came)
            finally:
                self.delivering = False
        elif self._handler == _signal.SIG_DFL:
            _signal.raise_signal(_INTERRUPT)  # terminates the process

    def reset(self) -> None:
        """Discard the parent's contexts in a forked child."""
        if self._depth and self._handler is not None:
            _signal.signal(_INTERRUPT, self._handler)
        self.__init__()  # type: ignore[misc]


uninterrupted = _Uninterrupted()
"""Context manager that defers Ctrl-C until it exits."""


def between_updates(lock: Any, action: str) -> Any:
    """Return the lock of an optimizer for a ``with`` statement that reads complete updates.

    Parameters
    ----------
    lock : threading.RLock
        The lock, which updates hold. If this thread already holds it, it runs a signal handler, a
        schedule or other code of the user in the middle of an update.
    action : str
        What needs a complete update, for the message.

    Raises
    ------
    RuntimeError
        This thread holds the lock, and does not run a handler that was deferred until the update
        was complete.
    """
    if lock._is_owned() and not uninterrupted.delivering:
        raise RuntimeError(
            f"{action} inside an update or another call of the updater, as from a signal handler "
            "or a schedule: set a flag there, and do it after the step"
        )
    return lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=uninterrupted.reset)
