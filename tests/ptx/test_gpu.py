"""The tests of ``tests/gpu``, whose kernels run from their PTX, in the profile nightly."""

import subprocess
import sys

import pytest

from helpers.paths import ROOT, TESTS
from ptx.executor import build_driver, environment, needs_numba_cuda

pytestmark = [pytest.mark.slow("nightly"), *needs_numba_cuda]

LONG = ["between_the_writes_of_its_stream", "test_every_rule_steps"]
"""Tests that only take time: a kernel that would run for days, and 713 steps of every rule, which
``test_steps.py`` does bit for bit."""

FILES = sorted(path.name for path in (TESTS / "gpu").glob("test_*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    build_driver(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_tests_for_gpus_passes(name, folder):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "ptx.executor", "-p", "no:cacheprovider"),
            *("-m", "gpu and not slow", "-k", f"not ({' or '.join(LONG)})", TESTS / "gpu" / name),
        ],
        env=environment(folder, FAKE_DEFER="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    nothing_ran = pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode in (0, nothing_ran), done.stdout[-20_000:] + done.stderr[-2_000:]


def test_the_benchmark_of_gpus_runs(folder):
    code = (
        "import runpy, sys; from ptx import executor; executor.install(); "
        "sys.argv = ['gpu.py', '--quick']; "
        "runpy.run_path('asv_benchmarks/gpu.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GB/s") == 6
