"""Half precision in other processes: on any processor, with more threads."""

import pytest

from helpers.paths import TESTS

pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.slow("exhaustive")


SUITE = """
import sys, pytest
from fastopt._kernels import half
print(half._f16c())
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_half_precision_works_on_any_processor(run_python):
    files = ["test_mixed_precision.py", "test_split_masters.py", "test_stochastic_rounding.py"]
    paths = [TESTS / "engine" / name for name in files]
    output = run_python(SUITE, *paths, NUMBA_CPU_NAME="generic")
    assert output.startswith("False\n")
    assert " passed" in output
