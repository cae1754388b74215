"""Checks of ``tests/distributed/ranks`` on threads, and what is particular to them.

``tests/mpi/test_jobs.py`` runs a part of them on processes, and those that need processes.
"""

import threading

import numpy as np
import pytest

from fastopt import EmbeddingTable, optimizer
from fastopt.distributed import ShardedEmbeddingTable, ShardedUpdater, embedding, run_threads
from fastopt.distributed.ranks import Ranks
from fastopt.distributed.threads import Board, ThreadRank
from fastopt.distributed.transport import Chain
from helpers.cases import exhaustive, nightly, slow
from helpers.ranks import THREADS_CANNOT, NodeWorld, names_of, run_checks

ONES = np.ones(4, np.float32)


JOBS = [("divergence", 3), ("plans", 3), ("join", 3), ("states", 3), ("trainer", 2)]
"""Modules of checks, and numbers of ranks."""

MORE = [
    *(("checkpoints", 1), ("checkpoints", 4), ("embeddings", 3), ("overlap", 4)),
    *(("plans", 1), ("plans", 4), ("settings", 1), ("settings", 3), ("states", 1)),
    *(("tables", 1), ("tables", 3), ("updates", 1), ("updates", 3)),
]
FILES = "checkpoints", "embeddings", "trainer"
"""Modules whose checks take a folder, in which they find the files of the jobs before."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {module: [tmp_path_factory.mktemp(module)] for module in FILES}


@pytest.mark.parametrize(
    "job",
    [*JOBS, *slow(("checkpoints", 2), ("embeddings", 2)), *exhaustive(*MORE)],
    ids="{0[0]}-{0[1]}".format,
)
def test_checks_pass(job, folders):
    module, ranks = f"ranks_{job[0]}", job[1]
    done = run_checks(ranks, module, *folders.get(job[0], ()), skipped=THREADS_CANNOT)
    assert done == [name for name in names_of(module) if name not in THREADS_CANNOT]


@pytest.mark.parametrize("choice", nightly("every case"))
def test_rules_have_the_bits_of_one_process(choice):
    assert run_checks(3, "ranks_plans", choice) == names_of("ranks_plans")


@pytest.mark.parametrize("module", exhaustive("overlap", "settings", "updates"))
def test_checks_pass_on_several_nodes(module):
    skipped = THREADS_CANNOT | {"check_sums_are_in_the_order_of_the_ranks"}
    done = run_checks(4, f"ranks_{module}", skipped=skipped, kind=NodeWorld)
    assert done == [name for name in names_of(f"ranks_{module}") if name not in skipped]


def test_a_rank_whose_program_ends_is_an_error_of_the_others():
    def program(comm):
        updater = ShardedUpdater(optimizer.SGD(), comm)
        for _ in range(2 - comm.rank):
            updater(0, ONES, ONES.copy())

    with pytest.raises(RuntimeError, match=r"call 2 of updater 0 \(update\): rank 1 has ended"):
        run_threads(2, program)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named():
    late = threading.Event()

    def program(comm):
        updater = ShardedUpdater(optimizer.SGD(), comm, timeout=0.2)
        if comm.rank:
            late.wait()
        try:
            updater(0, ONES, ONES.copy())
        finally:
            late.set()

    with pytest.raises(TimeoutError, match=r"\(update\): waited 0.2 s for rank 1, which does not"):
        run_threads(2, program)


def test_a_rank_that_waits_leaves_its_core_to_others():
    """A request says how: it is tested once after each rest."""

    class Slow:
        tests = rests = 0

        def Test(self):
            self.tests += 1
            assert self.tests < 10
            return self.rests == 3

        def rest(self, seconds):
            self.rests += 1

    slow = Slow()
    Ranks(ThreadRank(Board(1), 0)).wait(Chain(slow))
    assert (slow.tests, slow.rests) == (5, 3)  # twice before the first one


def test_an_error_of_one_rank_while_weights_are_loaded_is_reported(tmp_path):
    """Also those beside the protocol: the others do not wait for the time limit."""

    class Full(np.ndarray):
        def __setitem__(self, key, value):
            raise MemoryError("no memory to copy")

    def program(comm):
        updater, weight = ShardedUpdater(optimizer.SGD(momentum=0.5), comm), ONES.copy()
        updater(0, ONES, weight)
        updater.save(tmp_path / "state", {0: weight})
        target = weight.view(Full) if comm.rank else weight

        def reload():
            updater.load(tmp_path / "state", weights={0: target})
            updater(0, ONES, weight)  # the others notice here

        with pytest.raises((MemoryError, RuntimeError), match="no memory to copy"):
            reload()

    run_threads(2, program)


def test_a_rank_that_creates_no_updater_is_an_error_after_the_time_limit():
    late = threading.Event()

    def program(comm):
        if comm.rank:
            late.wait()
            return
        try:
            ShardedUpdater(optimizer.SGD(), comm, timeout=0.1)
        finally:
            late.set()

    with pytest.raises(TimeoutError, match=r"rank 0 of 2 waited 0.1 s for others to create"):
        run_threads(2, program)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_shard_of_a_table_is_read_by_one_rank(ranks, tmp_path, monkeypatch):
    """Rows have the order of the shards, whatever the number of ranks."""
    path, ids, read = tmp_path / "table", np.arange(200) * 7, []

    def save(comm):
        made = EmbeddingTable(3, optimizer.Adam(lazy_update=True), min_count=2)
        table = ShardedEmbeddingTable(made, comm)
        for _ in range(2):
            table.update(ids[comm.rank :: 4], np.ones((50, 3), np.float32))
        table.lookup([10**6 + comm.rank], create=True)  # which waits
        table.save(path)
        return table.lookup(ids, create=False)

    rows = run_threads(4, save)[0]
    read_shard = embedding.read_shard

    def read_one(*arguments):
        read.append(arguments[2])
        return read_shard(*arguments)

    monkeypatch.setattr(embedding, "read_shard", read_one)

    def load(comm):
        table = ShardedEmbeddingTable.load(path, comm)
        return table.lookup(ids, create=False)

    for found in run_threads(ranks, load):
        assert found.tobytes() == rows.tobytes()
    assert sorted(read) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, print), "size must be at least 1, got 0"),
        ((print, 2), "size must be an integer, got <built-in function print>"),
        ((2, None), "program must be a function of a communicator, got None"),
    ],
)
def test_invalid_arguments_of_run_threads_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run_threads(*arguments)
