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
    chosen = "bit_for_bit or stochastic or split"
    output = run_python(
        SUITE, TESTS / "engine" / "test_mixed_precision.py", "-k", chosen, NUMBA_CPU_NAME="generic"
    )
    assert output.startswith("False\n")
    assert " passed" in output
