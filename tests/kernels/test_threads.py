"""The threading layer: TBB where it is installed, else OpenMP whose threads spin briefly."""

import os
import sys

import pytest

from fastopt._kernels import threads
from helpers.cases import exhaustive
from helpers.packages import installed

STEP = """
import numba, numpy as np
from fastopt import optimizer
optimizer.get_updater(optimizer.SGD())(0, np.ones(100_000), np.ones(100_000))
print(numba.threading_layer())
"""

SET_FIRST = """
import numba, fastopt
numba.set_num_threads(1)
"""

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
    if expected == "tbb" and (sys.platform != "linux" or not installed("tbb")):
        pytest.skip("numba does not find TBB")
    layer = run_python(first + STEP, NUMBA_THREADING_LAYER=chosen).strip()
    assert layer
    assert expected in layer


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


OPENMP = ("numba.np.ufunc.omppool", threads.SPINS)


@pytest.mark.parametrize(
    ("layer", "tbb", "loaded"),
    [
        ("default", True, []),
        ("default", False, [OPENMP]),
        ("threadsafe", False, [OPENMP]),
        ("omp", True, [OPENMP]),
        ("workqueue", False, []),
    ],
)
def test_openmp_spins_briefly_where_it_is_used(layer, tbb, loaded, monkeypatch, imported):
    monkeypatch.setattr(threads.numba.config, "THREADING_LAYER", layer)
    monkeypatch.setattr(threads, "load_tbb", lambda: tbb)
    threads.choose_layer()
    assert imported == loaded
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", threads.WAITING)
def test_the_users_choice_of_waiting_is_respected(name, monkeypatch, imported):
    monkeypatch.setenv(name, "5")
    threads.load_openmp()
    assert imported == []
    assert os.environ[name] == "5"


THREADS = """
import threading, numpy as np
from fastopt import optimizer
updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
weight = np.zeros(40_000)
def work():
    for _ in range(100):
        updater(0, np.ones(40_000), weight)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(set(weight.tolist()), updater.optimizer.num_update)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["default", *exhaustive("workqueue")])
def test_threads_may_share_an_updater(run_python, layer):
    """Without the lock numba's workqueue layer ends the process."""
    assert run_python(THREADS, NUMBA_THREADING_LAYER=layer).strip() == "{-400.0} 400"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs cannot be chosen here")
def test_a_process_ends_though_another_thread_made_the_first_step(run_python):
    """On one CPU nobody else runs the task that numba spawns when it starts TBB."""
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    assert run_python(one + THREADS, timeout=120).strip() == "{-400.0} 400"
