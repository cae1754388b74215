"""Checks of ``tests/distributed/ranks`` on threads, and what is particular to them.

``tests/mpi/test_jobs.py`` runs a part of them on processes, and those that need processes.
"""

import threading

import numpy as np
import pytest

import fastopt
from fastopt import Trainer, optimizer
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.cases import exhaustive, slow
from helpers.ranks import THREADS_CANNOT, NodeWorld, names_of, run_checks
from helpers.refusals import check_refused

ONES = np.ones(4, np.float32)


JOBS = ("divergence", 3), ("plans", 3), ("join", 3), ("settings", 3), ("trainer", 2)
"""Modules of checks, and numbers of ranks."""

MORE = [
    *(("checkpoints", 1), ("checkpoints", 4), ("embeddings", 3), ("overlap", 4)),
    *(("plans", 1), ("plans", 4), ("settings", 1)),
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


@pytest.mark.parametrize("module", exhaustive("overlap", "settings", "updates"))
def test_checks_pass_on_several_nodes(module):
    done = run_checks(4, f"ranks_{module}", skipped=THREADS_CANNOT, kind=NodeWorld)
    assert done == [name for name in names_of(f"ranks_{module}") if name not in THREADS_CANNOT]


def test_a_rank_whose_program_ends_is_an_error_of_the_others():
    def program(comm):
        updater = ShardedUpdater(optimizer.SGD(), comm)
        for _ in range(2 - comm.rank):
            updater(0, ONES, ONES.copy())

    with pytest.raises(RuntimeError, match=r"call 2 of updater 0 \(update\): rank 1 has ended"):
        run_threads(2, program)


@pytest.mark.parametrize(
    ("creates", "words"),
    [
        (True, r"\(update\): waited 0.2 s for rank 1, which does not"),
        (False, "rank 0 of 2 waited 0.2 s for others to create"),
    ],
)
def test_a_rank_that_does_not_come_is_named(creates, words):
    late = threading.Event()

    def program(comm):
        if comm.rank and not creates:
            late.wait()
            return
        try:
            updater = ShardedUpdater(optimizer.SGD(), comm, timeout=0.2)
            if comm.rank:
                late.wait()
            updater(0, ONES, ONES.copy())
        finally:
            late.set()

    with pytest.raises(TimeoutError, match=words):
        run_threads(2, program)


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


INVALID = {
    "run_threads(0, print)": "ValueError: size must be at least 1, got 0",
    "run_threads(print, 2)": "TypeError: size must be an integer, got <built-in function print>",
    "run_threads(2, None)": "TypeError: program must be a function of a communicator, got None",
    "Trainer([], comm=3)": "TypeError: comm must be a communicator of mpi4py or a process group",
}


@pytest.mark.parametrize("code", INVALID)
def test_invalid_arguments_are_refused(code):
    check_refused(code, INVALID[code], {**globals(), "Trainer": Trainer})


# Frozen weights are saved, loaded and passed on like all others

GROUPS = {"^ice": {"frozen": True}}


def weights_of(value=1.0):
    head, ice = np.full((5, 3), value), np.asfortranarray(np.full((4, 2), value, np.float16))
    return {"head": head, "ice": ice, "ice.codes": np.full(7, 10 * value, np.int8)}


def with_frozen(comm, frozen=True, **settings):
    sgd = optimizer.SGD(lr=0.1, momentum=0.5, multi_precision=True)
    return ShardedUpdater(sgd, comm, groups=GROUPS if frozen else None, **settings)


def train(updater, weights):
    grads = {"head": np.full((5, 3), 1 / updater.ranks), "ice": None, "ice.codes": None}
    updater.step(grads, weights)


def bits(weights):
    return {name: (weight.dtype, weight.tobytes("A")) for name, weight in weights.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_weights_are_saved_and_loaded_on_any_ranks(ranks, tmp_path):
    path = tmp_path / "state"

    def save(comm):
        updater, weights = with_frozen(comm), weights_of()
        train(updater, weights)
        updater.save(path, weights=weights)
        saved = bits(weights)
        train(updater, weights)
        updater.load(path, weights=weights)  # parameters of the updater and of the file agree
        assert bits(weights) == saved
        return saved

    def load(comm):
        found = [weights_of(0.0) for _ in "ab"]
        for frozen, weights in zip((True, False), found, strict=True):
            assert with_frozen(comm, frozen).load(path, weights=weights) == ([], [])
        return [*map(bits, found)]

    saved = run_threads(2, save)
    assert run_threads(ranks, load) == [saved[:1] * 2] * ranks
    alone = fastopt.Updater(optimizer.SGD(), groups=GROUPS)
    assert alone.load(path) == ([], [])
    assert list(alone.states) == ["head"]


OF_FROZEN = {
    "updater.save(path, {**weights, 'ice': weights['ice'] + comm.rank})":
        "ValueError: for frozen weight of index 'ice' rank 0 has float16",
    "updater.save(path, {**weights, 'tail': np.ones(2)})":
        "ValueError: index 'tail': its weight was not updated yet",
    "updater.save(path, {**weights, 'ice': [1.0]})":
        "TypeError: index 'ice.0': weight must be a NumPy array",
    "updater.save(path, {**weights, 'ice': np.array([None])})":
        "TypeError: index 'ice': weight cannot be saved with dtype object",
    "updater.load(path, weights={**found, 'ice': np.ones((4, 2))})":
        "TypeError: index 'ice': weight must have dtype float16",
    "updater.load(bare, weights=found)": "CheckpointError: it has no weight of index 'ice'",
}  # fmt: skip


def test_frozen_weights_that_differ_are_not_saved(tmp_path):
    path, bare = tmp_path / "state", tmp_path / "bare"

    def program(comm):
        updater, weights, found = with_frozen(comm), weights_of(), weights_of(0.0)
        train(updater, weights)
        updater.save(path, weights=weights)
        updater.save(bare, weights={"head": weights["head"]})
        names = {"bare": bare, "path": path, "CheckpointError": CheckpointError, **locals()}
        for code, error in OF_FROZEN.items():
            check_refused(code, error, globals() | names)
        updater.load(path, weights=found)
        assert bits(found) == bits(weights)

    run_threads(2, program)


def test_averages_take_all_weights(tmp_path):
    def program(comm):
        updater, weights = with_frozen(comm, average=fastopt.EMA(decay=0.5)), weights_of()
        train(updater, weights)
        before = bits(weights)
        with updater.averaged(weights):
            inside = bits(weights)
            updater.save(tmp_path / "state", weights=weights)
        assert bits(weights) == before
        assert [name for name in weights if inside[name] != before[name]] == ["head"]
        new, other = with_frozen(comm, average=fastopt.EMA(decay=0.5)), weights_of(0.0)
        new.load(tmp_path / "state", weights=other)
        assert bits(other) == inside
        with pytest.raises(RuntimeError, match="the weights hold their averages"):
            train(new, other)
        new.restore_weights(other)
        assert bits(other) == before
        with pytest.raises(RuntimeError, match=r"restore_weights\(\) is for a state"):
            new.restore_weights(other)

    run_threads(2, program)
