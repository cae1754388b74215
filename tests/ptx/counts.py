"""Instructions and memory traffic of CUDA kernels for each element, counted while they run.

``python tests/ptx/counts.py [STEP ...]`` prints the table of docs/cuda.md. It needs numba-cuda and
a C compiler, but no GPU: the counts are those of the compiled PTX, and exact. A sector is 32 bytes
of memory that an instruction of a warp loads or stores; fewer than the bytes need there cannot be.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

SIZE = 1 << 18
"""Elements of a weight, or row indices."""

CASES = {
    "Adam, float32": ("adam", "float32", {}, {}),
    "Adam, float16 with master": ("adam", "float16", {"multi_precision": True}, {}),
    "Adam, split bfloat16": ("adam", "bfloat16", {"multi_precision": True, "master": "split"}, {}),
    "Adam, bfloat16 state": ("adam", "float32", {"state_dtype": "bfloat16"}, {}),
    "Adam, 8-bit state": ("adam", "float32", {"state_dtype": "int8"}, {}),
    "LAMB, float32": ("lamb", "float32", {}, {}),
    "LAMB, float16 with master": ("lamb", "float16", {"multi_precision": True}, {}),
    "norm, float32": ("sgd", "float32", {}, {"clip_global_norm": 1.0}),
    "norm, float16": ("sgd", "float16", {"multi_precision": True}, {"clip_global_norm": 1.0}),
    "rows": ("sgd", "float32", {}, {}),
}
"""Optimizer, dtype of the weight, and arguments of the optimizer and of the updater."""

KERNELS = {
    "rows": ("sort_tiles", "merge", "cut_rows"),
    "norm": ("squares",),
    "LAMB": ("sums", "dense"),
    "Adam": ("dense", "blocks"),
}
"""Kernels of interest by the first word of a case."""


class Counts(ctypes.Structure):
    """What the executor counts: of loads, then of stores."""

    _fields_ = [
        ("instructions", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64 * 2),
    ]

    def read(self):
        return [self.instructions, sum(self.sectors)]


def counted(name, size=SIZE):
    """Return instructions and sectors of the kernels of a case for each element, by name."""
    import ml_dtypes
    import numpy as np
    from numba import cuda

    from fastopt import RowSparse, optimizer
    from fastopt._kernels import cuda_driver as driver
    from helpers.device_arrays import on_device

    rule, dtype, kwargs, options = CASES[name]
    updater = optimizer.Updater(optimizer.create(rule, **kwargs), **options)
    dtype = getattr(ml_dtypes, dtype, dtype)
    rng, found, launch = np.random.default_rng(0), {}, driver.launch
    if name == "rows":
        weight = on_device(np.zeros((100_000, 1), np.float32))
        ids = cuda.to_device(rng.integers(0, 100_000, size // 4))
        grad = RowSparse(on_device(np.ones((size // 4, 1), np.float32)), ids, (100_000, 1))
        size //= 4
    else:
        weight, grad = (on_device(rng.normal(size=(size // 512, 512)).astype(dtype)) for _ in "wg")

    def run(kernel, *arguments):
        before = total.read()
        launch(kernel, *arguments)
        called = kernel.py_func.__name__.split("__")[0]
        added = [(b - a) / size for a, b in zip(before, total.read(), strict=True)]
        if called in KERNELS[name.split(",")[0]]:
            found[called] = [a + b for a, b in zip(found.get(called, [0] * 2), added, strict=True)]

    updater(0, grad, weight)
    total, library = Counts(), ctypes.CDLL("libcuda.so.1")
    library.executor_count(ctypes.byref(total))
    driver.launch = run
    updater(0, grad, weight)
    driver.launch = launch
    library.executor_count(None)
    return found


def main(names):
    print("| step | kernel | instructions | bytes of sectors |")
    print("|---|---|---|---|")
    for name in names or CASES:
        for kernel, (instructions, sectors) in counted(name).items():
            print(f"| {name} | `{kernel}` | {instructions:.4g} | {32 * sectors:.4g} |", flush=True)


if __name__ == "__main__":
    from ptx import executor

    if "PTX_FOLDER" in os.environ:
        executor.install()
        main(sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            executor.build_driver(folder)
            command = [sys.executable, *sys.argv]
            done = subprocess.run(command, env=executor.environment(folder), check=False)
            sys.exit(done.returncode)
