"""Compiled kernels: vectorizable arithmetic, complete coverage of elements, exact sums."""

import platform

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels import cpu, cpu_sums
from fastopt._kernels.record_words import LARGE_FROM
from fastopt.kernels.rule import rule
from helpers.cases import exhaustive
from helpers.kernel_code import RULES, compile_anew

ELEMENTWISE = [name for name, r in RULES.items() if not r.row]
FEW = ("sgd", "adam", "lamb")


@pytest.fixture(
    scope="module", params=[*FEW, *exhaustive(*(name for name in ELEMENTWISE if name not in FEW))]
)
def dense(request):
    """Name and LLVM code of a dense float32 kernel; the tests of one follow each other."""
    return request.param, compile_anew(cpu.element_loop, request.param, np.float32)[0]


@pytest.mark.slow
def test_float32_arithmetic_is_never_widened(dense):
    name, llvm = dense
    assert "fmul float" in llvm or "x float>" in llvm or name == "test"
    assert "fpext" not in llvm


@pytest.mark.slow
def test_the_loop_over_elements_is_vectorized(dense):
    _, llvm = dense
    assert "x float>" in llvm


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


@pytest.mark.slow
def test_the_test_for_widening_can_fail():
    @rule(hyper=("lr",))
    def wide(weight, grad, state, h):
        return weight - 0.1 * grad, ()

    RULES["wide"] = wide
    try:
        assert "fpext" in compile_anew(cpu.element_loop, "wide", np.float32)[0]
    finally:
        del RULES["wide"]


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


@pytest.mark.parametrize("scale", exhaustive(1e-3, 1.0, 1e15))
def test_norms_are_exact_to_float64(scale, rng):
    """LAMB's step has the length of the weight, which needs both norms."""
    weight = (scale * rng.normal(size=100_001)).astype(np.float32)
    before = weight.astype(np.float64)
    updater = optimizer.get_updater(optimizer.LAMB(learning_rate=0.5))
    updater(0, rng.normal(size=100_001).astype(np.float32), weight)
    step = np.linalg.norm(weight - before)
    np.testing.assert_allclose(step, 0.5 * np.linalg.norm(before), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(3, 1), (1, 7), (5, 64), *exhaustive((4, 1000), (2, 40_000), (20_000, 2))]
)
def test_rows_have_their_own_history(shape, rng):
    gradient = rng.normal(size=shape)
    updater, weight = (
        optimizer.get_updater(optimizer.GroupAdaGrad(learning_rate=0.1)),
        np.ones(shape),
    )
    updater(0, gradient, weight)
    history = np.square(gradient).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(updater.states[0], history, rtol=1e-12)
    expected = 1 - 0.1 * gradient / np.sqrt(history + 1e-5)
    np.testing.assert_allclose(weight, expected, rtol=1e-12)
