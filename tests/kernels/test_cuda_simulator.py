"""CUDA without a GPU: ``tests/gpu`` in numba's simulator, and what is told without any."""

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

OVERVIEW = (
    "(not every_rule and not float64 or [lamb] or [groupadagrad]) "
    "and not (in_the_order or summed_by_row)"
)
"""What runs each part once. The rest is rules and orders of sums, which ``tests/ptx`` has too."""

FAKE = """
import numpy as np
from fastopt import optimizer

class Fake:
    def __init__(self, address):
        self.__cuda_array_interface__ = {
            "shape": (3,), "typestr": "<f4", "data": (address, False), "version": 3}

updater = optimizer.get_updater(optimizer.Adam())
try:
    updater(0, Fake(4096), Fake(8192))
except ImportError as error:
    print(error)
print(updater.optimizer.num_update, updater.states)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(path.name for path in GPU.glob("test_*.py")))
@pytest.mark.parametrize(
    "chosen",
    [OVERVIEW, pytest.param(f"not ({OVERVIEW})", marks=pytest.mark.variant)],
    ids=["overview", "rest"],
)
def test_it_holds_in_the_simulator(chosen, name):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # they are for the whole suite
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-k", chosen]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", GPU / name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    nothing_ran = pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode in (0, nothing_ran), done.stdout[-10_000:] + done.stderr[-2000:]


@pytest.mark.further
def test_without_cuda_an_array_on_a_device_is_refused_by_name(run_python):
    told = run_python(FAKE, NUMBA_ENABLE_CUDASIM=None)
    assert "CUDA arrays need" in told
    assert told.splitlines()[-1] == "0 {}"


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


def test_importing_fastopt_does_not_import_numba_cuda(run_python):
    code = "import sys, fastopt; print('numba.cuda' in sys.modules, 'numba_cuda' in sys.modules)"
    assert run_python(code) == "False False\n"


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


@pytest.mark.further
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
