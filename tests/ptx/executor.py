"""Kernels of numba-cuda that run on the CPU, from their PTX, on a driver without a device.

A process that runs with :func:`environment` and calls :func:`install` uses numba-cuda as on a
machine with a GPU, but loads libraries that :mod:`ptx.translate` and a C compiler made from PTX.
``-p ptx.executor`` installs it in pytest. Environment variables: with ``PTX_SPLIT_FMA=1``, fma
rounds twice; ``FAKE_CAPABILITY`` is the compute capability, 90 by default; ``FAKE_DEFER`` is a seed
for the random order of launches and copies, which are otherwise done at once.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import processes
from helpers.paths import ROOT, TESTS
from ptx.translate import translate

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
HERE = Path(__file__).parent
FLAGS = ["-shared", "-fPIC", "-O1", "-w", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing"]

needs_compiler = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the driver without a device is for Linux"),
]
NUMBA_CUDA = "needs numba-cuda: pip install 'numba-cuda[cu13]'"
needs_numba_cuda = [
    *needs_compiler,
    pytest.mark.skipif(find_spec("numba_cuda") is None, reason=NUMBA_CUDA),
]
"""Marks of tests that need the driver, and of those that compile kernels for it."""

executed = set()
"""Names of the kernels that this process has loaded."""

compiled, launched = set(), set()
"""Kernels that fastopt has made, and those that it has launched: name and rule."""


def build_driver(folder):
    """Make the driver's library in a folder."""
    sources = TESTS / "fake_driver" / "libcuda.c", HERE / "executor.c"
    folder.mkdir(exist_ok=True)
    library = folder / "libcuda.so.1"
    subprocess.run([COMPILER, *FLAGS, "-o", library, *sources, "-lm", "-ldl"], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


def environment(folder, **changes):
    """Return the variables of a process that uses the driver in a folder, and compiles there."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
        "PTX_FOLDER": str(folder),
        **changes,
    }


def run_python(folder, *arguments, nothing=0, **changes):
    """What Python prints with the driver in a folder; `nothing` is another status of success."""
    settings = {"env": environment(folder, **changes), "cwd": ROOT, "timeout": 86_400}
    done = processes.run(sys.executable, *arguments, status=None, **settings)
    assert done.returncode in (0, nothing), done.stdout[-20_000:] + done.stderr
    return done.stdout


def compile_kernel(text, folder):
    """Return the path of a library made from PTX; with ``PTX_SPLIT_FMA=1``, fma rounds twice."""
    flags = [*FLAGS, *(["-DSPLIT_FMA"] if os.environ.get("PTX_SPLIT_FMA") == "1" else [])]
    name = hashlib.sha256("".join([text, *flags]).encode()).hexdigest()
    library, source = folder / f"{name}.so", folder / f"{name}.{os.getpid()}.c"
    if not library.exists():
        source.write_text(translate(text))
        made = source.with_suffix(".so")
        subprocess.run([COMPILER, *flags, f"-I{HERE}", "-o", made, source, "-lm"], check=True)
        made.rename(library)
    return library


def install():
    """Replace machine code in numba-cuda by the path of a library, which the driver loads."""
    from cuda.core import ObjectCode
    from numba.cuda import codegen

    def get_cubin(self, cc=None):
        text = self.get_asm_str(cc=self._ensure_cc(cc))
        executed.update(re.findall(r"\.entry\s+(\w+)", text))
        library = compile_kernel(text, Path(os.environ["PTX_FOLDER"]))
        return ObjectCode.from_cubin(str(library).encode() + b"\0")

    codegen.CUDACodeLibrary.get_cubin = get_cubin


def record_launches():
    """Record the kernels that fastopt makes and launches."""
    from fastopt._kernels import cuda, cuda_blocks, cuda_driver, cuda_order, cuda_steps

    make, launch, rules = cuda.compiled, cuda_driver.launch, {}

    def recorded(kernel, rule):
        made = make(kernel, rule)
        rules[id(made)] = kernel.__name__.split("__")[0], rule.name if rule else ""
        compiled.add(rules[id(made)])
        return made

    def run(kernel, *arguments):
        launched.add(rules[id(kernel)])
        launch(kernel, *arguments)

    for module in (cuda, cuda_blocks, cuda_order, cuda_steps):
        module.compiled = recorded
    cuda_driver.launch = run


def pytest_configure():
    install()
