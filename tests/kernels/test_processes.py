"""Forks, spawned processes and cold caches, under every threading layer."""

import multiprocessing
import os
import sys
from importlib.util import find_spec

import pytest

from helpers.cases import exhaustive, kept
from helpers.packages import installed

LAYERS = ["omp", "workqueue"] + ["tbb"] * installed("tbb")
BEST = [*exhaustive(*LAYERS[:-1]), LAYERS[-1]]

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
thread = threading.Thread(target=hold)
thread.start()
held[0].wait()
print(exit_code(lambda: not step(updater, weight)))
held[1].set()
thread.join()
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

LOKY = """
import joblib
def work(_):
    return step(*updater_and_weight())
print(set(joblib.Parallel(2, backend="loky")(joblib.delayed(work)(k) for k in range(4))) ==
      {work(0)})
"""

SEVERAL = """
def work(results):
    results.append(step(*updater_and_weight(), times=40))
results = []
threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(results), len(set(results)))
"""

SCRIPTS = {
    "a forked child continues with the bits of its parent": (FORK, "True"),
    "locks are fresh in a forked child": (HELD, "0"),
    "several updaters run at once": (SEVERAL, "4 1"),  # without turns workqueue ends the process
    "workers of joblib work": (LOKY, "True"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layer", BEST)
@pytest.mark.parametrize("name", kept(SCRIPTS, *[*SCRIPTS][:3]))
def test_under_every_threading_layer(name, layer, run_python):
    script, expected = SCRIPTS[name]
    if ("fork" in name and not hasattr(os, "fork")) or (script is LOKY and not find_spec("joblib")):
        pytest.skip("the platform has no fork, or joblib is missing")
    assert run_python(CHILD + script, NUMBA_THREADING_LAYER=layer).strip() == expected


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")


@pytest.mark.slow
@forks
@pytest.mark.skipif("tbb" not in LAYERS, reason="the package tbb is not installed")
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


COLD = """
import subprocess, sys
code = '''
import numpy as np
from numba.core import event
from fastopt import optimizer
with event.install_recorder("numba:compile") as recorder:
    weight = np.zeros(40_000)
    optimizer.get_updater(optimizer.SGD())(0, np.ones(40_000), weight)
print(weight[0], len(recorder.buffer) > 0)
'''
command = [sys.executable, "-c", code]
first = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
print({process.communicate()[0].split()[0] for process in first})
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.slow("exhaustive")
def test_processes_that_start_at_once_fill_an_empty_cache(run_python, tmp_path):
    printed = run_python(COLD, NUMBA_CACHE_DIR=str(tmp_path)).split()
    assert printed == ["{'-0.01'}", "-0.01", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory that is free from /proc")
@pytest.mark.slow("nightly")
def test_a_tensor_of_more_than_two_to_the_31_elements():
    """Its last elements are updated: places are counted with 64 bits."""
    import numpy as np

    from fastopt import optimizer

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
