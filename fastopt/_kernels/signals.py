"""Deferral of all signals while numba compiles.

Numba is unusable for the rest of the process once an exception, as of Ctrl-C or of a test's
timeout, has left some of its functions halfway. Python delivers signals in the main thread only.

Tests: ``tests/kernels/test_signals.py``.
"""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ClassVar

# The public functions are ten times slower, because they convert to enumerations.
_signal: Any = importlib.import_module("_signal")


class _Deferred:
    """A handler of a signal that waits until the context of :func:`undisturbed` ends."""

    active = False
    due: ClassVar[dict[int, tuple[Any, tuple[Any, ...]]]] = {}
    """Handlers of the signals that came meanwhile, with their arguments."""
    replaced: ClassVar[list[tuple[int, Any]]] = []
    """Signals whose handlers are to be restored, and these handlers."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _Deferred.active:
            self.due[number] = self.handler, (number, frame)
        else:  # not all are replaced, or another one has raised before this one was restored
            self.handler(number, frame)

    @classmethod
    def end(cls) -> None:
        """Restore the handlers of all signals, and call those that are due, though others raise."""
        try:
            while cls.replaced:
                number, handler = cls.replaced[-1]
                if isinstance(_signal.getsignal(number), cls):  # else it was set meanwhile
                    _signal.signal(number, handler)  # may call a handler, which may compile
                del cls.replaced[-1:]
            while cls.due:
                handler, came = cls.due.pop(next(iter(cls.due)))
                handler(*came)
        finally:
            if cls.replaced or cls.due:
                cls.end()

    @classmethod
    def forget(cls) -> None:
        """Restore the handlers of the parent in a forked child, and discard its signals."""
        cls.active = False
        cls.due.clear()
        cls.end()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer the handlers of all signals until the context ends."""
    if get_ident() != main_thread().ident or _Deferred.active:
        yield
        return
    installed = [(number, _signal.getsignal(number)) for number in range(1, signal.NSIG)]
    handlers = [
        (n, handler.handler if isinstance(handler, _Deferred) else handler)
        for n, handler in installed
        if callable(handler)
    ]
    try:
        _Deferred.replaced[:] = handlers
        for number, handler in handlers:
            _signal.signal(number, _Deferred(handler))
        _Deferred.active = True
        yield
    finally:
        _Deferred.active = False  # before any call, where another handler may raise
        _Deferred.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Deferred.forget)
