"""Half precision in other processes: on any processor, with more threads."""

import pytest

from helpers.paths import TESTS

pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.exhaustive

STEPS = "from helpers import half_forms; half_forms.main({})"


def test_random_numbers_are_the_same_for_any_number_of_threads(run_python):
    names, forms = ["adam", "groupadagrad"], ["stochastic", "compressed state"]
    outputs = [
        run_python(
            STEPS.format(f"{names}, {forms}, rows=40_000, threads={threads}"),
            NUMBA_NUM_THREADS="4",
        )
        for threads in (1, 2, 4)
    ]
    assert len(outputs[0].splitlines()) == len(names) * len(forms) * 2 * 2
    assert outputs[0] == outputs[1] == outputs[2]


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
