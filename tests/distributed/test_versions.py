"""Ranks whose versions of fastopt, or code of the user's optimizer, differ change nothing."""

import threading

import numpy as np
import pytest

import fastopt
from fastopt import EmbeddingTable, optimizer
from fastopt.distributed import ShardedEmbeddingTable, ShardedUpdater, run_threads


class Versions:
    """Version of each rank, by the thread that asks."""

    def __init__(self):
        self.local = threading.local()

    def __str__(self):
        return f"0.{self.local.rank}.0"


def test_versions_of_fastopt_are_compared(monkeypatch):
    versions = Versions()
    monkeypatch.setattr(fastopt, "__version__", versions)

    def program(comm):
        versions.local.rank = comm.rank
        words = r"for fastopt rank 0 has version 0\.0\.0, rank 1 has version 0\.1\.0"
        with pytest.raises(ValueError, match=words):
            ShardedUpdater(optimizer.SGD(), comm)
        with pytest.raises(ValueError, match=words):
            ShardedEmbeddingTable(EmbeddingTable(2, optimizer.SGD()), comm)
        versions.local.rank = 0
        weight = np.ones(4)
        ShardedUpdater(optimizer.SGD(lr=0.5), comm)(0, np.ones(4), weight)
        return weight.tolist()

    assert run_threads(2, program) == [[0.0] * 4] * 2


TEXT = """
def update(self, index, weight, grad, state):
    self._update_count(index)
    weight -= 0.1 * grad
    assert RANK >= 0
"""


def test_equal_code_is_equal():
    """Whatever the numbers that it refers to, and the file that it comes from."""

    def program(comm):
        weight, names = np.ones(4), {"RANK": comm.rank}
        exec(compile(TEXT, f"<rank {comm.rank}>", "exec"), names)
        mine = type("Mine", (optimizer.Optimizer,), {"update": names["update"]})(lr=0.1)
        ShardedUpdater(mine, comm)("w", np.ones(4), weight)
        return weight

    np.testing.assert_allclose(run_threads(2, program), 0.8)
