"""Tests in other processes: whose allocator overwrites freed memory, or of any processor."""

import ast

import pytest

from helpers.cases import CHOICES, every_choice, exhaustive, nightly
from helpers.paths import TESTS
from helpers.settings import ends

OVERWRITTEN = {"PYTHONMALLOC": "debug", "MALLOC_PERTURB_": "165"}


@pytest.mark.parametrize("profile", [*exhaustive("default"), *nightly("exhaustive")])
def test_what_a_call_converts_lives_until_it_ends(profile, run_python):
    """Any form of a gradient has the bits of the plain one, which needs no conversion."""
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    chosen = "-k", "plain_form", "-m", "not gpu", "--hypothesis-profile", profile
    promises = TESTS / "optimizer" / "test_promises.py"
    run_python(code, promises, "-q", *chosen, "-p", "no:cacheprovider", timeout=3600, **OVERWRITTEN)


@every_choice
def test_freed_memory_is_not_read(choice, run_python):
    """Its bytes change no bit, which compiled sums over tensors show first."""
    code = f"from helpers.settings import ends; print(ends({choice!r}))"
    lines = run_python(code, timeout=3600, **OVERWRITTEN)
    expected, found = ends(choice), ast.literal_eval(lines)
    assert len(expected) == len(CHOICES[choice])
    assert [name for name in expected if found[name] != expected[name]] == []


SUITE = """
import sys, pytest
from fastopt._kernels import half
print(half._f16c())
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow("exhaustive")
def test_half_precision_works_on_any_processor(run_python):
    pytest.importorskip("ml_dtypes")
    names = "mixed_precision", "stochastic_rounding"
    paths = [TESTS / "engine" / f"test_{name}.py" for name in names]
    paths.append(TESTS / "kernels" / "test_half.py")
    output = run_python(SUITE, *paths, NUMBA_CPU_NAME="generic")
    assert output.startswith("False\n")
    assert " passed" in output
