"""Threads of parallel kernels: choice of numba's threading layer, and fork safety."""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import metadata
from typing import Any
from weakref import WeakSet

import numba
from numba.core.compiler_lock import global_compiler_lock

from fastopt._kernels.signals import undisturbed

CONCURRENT = ("tbb", "omp")
"""Layers that several Python threads may use at once; workqueue would terminate the process."""
FORK_SAFE = ("tbb",)
"""Layers that work in a forked child; GNU OpenMP would kill it."""
FORK_WAITS = 60.0
"""Seconds at most that a fork waits for the compiler in another thread, which may wait for it."""

LIBRARIES = ("libtbb.so.12", "libtbb.12.dylib", "tbb12.dll")
"""File names of TBB's library, which may continue with a version."""

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables with which users choose how GNU OpenMP threads wait."""
SPINS = "1000"
"""Spin count that GNU OpenMP uses if threads outnumber the CPUs, instead of 300,000.

On a busy machine, threads that spin longer take the CPU from the thread that they wait for, which
costs 20 ms per call. On an idle machine, threads that sleep at once are slower.
"""


@cache
def load_tbb() -> bool:
    """Load the TBB library that pip installed, so that numba chooses TBB by default.

    pip installs the library where the dynamic loader does not search.

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
    """Load OpenMP with threads that spin only briefly while waiting, unless the user has chosen.

    GNU OpenMP reads the environment variable when it is loaded. The variable is set only during
    loading, as child processes and other libraries may use their own OpenMP.
    """
    if any(name in os.environ for name in WAITING):
        return
    os.environ["GOMP_SPINCOUNT"] = SPINS
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        pass  # numba then uses another layer
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def choose_layer() -> None:
    """Load the threading layer's library that works well on busy machines, before numba chooses.

    numba chooses at its first parallel kernel, or at the first query of the number of threads.
    """
    layer = str(numba.config.THREADING_LAYER).lower()
    if layer == "workqueue" or (layer != "omp" and load_tbb()):
        return
    load_openmp()


def start_layer() -> None:
    """Start the threads of numba's layer if they are not running yet.

    With TBB, numba spawns an empty task in the thread that starts the layer, and waits for it when
    the interpreter exits. If that thread has ended by then and no other thread has run the task,
    which is certain on a single CPU, the wait never ends
    (https://github.com/numba/numba/issues/10556). So the thread that starts the layer runs the task
    at once.
    """
    with undisturbed(), global_compiler_lock:
        try:
            numba.threading_layer()
        except ValueError:
            threads.users.add(threading.get_ident())
            numba.get_num_threads()
            if numba.threading_layer() == "tbb":
                pool = importlib.import_module("numba.np.ufunc.tbbpool")
                ctypes.CFUNCTYPE(None)(pool.synchronize)()


def thread_count() -> int:
    """Return the number of threads of a parallel kernel that this Python thread launches."""
    if not threads.started:
        start_layer()
        threads.started = True
    return numba.get_num_threads()


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run parallel kernels that this Python thread launches on `count` threads, in a context."""
    before = thread_count()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


class _Threads:
    """State of this process's threading layer."""

    def __init__(self) -> None:
        self.layer: str | None = None
        self.started = False
        self.allowed = True
        self.users: set[int] = set()
        self.lock = threading.Lock()


threads = _Threads()
_none: AbstractContextManager[Any] = nullcontext()


def may_run_parallel() -> bool:
    """Whether parallel kernels may run: False in a forked child if the layer is not fork-safe.

    TBB is not either if another thread has run parallel kernels: one of its locks may have been
    held, by that thread or by a worker that finished its work, and the child would wait for ever.
    """
    return threads.allowed


def turn() -> AbstractContextManager[Any]:
    """Return the context for launching a parallel kernel: a lock if the layer needs one.

    The layer that numba has chosen is known only after the first launch.
    """
    threads.users.add(threading.get_ident())
    if threads.layer in CONCURRENT:
        return _none
    if threads.layer is None:
        try:
            threads.layer = numba.threading_layer()
        except ValueError:
            return threads.lock
        return turn()
    return threads.lock


_callbacks: list[Callable[[], None]] = []


def in_forked_child(callback: Callable[[], None]) -> Callable[[], None]:
    """Register `callback` to be called in every forked child, and return it."""
    _callbacks.append(callback)
    return callback


_locked: "WeakSet[Any]" = WeakSet()


def start_locks(owner: Any) -> None:
    """Call ``owner._start_locks()`` now and in every forked child.

    A thread that the fork did not copy may hold the locks of the parent.
    """
    owner._start_locks()
    _locked.add(owner)


@in_forked_child
def _restart_locks() -> None:
    for owner in list(_locked):
        owner._start_locks()


def _before_fork() -> None:
    """Wait while another thread compiles, as the child would lack it, and with it LLVM's lock."""
    global_compiler_lock._lock.acquire(timeout=FORK_WAITS)


def _after_fork() -> bool:
    """Release the compiler's lock; return whether the thread that forked held it."""
    held: bool = global_compiler_lock._lock._is_owned()
    if held:
        global_compiler_lock._lock.release()
    return held


def _in_child() -> None:
    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = None
    safe = layer in FORK_SAFE and threads.users <= {threading.get_ident()}
    threads.allowed = threads.allowed and (layer is None or safe)
    threads.lock = threading.Lock()
    if not _after_fork():
        global_compiler_lock._lock = threading.RLock()  # of a thread that the child lacks
    for callback in _callbacks:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
