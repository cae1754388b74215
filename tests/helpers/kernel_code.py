"""LLVM code and machine code of kernels."""

import numpy as np
from numba import njit

from fastopt._kernels.layout import ADDRESS, WIDTH, Layout
from helpers.cases import CASES

RULES = {r.name: r for r in (case.make().rule for case in CASES) if r is not None}


def compile_loop(loop, layout, arrays, *more):
    """LLVM and machine code of a loop over arrays: weight, state and gradient."""
    table = np.zeros((1, ADDRESS + len(arrays)), np.uint64)
    table[0, WIDTH] = arrays[0].size // len(arrays[0])
    table[0, ADDRESS:] = [array.ctypes.data for array in arrays]
    hyper = np.ones((1, len(layout.rule.hyper)), layout.real).view(layout.record).reshape(-1)
    compiled = njit(error_model="numpy")(loop)
    compiled(np.array([[0, 0, arrays[0].size]]), table, hyper, *more)
    return "".join(compiled.inspect_llvm().values()), "".join(compiled.inspect_asm().values())


def compile_anew(loop_of, name, real, *more):
    """Compile without the disk cache, which holds no LLVM code to read."""
    r = RULES[name]
    arrays = [np.ones((4, 8), real) for _ in range(2 + len(r.state))]
    arrays += [np.ones((), real) for _ in r.kept]
    layout = Layout(r, real, (real,), real, (real,) * len(r.state))
    weight, grad, *state = arrays
    return compile_loop(loop_of(layout), layout, [weight, *state, grad], *more)
