"""What is told without a GPU, and arrays of numba's simulator."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from fastopt._kernels import devices
from helpers.paths import ROOT, TESTS

GPU = TESTS / "gpu"

FAKE = """
import sys
import numpy as np
from fastopt import optimizer

class Fake:
    def __init__(self, address):
        self.__cuda_array_interface__ = {
            "shape": (3,), "typestr": "<f4", "data": (address, False), "version": 3}

print('numba.cuda' in sys.modules, 'numba_cuda' in sys.modules)
updater = optimizer.get_updater(optimizer.Adam())
try:
    updater(0, Fake(4096), Fake(8192))
except ImportError as error:
    print(error)
print(updater.optimizer.num_update, updater.states)
"""


SIMULATED = """
import numpy as np
import fastopt
from numba import cuda

rng = np.random.default_rng(0)
for settings in ({}, {"clip_global_norm": 0.5}, {"accumulate": 2}):
    here, there = (fastopt.Updater("adam", **settings) for _ in range(2))
    weights = [rng.normal(size=shape).astype("f4") for shape in ((3, 4), (5,))]
    arrays = [cuda.to_device(weight) for weight in weights]
    for _ in range(4):
        grads = [rng.normal(size=weight.shape).astype("f4") for weight in weights]
        here([0, 1], grads, weights)
        there([0, 1], [cuda.to_device(grad) for grad in grads], arrays)
    assert all(map(np.array_equal, weights, [array.copy_to_host() for array in arrays]))
try:
    fastopt.Parameter("w", shape=(2,), init="ones").initialize(device=fastopt.device.cuda(0))
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_arrays_of_the_simulator_are_updated_as_host_arrays(run_python):
    told = run_python(SIMULATED, NUMBA_ENABLE_CUDASIM="1")
    assert told == "CUDA arrays need a device, and NUMBA_ENABLE_CUDASIM=1 simulates one\n"


@pytest.mark.slow
def test_without_cuda_an_array_on_a_device_is_refused_by_name(run_python):
    imported, *told, changed = run_python(FAKE, NUMBA_ENABLE_CUDASIM=None).splitlines()
    assert imported == "False False"
    assert "CUDA arrays need" in told[0]
    assert changed == "0 {}"


def test_a_numpy_that_numba_cuda_does_not_work_with_is_named_with_the_cure(monkeypatch):
    def removed(name):
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(devices, "import_module", removed)
    monkeypatch.setattr(devices, "version", lambda name: "0.30.4")
    assert devices.unsuited() == (
        f"a NumPy that numba-cuda 0.30.4 supports, not {np.__version__} "
        "(module 'numpy' has no attribute 'row_stack'): pip install 'numpy<2.5'"
    )


def test_one_version_of_numba_cuda_is_allowed_named_and_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {
        re.fullmatch(r"numba-cuda\[cu\d\d\]~=(.*)", extras["optional-dependencies"][extra][0])[1]
        for extra in ("cuda12", "cuda13")
    }
    source = (ROOT / "fastopt" / "_kernels" / "devices.py").read_text("utf-8")
    named |= set(re.findall(r"numba-cuda\[cu\d\d\]~=([\d.]+)", source))
    assert len(named) == 1
    series, patch = named.pop().rsplit(".", 1)
    try:
        installed = version("numba-cuda")
    except PackageNotFoundError:
        return
    assert installed.startswith(f"{series}.")
    assert int(installed.removeprefix(f"{series}.")) >= int(patch)


@pytest.mark.parametrize("found", [True, False], ids=["all steps pass", "tests fail"])
def test_the_proof_on_a_gpu_reports_each_step(found, tmp_path):
    """The interpreter is one that does nothing."""
    python, report = tmp_path / "python", tmp_path / "report.md"
    status = int(not found)
    python.write_text(f'#!/bin/sh\ncase "$*" in *pytest*) echo told; exit {status};; esac\n')
    python.chmod(0o755)
    done = prove(report, str(python))
    assert done.returncode == int(not found), done.stderr
    words = report.read_text("utf-8")
    assert f"## Tests\n\n{'ok' if found else 'failed with exit status 1'}\n\n```\ntold\n" in words
    assert "## Memory check" in words
    assert "## Measurements" in words


@pytest.mark.slow
def test_the_proof_on_a_gpu_needs_one(tmp_path):
    done = prove(tmp_path / "report.md", sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("prove.sh: nothing was proven, as no GPU can be used: CUDA arrays need")


def prove(report, python, **environment):
    return subprocess.run(
        ["bash", ROOT / "tests" / "gpu" / "prove.sh", report],
        env={**os.environ, "PYTHON": python, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
