"""LLVM code and machine code of kernels."""

import numpy as np
from numba import njit

from fastopt._kernels.layout import Layout
from fastopt._kernels.table import Table
from helpers.cases import CASES

__all__ = ["RULES", "compile_anew"]

RULES = {
    r.name: r for r in (rule for case in CASES for rule in [case.make().rule] if rule is not None)
}


def compile_anew(kernel, name, real, *more):
    """Compile without the disk cache, which holds no LLVM code to read."""
    r = RULES[name]
    arrays = [np.ones((4, 8), real) for _ in range(2 + len(r.state))]
    arrays += [np.ones((), real) for _ in r.kept]
    layout = Layout(r, real, (real,), real, (real,) * len(r.state))
    made = Table(layout, (arrays[0],), tuple(arrays[2:]), arrays[1])
    made.fields[:] = 1
    fresh = njit(error_model="numpy")(kernel(layout, False).py_func)
    fresh(made.chunks, made.table, made.hyper, *more)
    return "".join(fresh.inspect_llvm().values()), "".join(fresh.inspect_asm().values())
