"""Compiled kernels: vectorizable arithmetic, complete coverage of elements, exact sums."""

import platform

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels import cpu, cpu_sums
from fastopt._kernels.record_words import LARGE_FROM
from helpers.cases import exhaustive
from helpers.kernel_code import RULES, compile_anew

ELEMENTWISE = [name for name, r in RULES.items() if not r.row]
FEW = ("sgd", "adam", "lamb")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*FEW, *exhaustive(*(name for name in ELEMENTWISE if name not in FEW))]
)
def test_the_loop_over_elements_is_vectorized_and_float32_never_widened(name):
    llvm, _ = compile_anew(cpu.element_loop, name, np.float32)
    assert "x float>" in llvm
    assert "fpext" not in llvm


AVX2 = "+avx,+avx2,+fma,+bmi,+bmi2,+f16c"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86")
@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("name", ["adam", "sgld"])
def test_avx2_is_enough_for_vectors_of_eight(name, run_python):
    """Normal numbers need no instruction that AVX-512 alone has."""
    code = (
        "import numpy as np; from fastopt._kernels import cpu; "
        "from helpers.kernel_code import compile_anew; "
        f"print(compile_anew(cpu.element_loop, {name!r}, np.float32)[0])"
    )
    llvm = run_python(code, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=AVX2)
    assert "sqrt.v8f32" in llvm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", *exhaustive("lans", "lars")])
def test_sums_are_added_in_vectors(name):
    llvm, _ = compile_anew(
        lambda layout: cpu_sums.sum_loop(layout, 0),
        name,
        np.float32,
        np.zeros((1, 4)),
    )
    assert "fadd <32 x double>" in llvm
    assert "x float>" in llvm


@pytest.mark.parametrize("size", [1, 255, 256, 257, 16_383, 16_384, 32_769, 100_001])
@pytest.mark.parametrize("name", ["adam", *exhaustive("lamb", "lans", "sgld")])
def test_parallel_and_serial_kernels_agree_bit_for_bit(name, size):
    results = []
    for threshold in (0, 1 << 60):
        rng = np.random.default_rng(0)
        weight, gradient = rng.random((2, size), np.float32)
        updater = optimizer.get_updater(optimizer.create(name, learning_rate=0.1, wd=0.1))
        updater.records.words[LARGE_FROM] = threshold
        for _ in range(2):
            updater(0, gradient, weight)
        results.append(weight)
    np.testing.assert_array_equal(*results)
