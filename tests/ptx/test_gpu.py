"""The tests of ``tests/gpu``, whose kernels run from their PTX, in the profile nightly."""

import pytest

from helpers.paths import TESTS
from ptx.executor import needs_numba_cuda, run_python

pytestmark = [pytest.mark.slow("nightly"), *needs_numba_cuda]

LONG = ["between_the_writes_of_its_stream", "test_every_rule_steps"]
"""Tests that only take time: a kernel that would run for days, and 713 steps of every rule, which
``test_steps.py`` does bit for bit."""

FILES = sorted(path.name for path in (TESTS / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_tests_for_gpus_passes(name, folder):
    arguments = ["-m", "pytest", "-q", "-p", "ptx.executor", "-p", "no:cacheprovider"]
    arguments += ["-m", "gpu and not slow", "-k", f"not ({' or '.join(LONG)})"]
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED
    run_python(folder, *arguments, TESTS / "gpu" / name, nothing=nothing, FAKE_DEFER="1")


def test_the_benchmark_of_gpus_runs(folder):
    code = (
        "import runpy, sys; from ptx import executor; executor.install(); "
        "sys.argv = ['gpu.py', '--quick']; "
        "runpy.run_path('asv_benchmarks/gpu.py', run_name='__main__')"
    )
    assert run_python(folder, "-c", code).count("GB/s") == 6
