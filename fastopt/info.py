"""Description of the environment: versions, processor, threads, kernel cache, MPI and CUDA."""

import importlib
import inspect
import os
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
from llvmlite import binding

import fastopt
from fastopt import optimizer
from fastopt._console import STARTERS
from fastopt._kernels import cpu
from fastopt._kernels.compiling import switched_on
from fastopt._kernels.devices import INSTALLATION, unsuited
from fastopt._kernels.numpy_abi import unreadable
from fastopt._kernels.threads import start_layer, thread_count

numba: Any = importlib.import_module("numba")  # its type hints lack the configuration


BUSY = 0.75
"""Load per CPU above which timings are unreliable: a benchmark needs idle CPUs."""

FEATURES = (
    *("sse4.2", "avx", "avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"),
    *("neon", "fullfp16", "sve", "sve2"),
)
"""Instruction sets that affect how kernels are compiled, x86 first, then ARM."""


def report() -> str:
    """Describe versions, processor, threads, kernel cache, MPI and CUDA, one line each.

    It runs an update that is large enough for several threads, because the threading layer is
    selected only then.

    Examples
    --------
    >>> from fastopt import info
    >>> print(info.report())  # doctest: +ELLIPSIS
    fastopt          ...
    python           ...
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = mpi()  # first, because it sets the number of threads of a rank
        rows = {
            "fastopt": fastopt.__version__,
            "python": f"{platform.python_version()}  {sys.executable}",
            "numpy": np.__version__,
            "numba": numba.__version__,
            "llvmlite": llvmlite.__version__,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": processor(),
            "cpu features": features(),
            "compiled for": target(),
            "threading layer": threading_layer(),
            "threads": threads(),
            "load": load(),
            "kernel cache": kernel_cache(),
            "calls": calls(),
            "mpi": ranks,
            "cuda": cuda(),
        }
    return "\n".join(f"{name:<17}{text}" for name, text in rows.items())


def busy() -> str:
    """Return a warning if other processes keep this machine busy, else an empty string."""
    load, cpus = _load()
    if load is None or load <= BUSY * cpus:
        return ""
    return f"this machine is busy (load {load:.1f} on {cpus} CPUs): timings mean little"


def load() -> str:
    """Return the load average of the last minute."""
    mean, cpus = _load()
    return busy() or ("unknown" if mean is None else f"{mean:.1f} on {cpus} CPUs")


def _load() -> tuple[float | None, int]:
    mean = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # missing on Windows
    return mean, os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def features() -> str:
    """Return the instruction sets in :data:`FEATURES` that the processor supports."""
    try:
        supported = binding.get_host_cpu_features()
    except RuntimeError as error:
        return f"unknown: {error}"
    return " ".join(name for name in FEATURES if supported.get(name)) or "none"


def target() -> str:
    """Return the processor that kernels are compiled for, and the setting that selected it."""
    name, chosen = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    used = {None: "its features", "": "none of its features"}.get(chosen, f"features {chosen}")
    if name is None:
        return f"{binding.get_host_cpu_name()} with {used}"
    return f"NUMBA_CPU_NAME={name} on {binding.get_host_cpu_name()}, with {used}"


def threading_layer() -> str:
    """Return the threading layer of parallel kernels, and why it was selected."""
    weight = np.zeros(1 << 20, np.float32)
    try:
        optimizer.get_updater(optimizer.SGD())(0, np.zeros_like(weight), weight)
        start_layer()  # in case the update ran on one thread
        layer = numba.threading_layer()
    except ValueError as error:
        return f"none: {_flat(error)}"
    asked = str(numba.config.THREADING_LAYER).lower()
    if asked != "default":
        return f"{layer}, chosen by NUMBA_THREADING_LAYER={asked}"
    order = list(numba.config.THREADING_LAYER_PRIORITY)
    missed = [f"; no {name}: {_obstacle(name)}" for name in order[: order.index(layer)]]
    return f"{layer}, the first to load of {', '.join(order)}{''.join(missed)}"


def _obstacle(layer: str) -> str:
    """Return the reason why numba cannot use a threading layer."""
    try:
        importlib.import_module(f"numba.np.ufunc.{layer}pool")
    except ImportError as error:
        return _flat(error)
    return "its library is missing or too old"


def threads() -> str:
    """Return the number of threads of a parallel kernel, and its limits."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count()
    limit = f"{usable} of {os.cpu_count()} CPUs may be used"
    if setting := os.environ.get("NUMBA_NUM_THREADS"):
        limit += f", NUMBA_NUM_THREADS={setting}"
    try:
        number = thread_count()
    except ValueError:  # no threading layer
        number = numba.config.NUMBA_NUM_THREADS
    return f"{number}; {limit}"


def mpi() -> str:
    """Return the mpi4py version, this rank and its threads, or why MPI is unavailable."""
    try:
        package = f"mpi4py {version('mpi4py')}"
    except PackageNotFoundError:
        return "none: pip install mpi4py mpich"
    if not any(name in os.environ for name in STARTERS):
        return f"{package}; not started by mpiexec"
    try:
        job: str = importlib.import_module("fastopt.mpi.communicator").describe()
    except ImportError as error:
        return f"{package}; {_flat(error)}"
    return f"{package} on {job}"


def kernel_cache() -> str:
    """Return the directory of numba's compiled kernels, or why there is none."""
    factory = inspect.unwrap(cpu.flush_decay)
    try:
        # Decorating a function locates the directory and checks that it is writable; nothing is
        # compiled.
        with switched_on():
            return str(numba.njit(cache=True)(factory).stats.cache_path)
    except (RuntimeError, OSError) as error:
        return f"none: {error}; set NUMBA_CACHE_DIR to a directory that can be written"


def calls() -> str:
    """Return whether the arguments of calls are checked by compiled code, or why not."""
    reason = unreadable()
    return f"checked in Python: {reason}" if reason else "checked by compiled code"


def cuda() -> str:
    """Return the name of the current CUDA device, or why there is none."""
    try:
        cuda: Any = importlib.import_module("numba.cuda")
        if numba.config.ENABLE_CUDASIM:
            return "simulated on the CPU, NUMBA_ENABLE_CUDASIM=1"
        if find_spec("numba_cuda") is None:
            return f"none: numba-cuda is not installed; {INSTALLATION}"
        if reason := unsuited():
            return f"none: it needs {reason}"
        if not cuda.is_available():
            return f"none: {_flat(cuda.cuda_error())}"
        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        return f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}"
    except Exception as error:  # numba raises various errors if a part of CUDA is missing
        return f"none: {_flat(error)}"


def _flat(error: object) -> str:
    return " ".join(str(error).split())
