"""Ctrl-C at a moment when nothing is half done."""

import importlib
import os
import signal
from threading import get_ident, main_thread
from types import TracebackType
from typing import Any

__all__ = ["uninterrupted"]

# The public function takes ten times longer, for its enumerations.
_set_handler: Any = importlib.import_module("_signal").signal
_INTERRUPT = int(signal.SIGINT)
_MAIN = main_thread().ident


class _Uninterrupted:
    """Context in which Ctrl-C waits until the end; contexts inside of it change nothing.

    Python delivers signals to the main thread alone, and only there does this do anything.
    """

    __slots__ = ("_came", "_depth", "_handler")

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            self._depth += 1
            if self._depth == 1:
                self._handler = _set_handler(_INTERRUPT, self._wait)

    def _wait(self, *came: Any) -> None:
        self._came = came

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if get_ident() != _MAIN:
            return
        self._depth -= 1
        if self._depth or self._handler is None:  # None: a handler that was not set from Python
            return
        _set_handler(_INTERRUPT, self._handler)
        came, self._came = self._came, None
        if came is not None and callable(self._handler):
            self._handler(*came)

    def reset(self) -> None:
        """Forget, in a forked child, the contexts of the parent."""
        if self._depth and self._handler is not None:
            _set_handler(_INTERRUPT, self._handler)
        self.__init__()  # type: ignore[misc]


uninterrupted = _Uninterrupted()
"""Context in which Ctrl-C waits until the end."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=uninterrupted.reset)
