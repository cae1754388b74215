"""Kernels of half precision: the loop over elements stays vectorized, whatever is converted."""

import re

import numpy as np
import pytest

from fastopt._kernels import cpu, half
from fastopt._kernels.layout import BFLOAT16, FLOAT16, SPLIT, Layout
from fastopt.optimizer.adam import adam
from helpers.cases import kept
from helpers.kernel_code import compile_loop

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
        return np.ones(64, ml_dtypes.bfloat16), np.zeros(64, np.uint16)
    return tuple(np.ones(64, dtypes[kind]) for kind in kinds)


def compile_anew(weight, grad, state, options):
    """LLVM and machine code of Adam for these kinds, compiled without the disk cache."""
    layout = Layout(adam, SINGLE, weight, grad, (state, state), **options)
    used = [*arrays(weight), *arrays((state, state)), *arrays((grad,))]
    return compile_loop(cpu.element_loop(layout), layout, used)


@pytest.mark.slow
@pytest.mark.parametrize("form", kept(FORMS, "float16 masters", "compressed state"))
def test_the_loop_over_elements_is_vectorized(form):
    """And random numbers are drawn in vectors."""
    llvm, code = compile_anew(*FORMS[form])
    assert re.search(r"fdiv <\d+ x float>", llvm)
    assert re.search(r"store <\d+ x (i16|half)>", llvm)
    assert "double" not in llvm
    if form.startswith("float16") and half._f16c():
        assert "vcvtph2ps" in code
    if form.endswith(("stochastic", "state")):
        assert re.search(r"mul <\d+ x i(32|64)>", llvm)
