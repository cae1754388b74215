import os
import platform
import re
import subprocess
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

LABELS = [
    *("fastopt", "python", "numpy", "numba", "llvmlite"),
    *("system", "cpu", "cpu features", "compiled for"),
    *("threading layer", "threads", "load", "kernel cache", "calls", "mpi", "cuda"),
]


def rows(text):
    return {line[:17].rstrip(): line[17:] for line in text.splitlines()}


def report_of_process(**environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fastopt", "info"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return rows(done.stdout)


def test_report_has_one_aligned_line_for_each_property(capsys):
    assert main(["info"]) == 0
    captured = capsys.readouterr()
    described = rows(captured.out)
    assert list(described) == LABELS
    assert all(text and text[0] != " " for text in described.values())
    assert captured.err == ""


def test_no_warning_leaks_from_what_is_described(monkeypatch):
    def warn():
        warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
        return "described"

    monkeypatch.setattr(info, "cuda", warn)
    assert rows(info.report())["cuda"] == "described"


def test_versions_are_those_that_are_imported():
    described = rows(info.report())
    assert described["fastopt"] == fastopt.__version__
    assert described["python"].split()[0] == platform.python_version()
    assert described["numpy"] == np.__version__
    assert described["numba"] == numba.__version__


def test_features_are_those_of_the_processor(monkeypatch):
    monkeypatch.setattr(
        info.binding, "get_host_cpu_features", lambda: {"avx2": True, "f16c": False, "fma": True}
    )
    assert info.features() == "avx2 fma"


def test_features_that_llvm_does_not_report_are_unknown(monkeypatch):
    def fail():
        raise RuntimeError("not on this processor")

    monkeypatch.setattr(info.binding, "get_host_cpu_features", fail)
    assert info.features() == "unknown: not on this processor"


def test_threading_layer_is_the_one_that_numba_runs():
    described = info.threading_layer()
    assert described.split(",")[0] == numba.threading_layer()


@pytest.mark.slow("exhaustive")
def test_settings_of_the_environment_are_reported():
    described = report_of_process(
        NUMBA_CPU_NAME="generic", NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="1"
    )
    assert described["compiled for"].startswith("NUMBA_CPU_NAME=generic on ")
    assert described["compiled for"].endswith(" none of its features")
    assert described["threading layer"] == "workqueue, chosen by NUMBA_THREADING_LAYER=workqueue"
    assert described["threads"].startswith("1; ")
    assert described["threads"].endswith(", NUMBA_NUM_THREADS=1")


@pytest.mark.slow
def test_threading_layer_that_does_not_exist_is_reported_with_the_reason():
    described = report_of_process(NUMBA_THREADING_LAYER="none_such")
    assert described["threading layer"].startswith("none: ")
    assert "none_such" in described["threading layer"]


def test_first_layer_of_the_order_that_loads_is_explained(monkeypatch):
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "default")
    monkeypatch.setattr(numba.config, "THREADING_LAYER_PRIORITY", ["tbb", "omp", "workqueue"])
    monkeypatch.setattr(numba, "threading_layer", lambda: "omp")
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.tbbpool", None)
    described = info.threading_layer()
    assert described.startswith("omp, the first to load of tbb, omp, workqueue; no tbb: ")
    assert "tbbpool" in described


def test_kernel_cache_is_where_kernels_go():
    weight = np.zeros(3, np.float32)
    fastopt.get_updater(fastopt.optimizer.SGD())(0, weight + 1, weight)
    from fastopt._kernels import cpu
    from fastopt._kernels.layout import Layout

    layout = Layout(fastopt.optimizer.SGD().rule, np.float32, (np.float32,), np.float32, ())
    path = cpu.flush_decay(layout, False).stats.cache_path
    assert path is not None
    assert info.kernel_cache() == path


def test_looking_for_the_kernel_cache_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert info.kernel_cache().startswith(str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_read_only_kernel_cache_is_reported_with_the_reason(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    described = info.kernel_cache()
    assert described.startswith("none: cannot cache function")
    assert "NUMBA_CACHE_DIR" in described


def test_cuda_that_cannot_be_imported_is_reported_with_the_reason(monkeypatch):
    def missing(name):
        assert name == "numba.cuda"
        raise RuntimeError("no\ntoolkit")

    monkeypatch.setattr(info.importlib, "import_module", missing)
    assert info.cuda() == "none: no toolkit"


@pytest.mark.parametrize(
    ("available", "described"), [(False, "none: no driver"), (True, "H200, compute capability 9.0")]
)
def test_cuda_is_the_device_or_the_reason(available, described, monkeypatch):
    device = types.SimpleNamespace(name=b"H200", compute_capability=(9, 0))
    target = types.SimpleNamespace(
        is_available=lambda: available,
        cuda_error=lambda: "no\n driver",
        get_current_device=lambda: device,
    )
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    monkeypatch.setattr(info, "find_spec", lambda name: name)
    monkeypatch.setattr(info.importlib, "import_module", lambda name: target)
    monkeypatch.setattr(info, "unsuited", lambda: None)
    assert info.cuda() == described
    monkeypatch.setattr(info, "unsuited", lambda: "another NumPy")
    assert info.cuda() == "none: it needs another NumPy"


def test_without_numba_cuda_the_versions_of_the_extras_are_named(monkeypatch):
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newer, older = (extras["optional-dependencies"][name][:2] for name in ("cuda13", "cuda12"))
    assert newer[1] == older[1]
    assert re.findall(r"'([^']*)'", info.cuda()) == [*newer, older[0]]


@pytest.mark.parametrize(
    ("reason", "line"),
    [("", "checked by compiled code"), ("no GIL", "checked in Python: no GIL")],
)
def test_calls_are_checked_by_compiled_code_or_the_reason_is_given(reason, line, monkeypatch):
    monkeypatch.setattr(info, "unreadable", lambda: reason)
    assert info.calls() == line


@pytest.mark.slow
def test_simulated_cuda_is_not_taken_for_a_device():
    assert report_of_process(NUMBA_ENABLE_CUDASIM="1")["cuda"].startswith("simulated")


@pytest.mark.parametrize(
    ("mean", "line"),
    [
        (0.5, "0.5 on 2 CPUs"),
        (12.0, "this machine is busy (load 12.0 on 2 CPUs): timings mean little"),
    ],
)
def test_load_is_reported_and_a_busy_machine_named(mean, line, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (mean, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert info.load() == line


def test_load_is_unknown_where_the_system_does_not_report_it(monkeypatch):
    monkeypatch.delattr("os.getloadavg", raising=False)
    assert info.load() == "unknown"
    assert info.busy() == ""
