import re
import sys
import tomllib
import types
import warnings

import numba
import numpy as np
import pytest

import fastopt
from fastopt import info
from fastopt.__main__ import main
from helpers.paths import ROOT
from helpers.processes import run

LABELS = [
    *("fastopt", "python", "numpy", "numba", "llvmlite"),
    *("system", "cpu", "cpu features", "compiled for"),
    *("threading layer", "threads", "load", "kernel cache", "calls", "mpi", "cuda"),
]


def rows(text):
    return {line[:17].rstrip(): line[17:] for line in text.splitlines()}


def report_of_process(**environment):
    done = run(sys.executable, "-W", "error", "-m", "fastopt", "info", **environment)
    assert done.stderr == ""
    return rows(done.stdout)


def test_report_has_one_aligned_line_for_each_property(capsys):
    assert main(["info"]) == 0
    captured = capsys.readouterr()
    described = rows(captured.out)
    assert list(described) == LABELS
    assert all(text and text[0] != " " for text in described.values())
    assert captured.err == ""


def fails(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def warns():
    warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
    return "described"


def cuda(available, reason=None):
    """What is patched for a driver with a device or without one."""
    device = types.SimpleNamespace(name=b"H200", compute_capability=(9, 0))
    target = types.SimpleNamespace(
        is_available=lambda: available,
        cuda_error=lambda: "no\n driver",
        get_current_device=lambda: device,
    )
    return {
        "numba.config.ENABLE_CUDASIM": 0,
        "fastopt.info.find_spec": lambda name: name,
        "fastopt.info.unsuited": lambda: reason,
        "fastopt.info.importlib.import_module": lambda name: target,  # what patches use too
    }


LAYERS = {
    "numba.config.THREADING_LAYER": "default",
    "numba.config.THREADING_LAYER_PRIORITY": ["tbb", "omp", "workqueue"],
    "numba.threading_layer": lambda: "omp",
}
HOST, LOAD = "fastopt.info.binding.get_host_cpu_features", "os.getloadavg"
DESCRIBED = [
    ("features", {HOST: lambda: {"avx2": True, "f16c": False, "fma": True}}, "avx2 fma$"),
    ("features", {HOST: fails(RuntimeError("on no processor"))}, "unknown: on no processor$"),
    ("threading_layer", LAYERS, "omp, the first to load of tbb, omp, workqueue; no tbb: .*tbbpool"),
    ("kernel_cache", {"tempfile.TemporaryFile": fails(PermissionError("read-only"))},
     "none: cannot cache function.*NUMBA_CACHE_DIR"),
    ("report", {"fastopt.info.cuda": warns}, r"(?s).*\ncuda +described$"),
    ("cuda", {"fastopt.info.importlib.import_module": fails(RuntimeError("no\ntoolkit"))},
     "none: no toolkit$"),
    ("cuda", cuda(False), "none: no driver$"),
    ("cuda", cuda(True), "H200, compute capability 9.0$"),
    ("cuda", cuda(True, "another NumPy"), "none: it needs another NumPy$"),
    ("cuda", {"numba.config.ENABLE_CUDASIM": 1}, "simulated"),
    ("calls", {"fastopt.info.unreadable": lambda: ""}, "checked by compiled code$"),
    ("calls", {"fastopt.info.unreadable": lambda: "no GIL"}, "checked in Python: no GIL$"),
    ("load", {LOAD: lambda: (0.5, 0.0, 0.0)}, "0.5 on 2 CPUs$"),
    ("load", {LOAD: lambda: (12.0, 0.0, 0.0)},
     r"this machine is busy \(load 12.0 on 2 CPUs\): timings mean little$"),
    ("load", {LOAD: None}, "unknown$"),
    ("busy", {LOAD: None}, "$"),
]  # fmt: skip
"""A property, what is patched, and what is said of it."""


@pytest.mark.parametrize(("name", "patched", "words"), DESCRIBED)
def test_what_there_is_or_the_reason_is_described(name, patched, words, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.tbbpool", None)
    for path, value in patched.items():
        if value is None:
            monkeypatch.delattr(path, raising=False)
        else:
            monkeypatch.setattr(path, value, raising=False)
    assert re.match(words, getattr(info, name)())


@pytest.mark.slow
def test_threading_layer_that_does_not_exist_is_reported_with_the_reason():
    described = report_of_process(NUMBA_THREADING_LAYER="none_such")
    assert described["threading layer"].startswith("none: ")
    assert "none_such" in described["threading layer"]


def test_kernel_cache_is_where_kernels_go():
    weight = np.zeros(3, np.float32)
    fastopt.get_updater(fastopt.optimizer.SGD())(0, weight + 1, weight)
    from fastopt._kernels import cpu
    from fastopt._kernels.layout import Layout

    layout = Layout(fastopt.optimizer.SGD().rule, np.float32, (np.float32,), np.float32, ())
    path = cpu.flush_decay(layout, False).stats.cache_path
    assert path is not None
    assert info.kernel_cache() == path


def test_without_numba_cuda_the_versions_of_the_extras_are_named(monkeypatch):
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newer, older = (extras["optional-dependencies"][name][:2] for name in ("cuda13", "cuda12"))
    assert newer[1] == older[1]
    assert re.findall(r"'([^']*)'", info.cuda()) == [*newer, older[0]]
