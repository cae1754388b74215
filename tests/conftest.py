"""Settings and fixtures for the whole suite."""

import os
import signal
import sys

import numpy as np
import pytest
from hypothesis import settings

from helpers import processes
from helpers.cases import exhaustive
from helpers.paths import TESTS
from helpers.untraced import trace_no_compiler

PROFILES = ("default", "exhaustive", "nightly")
"""Profiles of Hypothesis; slow tests run in the one that their mark has, and in later ones."""

for name in PROFILES[:2]:
    settings.register_profile(name, deadline=None, max_examples=25, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=400)
settings.load_profile("default")
trace_no_compiler()


def pytest_collection_modifyitems(config, items):
    """Leave out slow tests of later profiles than that of the run."""
    present = PROFILES.index(config.getoption("--hypothesis-profile") or "default")
    kept, later = [], []
    for item in items:
        profiles = (PROFILES.index(*mark.args) for mark in item.iter_markers("slow") if mark.args)
        (later if max(profiles, default=0) > present else kept).append(item)
    config.hook.pytest_deselected(items=later)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With FASTOPT_TEST_SKIPS=fail, for when all libraries are installed, a skip is a failure."""
    report = yield
    fails = os.environ.get("FASTOPT_TEST_SKIPS") == "fail"
    if fails and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def registries():
    """Those of the package, which are as before after the test."""
    from fastopt import initializer, lr_scheduler, optimizer

    every = {
        "optimizers": optimizer.opt_registry,
        "schedules": lr_scheduler.scheduler_registry,
        "initializers": initializer.initializer_registry,
    }
    before = {name: dict(registry) for name, registry in every.items()}
    yield every
    for name, known in before.items():
        every[name].clear()
        every[name].update(known)


@pytest.fixture
def unrecorded(monkeypatch):
    """Indices of each call whose records served it alone; the updater's parameters are marked."""
    from fastopt._engine.enrolment import Enrolment

    found, drop = [], Enrolment.drop_single

    def noting(self):
        if self._single:
            found.append(list(self.indices))
            self.parameters.unrecorded = True
        drop(self)

    monkeypatch.setattr(Enrolment, "drop_single", noting)
    return found


@pytest.fixture(scope="session")
def run_python():
    """Run code in a new process, with changes to the environment; return what it printed.

    It can import ``helpers``.
    """

    def run(code, *args, check=True, cwd=None, timeout=900, **env):
        paths = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
        command = sys.executable, "-P", "-W", "error", "-c", code, *args
        changes = {"PYTHONPATH": os.pathsep.join(paths), **env}
        done = processes.run(
            *command, status=0 if check else None, timeout=timeout, cwd=cwd, **changes
        )
        return done.stdout if check else done

    return run


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, here and in new processes, even if pytest ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bfloat16():
    """The dtype of bfloat16 arrays, from the package that defines it."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


@pytest.fixture(params=["float16", *exhaustive("bfloat16")])
def half(request):
    """The dtypes of half precision in turn."""
    if request.param == "bfloat16":
        return request.getfixturevalue("bfloat16")
    return np.dtype(request.param)
