"""Compiled kernels: vectorizable arithmetic, complete coverage of elements, exact sums."""

import platform
import re
from functools import partial

import numpy as np
import pytest

from fastopt._kernels import cpu, cpu_sums, half
from fastopt._kernels.layout import BFLOAT16, FLOAT16, SPLIT, Layout
from fastopt.optimizer.adam import adam
from helpers.cases import exhaustive, kept
from helpers.kernel_code import RULES, compile_anew, compile_loop

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
    loop_of = partial(cpu_sums.sum_loop, step=0)
    llvm, _ = compile_anew(loop_of, name, np.float32, np.zeros((1, 4)))
    assert "fadd <32 x double>" in llvm
    assert "x float>" in llvm


SINGLE = np.float32
FORMS = {
    "float16 masters": ((SINGLE, FLOAT16), FLOAT16, SINGLE, {}),
    "bfloat16 masters": ((SINGLE, BFLOAT16), BFLOAT16, SINGLE, {}),
    "split masters": (SPLIT, BFLOAT16, SINGLE, {}),
    "float16, nearest": ((FLOAT16,), FLOAT16, SINGLE, {}),
    "float16, stochastic": ((FLOAT16,), FLOAT16, SINGLE, {"dither": True}),
    "bfloat16, stochastic": ((BFLOAT16,), BFLOAT16, SINGLE, {"dither": True}),
    "compressed state": ((SINGLE,), SINGLE, BFLOAT16, {}),
}


def arrays(kinds):
    """Arrays of these kinds, halves by their bits or in their own dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtypes = {FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16, SINGLE: SINGLE}
    if kinds == SPLIT:
        return np.ones(64, dtypes[BFLOAT16]), np.zeros(64, np.uint16)
    return [np.ones(64, dtypes[kind]) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("form", kept(FORMS, "float16 masters", "compressed state"))
def test_the_loop_over_elements_of_half_precision_is_vectorized(form):
    """And random numbers are drawn in vectors."""
    weight, grad, state, options = FORMS[form]
    layout = Layout(adam, SINGLE, weight, grad, (state, state), **options)
    used = [*arrays(weight), *arrays((state, state, grad))]
    llvm, code = compile_loop(cpu.element_loop(layout), layout, used)
    assert re.search(r"fdiv <\d+ x float>", llvm)
    assert re.search(r"store <\d+ x (i16|half)>", llvm)
    assert "double" not in llvm
    if form.startswith("float16") and half._f16c():
        assert "vcvtph2ps" in code
    if form.endswith(("stochastic", "state")):
        assert re.search(r"mul <\d+ x i(32|64)>", llvm)
