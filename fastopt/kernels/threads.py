"""Threads of parallel kernels: which layer runs them, and when it must not."""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import metadata
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

__all__ = ["choose_layer", "in_forked_child", "load_tbb", "may_run_parallel", "start_layer"]
__all__ += ["thread_count", "turn", "use_threads"]

CONCURRENT = ("tbb", "omp")
"""Layers that several Python threads may use at once; workqueue would end the process."""
FORK_SAFE = ("tbb",)
"""Layers that go on in a forked child; GNU OpenMP would kill it."""


LIBRARIES = ("libtbb.so.12", "libtbb.12.dylib", "tbb12.dll")
"""Names of TBB's library, which may go on with a version."""

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which users choose how threads of GNU OpenMP wait."""
SPINS = "1000"
"""What GNU OpenMP itself takes where threads outnumber the CPUs, instead of 300,000.

Threads that spin for longer keep the CPU from the thread that they wait for where other processes
are busy, which costs 20 ms a call. Threads that sleep at once make idle machines slower.
"""


@cache
def load_tbb() -> bool:
    """Load the TBB library that pip installed, so that numba chooses TBB where it is free to.

    pip puts the library where the dynamic loader does not look.

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
        if file.name.startswith(LIBRARIES):
            try:
                ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False


def load_openmp() -> None:
    """Load OpenMP with threads that spin briefly while they wait, unless the user has chosen.

    GNU OpenMP reads the variable when it is loaded. It is set meanwhile only, as child processes
    and other libraries may have an OpenMP of their own.
    """
    if any(name in os.environ for name in WAITING):
        return
    os.environ["GOMP_SPINCOUNT"] = SPINS
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        pass  # numba then takes another layer
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def choose_layer() -> None:
    """Load the library of the threading layer that suits a busy machine, before numba looks.

    numba chooses at its first parallel kernel, or when it is asked for the number of threads.
    """
    layer = str(numba.config.THREADING_LAYER).lower()
    if layer == "workqueue" or (layer != "omp" and load_tbb()):
        return
    load_openmp()


def start_layer() -> None:
    """Start the threads of numba's layer, unless they run already.

    With TBB numba spawns an empty task in the thread that starts the layer, and waits for it when
    the interpreter exits. Where that thread has ended by then and no other has run the task, which
    is certain on a single CPU, that lasts forever (https://github.com/numba/numba/issues/10556).
    So the thread that starts the layer runs the task at once.
    """
    with global_compiler_lock:
        try:
            numba.threading_layer()
        except ValueError:
            numba.get_num_threads()
            if numba.threading_layer() == "tbb":
                pool = importlib.import_module("numba.np.ufunc.tbbpool")
                ctypes.CFUNCTYPE(None)(pool.synchronize)()


def thread_count() -> int:
    """Number of threads of a parallel kernel that this Python thread launches."""
    if not threads.started:
        start_layer()
        threads.started = True
    return numba.get_num_threads()


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run parallel kernels that this Python thread launches on so many threads meanwhile."""
    before = thread_count()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


class _Threads:
    """What this process knows of its threading layer."""

    def __init__(self) -> None:
        self.layer: str | None = None
        self.started = False
        self.allowed = True
        self.free = False
        """Whether parallel kernels may run, several at once; known from the first launch on."""
        self.lock = threading.Lock()


threads = _Threads()
_none: AbstractContextManager[Any] = nullcontext()


def may_run_parallel() -> bool:
    """Whether parallel kernels may run: not in a child forked after one whose layer cannot fork."""
    return threads.allowed


def turn() -> AbstractContextManager[Any]:
    """Context of a launch of a parallel kernel: one at a time where the layer needs that.

    Which layer numba has chosen is known from the first launch on.
    """
    if threads.layer in CONCURRENT:
        return _none
    if threads.layer is None:
        try:
            threads.layer = numba.threading_layer()
        except ValueError:
            return threads.lock
        threads.free = threads.allowed and threads.layer in CONCURRENT
        return turn()
    return threads.lock


_callbacks: list[Callable[[], None]] = []


def in_forked_child(callback: Callable[[], None]) -> None:
    """Have `callback` called in every child that this process forks, to make its locks anew."""
    _callbacks.append(callback)


def _after_fork() -> None:
    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = None
    threads.allowed = threads.allowed and (layer is None or layer in FORK_SAFE)
    threads.free = threads.free and threads.allowed
    threads.lock = threading.Lock()
    global_compiler_lock._lock = threading.RLock()  # maybe held by a thread that is not here
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
