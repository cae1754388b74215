"""The programs of docs/cluster-jobs.md: each launcher takes up the checkpoint of one process."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastopt.distributed import ShardedUpdater, run_threads
from helpers.paths import DOCS, ROOT
from helpers.processes import run

JOBS = DOCS / "jobs"
TORCH = os.environ.get("FASTOPT_TEST_TORCH") or sys.executable
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH')}")
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
COMMANDS = {
    "mpi4py": (MPIEXEC, "-n", "2", sys.executable, JOBS / "by_mpi.py"),
    "torch": (TORCH, *TORCHRUN, JOBS / "by_torchrun.py"),
    "ray": (TORCH, JOBS / "by_ray.py"),
    "distributed": (TORCH, JOBS / "by_dask.py"),
}
"""Command of each launcher, by the package that it needs."""


def has(python, package):
    """Whether an environment has a package; folders of that name without a file are none."""
    if python == sys.executable:
        return getattr(importlib.util.find_spec(package), "origin", None) is not None
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return run(python, "-c", code, status=None).returncode == 0


@pytest.fixture
def train(monkeypatch):
    """The function of the page, for a job of threads of which each is a rank."""
    monkeypatch.syspath_prepend(JOBS)
    function = importlib.import_module("train").train

    return lambda ranks, path, steps: run_threads(
        ranks, lambda comm: function(comm, comm.rank, comm.size, path, steps)
    )


@pytest.fixture
def resumed(train, tmp_path):
    """Weights and checkpoint of a job that stopped after 5 steps, and weights after 12."""
    train(1, tmp_path / "straight", 12)
    train(3, tmp_path / "model", 5)
    return tmp_path


def test_a_job_of_threads_resumes(resumed, train):
    assert [step for step, _ in train(2, resumed / "model", 12)] == [12, 12]
    check_weights(train, resumed / "model", resumed / "straight")


def test_a_job_saves_every_few_steps(train, monkeypatch):
    saved = []
    monkeypatch.setattr(importlib.import_module("train"), "SAVE_EVERY", 4)
    monkeypatch.setattr(
        ShardedUpdater, "save", lambda self, *_, **__: saved.append(self.optimizer.num_update)
    )
    train(1, Path("none"), 10)
    assert saved == [4, 8, 10]


def check_weights(train, path, straight):
    """The weights of a job are those of one that never stopped."""
    ((_, ours),), ((_, theirs),) = (train(1, each, 12) for each in (path, straight))
    for name, weight in theirs.items():
        np.testing.assert_allclose(ours[name], weight, rtol=1e-5)


@pytest.mark.parametrize("package", COMMANDS)
def test_launchers_resume_a_job_of_threads(resumed, train, package):
    python = sys.executable if package == "mpi4py" else TORCH
    if not has(python, package) or (package == "mpi4py" and MPIEXEC is None):
        pytest.skip(f"{package} is missing")
    given = resumed / "model", 12, *(["2"] if package in ("ray", "distributed") else [])
    done = run(*COMMANDS[package], *given, PYTHONPATH=f"{ROOT}{os.pathsep}{JOBS}")
    assert "step 12 on 2 ranks" in done.stdout + done.stderr  # Ray prints to either
    check_weights(train, resumed / "model", resumed / "straight")


def test_ranks_with_local_steps_train_one_model(monkeypatch):
    monkeypatch.syspath_prepend(JOBS)
    train = importlib.import_module("local_sgd").train
    first, *others = run_threads(3, lambda comm: train(comm, comm.rank))
    np.testing.assert_allclose(first["weight"], [1, -2, 0.5], atol=0.2)
    for other in others:
        assert other["weight"].tobytes() == first["weight"].tobytes()


KILLED = """
import os, runpy, signal, sys
import train

class ShardedUpdater(train.ShardedUpdater):
    def __call__(self, *arguments):
        if self.optimizer.num_update == 7 and sys.argv[2] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__call__(*arguments)

train.ShardedUpdater, train.SAVE_EVERY = ShardedUpdater, 4
runpy.run_module("shrink", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be killed by a signal")
@pytest.mark.skipif(not has(TORCH, "torch"), reason="torch is missing")
def test_ranks_that_survive_another_go_on_without_it(train, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    path = tmp_path / "model"
    ranks = [
        subprocess.Popen(
            [TORCH, "-c", KILLED, address, str(rank), "3", str(path), "12"],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{JOBS}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, -9]
    assert said[0].startswith("step 12 on 2 ranks")
    check_weights(train, path, tmp_path / "straight")
