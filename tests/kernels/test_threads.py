"""Threads and processes: which threading layer, forks, spawned processes, shared updaters."""

import multiprocessing
import os
import sys
from importlib import metadata

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels import threads
from helpers.cases import exhaustive, kept

TBB = any(d.metadata["Name"] == "tbb" for d in metadata.distributions())

STEP = """
import numba, numpy as np
from fastopt import optimizer
optimizer.get_updater(optimizer.SGD())(0, np.ones(100_000), np.ones(100_000))
print(numba.threading_layer())
"""

SET_FIRST = "import numba, fastopt; numba.set_num_threads(1)"
WITHOUT_TBB = """
from importlib import metadata
def files(name):
    raise metadata.PackageNotFoundError(name)
metadata.files = files
"""


LAYERS = {
    "TBB where it is installed": ("", None, "tbb"),
    "also after set_num_threads": (SET_FIRST, None, "tbb"),
    "the user's": ("", "workqueue", "workqueue"),
    "any without TBB": (WITHOUT_TBB, None, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_uses_the_layer(name, run_python):
    first, chosen, expected = LAYERS[name]
    if expected == "tbb" and (sys.platform != "linux" or not TBB):
        pytest.skip("numba does not find TBB")
    layer = run_python(first + STEP, NUMBA_THREADING_LAYER=chosen).strip()
    assert layer == expected or (layer and not expected)


@pytest.fixture
def imported(monkeypatch):
    """Import OpenMP's layer in name only; return how its threads are to wait meanwhile."""
    seen = []

    def import_module(name):
        seen.append((name, os.environ.get("GOMP_SPINCOUNT")))
        raise ImportError(name)

    for name in threads.WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads.importlib, "import_module", import_module)
    return seen


@pytest.mark.parametrize("has_tbb", [True, False])
@pytest.mark.parametrize("layer", ["default", "threadsafe", "omp", "workqueue"])
def test_openmp_spins_briefly_where_it_is_used(layer, has_tbb, monkeypatch, imported):
    monkeypatch.setattr(threads.numba.config, "THREADING_LAYER", layer)
    monkeypatch.setattr(threads, "load_tbb", lambda: has_tbb)
    threads.choose_layer()
    is_used = layer == "omp" or (layer != "workqueue" and not has_tbb)
    assert imported == [("numba.np.ufunc.omppool", threads.SPINS)] * is_used
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", threads.WAITING)
def test_the_users_choice_of_waiting_is_respected(name, monkeypatch, imported):
    monkeypatch.setenv(name, "5")
    threads.load_openmp()
    assert imported == []
    assert os.environ[name] == "5"


EVERY = ["omp", "workqueue"] + ["tbb"] * TBB
BEST = [*exhaustive(*EVERY[:-1]), EVERY[-1]]

CHILD = """
import os, sys, threading, multiprocessing, warnings, numpy as np
from fastopt import optimizer
warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
def updater_and_weight():
    return optimizer.get_updater(optimizer.Adam(learning_rate=0.5)), np.zeros(100_000)
def step(updater, weight, times=3):
    for _ in range(times):
        updater(0, np.ones(100_000), weight)
        updater([1, 2], [np.ones(5)] * 2, [np.zeros(5), np.zeros(5)])
    return weight[0], weight[-1]
def exit_code(child):
    # The exit code of a forked child that runs a function.
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(child()))
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORK = """
made = updater_and_weight()
step(*made, 2)
read, write = os.pipe()
exit_code(lambda: not os.write(write, repr(step(*made)).encode()))
print(os.read(read, 1000).decode() == repr(step(*made)))
"""

POOL = """
def work(_):
    return step(*updater_and_weight())
if __name__ == "__main__":
    mine = work(0)
    with multiprocessing.get_context(METHOD).Pool(2) as pool:
        print(set(pool.map(work, range(4))) == {mine})
"""

HELD = """
updater, weight = updater_and_weight()
step(updater, weight)
held = threading.Event(), threading.Event()
def hold():
    with updater.optimizer.lock:
        held[0].set()
        held[1].wait(30)
threading.Thread(target=hold).start()
held[0].wait()
print(exit_code(lambda: not step(updater, weight)))
held[1].set()
"""

OTHERS = """
from fastopt._kernels.threads import may_run_parallel
def forked():
    return exit_code(lambda: step(updater, weight) and may_run_parallel())
updater, weight = updater_and_weight()
step(updater, weight)
print(forked())
begun, stop = threading.Event(), threading.Event()
def work():
    made = updater_and_weight()
    while not stop.is_set():
        step(*made)
        begun.set()
thread = threading.Thread(target=work)
thread.start()
begun.wait()
print({forked() for _ in range(20)})
stop.set()
thread.join()
"""

COMPILING = """
import signal, time
from llvmlite.binding.ffi import lib
from numba.core.compiler_lock import global_compiler_lock
begun = threading.Event()
def compile():
    with global_compiler_lock, lib._lock:
        begun.set()
        time.sleep(0.5)
thread = threading.Thread(target=compile)
thread.start()
begun.wait()
def child():
    signal.alarm(60)
    return not step(*updater_and_weight())
print(exit_code(child))
thread.join()
with global_compiler_lock:
    print(exit_code(int))
print(global_compiler_lock.is_locked())
"""

SEVERAL = """
from multiprocessing.pool import ThreadPool
results = ThreadPool(4).map(lambda _: step(*updater_and_weight(), times=40), range(4))
print(len(results), len(set(results)))
"""

THREADS = """
import numpy as np
from multiprocessing.pool import ThreadPool
from fastopt import optimizer
updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
weight = np.zeros(40_000)
def work(_):
    for _ in range(100):
        updater(0, np.ones(40_000), weight)
ThreadPool(4).map(work, range(4))
print(set(weight.tolist()), updater.optimizer.num_update)
"""

SCRIPTS = {
    "a forked child continues with the bits of its parent": (FORK, "True"),
    "locks are fresh in a forked child": (HELD, "0"),
    "threads may share an updater": (THREADS, "{-400.0} 400"),
    "several updaters run at once": (SEVERAL, "4 1"),  # without turns workqueue ends the process
}


@pytest.mark.slow
@pytest.mark.parametrize("layer", BEST)
@pytest.mark.parametrize("name", SCRIPTS)
def test_under_every_threading_layer(name, layer, run_python):
    script, expected = SCRIPTS[name]
    if "fork" in name and not hasattr(os, "fork"):
        pytest.skip("the platform has no fork")
    assert run_python(CHILD + script, NUMBA_THREADING_LAYER=layer).strip() == expected


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")


@pytest.mark.slow
@forks
@pytest.mark.skipif(not TBB, reason="the package tbb is not installed")
def test_a_child_uses_tbb_unless_other_threads_of_its_parent_have(run_python):
    """Another thread may hold one of TBB's locks while its parent forks."""
    printed = run_python(CHILD + OTHERS, NUMBA_THREADING_LAYER="tbb").splitlines()
    assert [line for line in printed if line and "Unable to join" not in line] == ["1", "{0}"]


@pytest.mark.slow
@forks
def test_a_fork_waits_for_a_compilation_in_another_thread(run_python):
    assert run_python(CHILD + COMPILING).split() == ["0", "0", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("method", kept(multiprocessing.get_all_start_methods(), "spawn"))
@pytest.mark.parametrize("layer", BEST)
def test_pools_of_every_start_method_work(layer, method, run_python, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(CHILD + POOL.replace("METHOD", repr(method)))
    runner = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    if method != "fork":
        runner = (
            f"import subprocess, sys; print(subprocess.run([sys.executable, {str(script)!r}], "
            "capture_output=True, text=True, check=True).stdout)"
        )
    assert run_python(runner, NUMBA_THREADING_LAYER=layer).strip() == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory that is free from /proc")
@pytest.mark.slow("nightly")
def test_a_tensor_of_more_than_two_to_the_31_elements():
    """Its last elements are updated: places are counted with 64 bits."""
    size = 2**31 + 100_003
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if free < 10 * 2**20:
        pytest.skip("needs 10 GB of memory")
    weight, gradient = np.zeros(size, np.float16), np.ones(size, np.float16)
    with pytest.warns(UserWarning, match="lose small updates"):
        optimizer.get_updater(optimizer.SGD(learning_rate=0.5))(0, gradient, weight)
    assert weight[0] == weight[2**31 - 1] == weight[2**31] == weight[-1] == -0.5
    assert (weight[-200_000:] == -0.5).all()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs cannot be chosen here")
def test_a_process_ends_though_another_thread_made_the_first_step(run_python):
    """On one CPU nobody else runs the task that numba spawns when it starts TBB."""
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    assert run_python(one + THREADS, timeout=120).strip() == "{-400.0} 400"
