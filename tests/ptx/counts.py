"""Instructions and memory traffic of CUDA kernels for each element, counted while they run.

``python tests/ptx/counts.py [STEP ...]`` prints the table of docs/cuda.md. It needs numba-cuda and
a C compiler, but no GPU: the counts are those of the compiled PTX, and exact. A sector is 32 bytes
of memory that an instruction of a warp loads or stores; fewer than the bytes need there cannot be.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx import executor

KERNELS = {
    "rows": ("sort_tiles", "merge", "cut_rows"),
    "norm": ("squares",),
    "LAMB": ("sums", "dense"),
    "Adam": ("dense", "blocks"),
}
"""Kernels of interest by the first word of a case."""


class Counts(ctypes.Structure):
    """What the executor counts: of loads, then of stores."""

    _fields_ = [("instructions", ctypes.c_uint64), ("sectors", ctypes.c_uint64 * 2)]

    def read(self):
        return [self.instructions, sum(self.sectors)]


def counted(make, arrays, names):
    """Return instructions and sectors of some kernels for each element, by name."""
    from fastopt._kernels import cuda_driver as driver
    from helpers.device_arrays import on_device

    updater, ((weight,), ((grad,), *_)) = make(), arrays(np.random.default_rng(0))
    size, found, launch = getattr(grad, "indices", weight).size, {}, driver.launch
    weight, grad = on_device(weight), on_device(grad)

    def run(kernel, *arguments):
        before = total.read()
        launch(kernel, *arguments)
        called = kernel.py_func.__name__.split("__")[0]
        added = [(b - a) / size for a, b in zip(before, total.read(), strict=True)]
        if called in names:
            found[called] = [a + b for a, b in zip(found.get(called, [0] * 2), added, strict=True)]

    updater(0, grad, weight)
    total, library = Counts(), ctypes.CDLL("libcuda.so.1")
    library.executor_count(ctypes.byref(total))
    driver.launch = run
    updater.forget()  # a step like the one before launches in compiled code
    updater(0, grad, weight)
    driver.launch = launch
    library.executor_count(None)
    return found


def main(chosen):
    from ptx.steps import CASES

    print("| step | kernel | instructions | bytes of sectors |")
    print("|---|---|---|---|")
    for name in chosen or CASES["counts"]:
        found = counted(*CASES["counts"][name], KERNELS[name.split(",")[0]])
        for kernel, (instructions, sectors) in found.items():
            print(f"| {name} | `{kernel}` | {instructions:.4g} | {32 * sectors:.4g} |", flush=True)


if __name__ == "__main__":
    if "PTX_FOLDER" in os.environ:
        executor.install()
        main(sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            executor.build_driver(Path(folder))
            print(executor.run_python(Path(folder), *sys.argv), end="")
