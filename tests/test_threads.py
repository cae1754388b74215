"""The threading layer: TBB where it is installed."""

import sys
from importlib import metadata

import pytest

STEP = """
import numba, numpy as np
from fastopt import optimizer
optimizer.get_updater(optimizer.SGD())(0, np.ones(100_000), np.ones(100_000))
print(numba.threading_layer())
"""

WITHOUT_TBB = """
from importlib import metadata
def files(name):
    raise metadata.PackageNotFoundError(name)
metadata.files = files
"""


def installed(package):
    return any(d.metadata["Name"] == package for d in metadata.distributions())


@pytest.mark.skipif(not installed("tbb"), reason="the package tbb is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="numba finds TBB by itself or not at all")
def test_tbb_is_preferred_where_it_is_installed(run_python):
    assert run_python(STEP, NUMBA_THREADING_LAYER=None).strip() == "tbb"


def test_the_users_choice_of_layer_is_respected(run_python):
    assert run_python(STEP, NUMBA_THREADING_LAYER="workqueue").strip() == "workqueue"


def test_a_missing_tbb_is_no_error(run_python):
    assert run_python(WITHOUT_TBB + STEP, NUMBA_THREADING_LAYER=None).strip() != ""


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


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_threads_may_share_an_updater(run_python, layer):
    """Without the lock numba's workqueue layer ends the process."""
    assert run_python(THREADS, NUMBA_THREADING_LAYER=layer).strip() == "{-400.0} 400"
