"""Threads of parallel kernels: which layer runs them, and when it must not."""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import metadata
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

__all__ = ["in_forked_child", "may_run_parallel", "prefer_tbb", "turn"]

CONCURRENT = ("tbb", "omp")
"""Layers that several Python threads may use at once; workqueue would end the process."""
FORK_SAFE = ("tbb",)
"""Layers that go on in a forked child; GNU OpenMP would kill it."""


@cache
def prefer_tbb() -> bool:
    """Load the TBB library that pip installed, so that numba chooses TBB where it is free to.

    pip puts the library where the dynamic loader does not look. Of numba's layers TBB alone
    survives forks and calls from several threads. Must run before the first parallel kernel does.

    Returns
    -------
    bool
        Whether a library was loaded.
    """
    try:
        files = metadata.files("tbb") or []
    except metadata.PackageNotFoundError:
        return False
    for file in files:
        if file.name.startswith(("libtbb.so.12", "libtbb.12.dylib")):
            try:
                ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False


class _Threads:
    """What this process knows of its threading layer."""

    def __init__(self) -> None:
        self.layer: str | None = None
        self.allowed = True
        self.lock = threading.Lock()


_threads = _Threads()
_none: AbstractContextManager[Any] = nullcontext()


def may_run_parallel() -> bool:
    """Whether parallel kernels may run: not in a child forked after one whose layer cannot fork."""
    return _threads.allowed


def turn() -> AbstractContextManager[Any]:
    """Context of a launch of a parallel kernel: one at a time where the layer needs that.

    Which layer numba has chosen is known from the first launch on.
    """
    if _threads.layer in CONCURRENT:
        return _none
    if _threads.layer is None:
        try:
            _threads.layer = numba.threading_layer()
        except ValueError:
            return _threads.lock
        return turn()
    return _threads.lock


_callbacks: list[Callable[[], None]] = []


def in_forked_child(callback: Callable[[], None]) -> None:
    """Have `callback` called in every child that this process forks, to make its locks anew."""
    _callbacks.append(callback)


def _after_fork() -> None:
    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = None
    _threads.allowed = _threads.allowed and (layer is None or layer in FORK_SAFE)
    _threads.lock = threading.Lock()
    global_compiler_lock._lock = threading.RLock()  # maybe held by a thread that is not here
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
