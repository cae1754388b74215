"""Sharded updates by ``torchrun`` over gloo; ``FASTOPT_TEST_TORCH`` names a Python with torch."""

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys

import pytest

from helpers.cases import exhaustive
from helpers.paths import ROOT, TESTS
from helpers.processes import run
from helpers.ranks import CHECKS, OF_FORMULAS, names_of

PYTHON = os.environ.get("FASTOPT_TEST_TORCH") or sys.executable

pytestmark = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("torch") is None,
    reason="torch is missing",
)


def torchrun(ranks, *command, status=0):
    """Run a program on so many ranks of one machine."""
    start = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return run(*start, *command, status=status, PYTHONPATH=f"{ROOT}{os.pathsep}{TESTS}")


@pytest.mark.parametrize(
    "parts",
    [("updates", "divergence"), ("nodes", "overlap"), *exhaustive(("settings", "overlap", "join"))],
    ids=" ".join,
)
def test_checks_pass(parts):
    """The ranks of a node meet in its memory, and others by gloo."""
    modules = [f"ranks_{part}" for part in parts if part != "nodes"]
    nodes = ["nodes"] * ("nodes" in parts)
    done = torchrun(3, CHECKS / "run_torch.py", *nodes, *modules)
    names = [name for module in modules for name in names_of(module)]
    found = [name for name in names if name not in OF_FORMULAS]
    assert re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE) == found


START = """
import os, signal, socket, sys, time
import numpy as np
import torch.distributed as dist
from fastopt import optimizer
from fastopt.distributed import ShardedUpdater
"""


ENDS = """
dist.init_process_group("gloo")
if "apart" in sys.argv:
    socket.gethostname = lambda: f"node {dist.get_rank()}"
updater = ShardedUpdater(optimizer.SGD(), dist.group.WORLD)
weight = np.ones(3, np.float32)
updater(0, weight.copy(), weight)
if dist.get_rank() == 1:
    sys.exit() if "left" in sys.argv else os._exit(0)
updater(0, weight.copy(), weight)
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("left", "rank 1 has ended"),
        ("killed", r"the connection to another rank failed: process \d+ of rank 1 has ended"),
        ("apart", "the connection to another rank failed: .*; no answer from rank 1"),
    ],
)
def test_a_rank_that_ends_is_an_error_of_the_others(tmp_path, way, words):
    program = tmp_path / "ends.py"
    program.write_text(START + ENDS, encoding="utf-8")
    done = torchrun(2, program, way, status="fails")
    assert re.search(rf"RuntimeError: call 2 of updater 0 \(update\): {words}", done.stderr)


def test_a_store_that_ends_is_an_error_that_says_where_it_was():
    dist = pytest.importorskip("torch.distributed")
    thread = importlib.import_module("fastopt.torch.communicator").StoreThread
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = thread(dist.TCPStore("127.0.0.1", server.port, is_master=False), limit=60.0)
    assert not store.result(lambda: store.store.check(["key"]))
    del server
    with pytest.raises(RuntimeError, match=r"the store of torch has ended, which is in .* rank 0"):
        store.result(lambda: store.store.check(["key"]))


LIVES_ON = """
def member(port, rank):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        updater, weight = ShardedUpdater(optimizer.SGD(), dist.group.WORLD), np.ones(3)
        with updater.join():
            for step in range(3):
                if step == 2 and rank == 1:
                    raise KeyError("bad record")
                updater(0, np.ones(3), weight)
    finally:
        dist.destroy_process_group()

try:
    member(sys.argv[2], int(sys.argv[1]))
except (KeyError, RuntimeError) as error:
    print(type(error).__name__, error, flush=True)
    if sys.argv[1] == "1":
        sys.stdin.read()  # as the process of a worker, which another job may follow
"""


@contextlib.contextmanager
def processes(program, ranks, *arguments):
    """Ranks that run a program without a launcher, and are killed at the end."""
    started = [
        subprocess.Popen(
            [PYTHON, "-c", START + program, str(rank), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()


def test_an_error_of_a_rank_whose_process_lives_on_is_one_of_the_others():
    """As in workers of Ray and Dask, which may keep the error and with it the updater."""
    with processes(LIVES_ON, 2, free_port()) as (first, second):
        told = first.communicate(timeout=300)[0]
        assert told.startswith("RuntimeError call 3 of updater 0 (update): rank 1 left join() by")
        assert "KeyError: 'bad record'" in told
        assert second.poll() is None
        assert second.communicate(timeout=60)[0] == "KeyError 'bad record'\n"


JOBS = """
rank, ports = int(sys.argv[1]), sys.argv[2:]

def begin(port):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    dist.new_group([0, 1])  # of the program itself

def train(updater):
    weight = np.zeros(9)
    updater(0, np.ones(9), weight)
    assert (weight == -3).all()

def raises(call, words):
    try:
        call()
    except TimeoutError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

used = []
for port in ports[:-1]:
    begin(port)
    updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), dist.group.WORLD, timeout=60)
    train(updater)
    used.append(len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0)
    del updater
    dist.destroy_process_group()
assert used[-1] < used[0] + 6, used  # each job has more than 10

begin(ports[-1])
everyone = dist.new_group([0, 1, 2])
if rank < 2:
    late = lambda: ShardedUpdater(optimizer.SGD(), everyone, timeout=1)
    raises(late, "of 3 waited 1 s for others")
dist.barrier()
train(ShardedUpdater(optimizer.SGD(learning_rate=1.0), everyone, timeout=60))
updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), everyone, timeout=2)
train(updater)
dist.barrier()
print("passed", flush=True)
time.sleep(1)  # all have left the barrier
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)  # with the store in it
time.sleep(0.5)
silent = ", which do not answer"  # as ranks ask each other through the store
raises(lambda: train(updater), f"waited 2 s for ranks {'0, 2' if rank == 1 else '0-1'}{silent}")
print("passed", flush=True)
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be stopped")
def test_jobs_beside_other_groups_end_in_time_and_leave_nothing():
    with processes(JOBS, 3, *(free_port() for _ in range(4))) as ranks:
        said = [rank.communicate(timeout=300)[0] for rank in ranks[1:]]
    assert said == ["passed\npassed\n"] * 2
    assert ranks[0].communicate()[0] == "passed\n"
