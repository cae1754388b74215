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
    names = "mixed_precision", "split_masters", "stochastic_rounding"
    paths = [TESTS / "engine" / f"test_{name}.py" for name in names]
    paths.append(TESTS / "kernels" / "test_half.py")
    output = run_python(SUITE, *paths, NUMBA_CPU_NAME="generic")
    assert output.startswith("False\n")
    assert " passed" in output
