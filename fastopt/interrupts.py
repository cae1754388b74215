"""Ctrl-C at a moment when nothing is half done."""

import signal
import threading
from types import TracebackType
from typing import Any

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """Context in which Ctrl-C waits until the end.

    Python delivers signals to the main thread alone, and only there does this do anything.

    Examples
    --------
    >>> from fastopt.interrupts import Uninterrupted
    >>> with Uninterrupted():
    ...     pass
    """

    __slots__ = ("_frame", "_handler")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._frame: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._wait)

    def _wait(self, number: int, frame: Any) -> None:
        self._frame = frame or True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._frame is not None:
            self._handler(signal.SIGINT, None if self._frame is True else self._frame)
