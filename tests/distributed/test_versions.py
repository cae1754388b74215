"""Ranks whose versions of fastopt, or code of the user's optimizer, differ change nothing."""

import functools
import threading

import numpy as np
import pytest

import fastopt
from fastopt import EmbeddingTable, optimizer
from fastopt.distributed import ShardedEmbeddingTable, ShardedUpdater, run_threads

RANK = 0
"""A number that may differ by rank."""


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


def ruled(factor):
    @fastopt.rule(hyper=("lr",))
    def step(weight, grad, state, h):
        return weight - factor * h.lr * grad, ()

    return {"rule": step, "hyper": lambda self, t, lr, wd: {"lr": lr}}


def ruled_by_property(factor):
    made = ruled(factor)
    return {**made, "rule": property(lambda self, found=made["rule"]: found)}


def through(change):
    def update(self, index, weight, grad, state):
        self._update_count(index)
        change(weight, grad)

    return {"update": update, "create_state": lambda self, index, weight: None}


def plain(weight, grad):
    weight -= 0.1 * grad


def doubled(weight, grad):
    weight -= 0.2 * grad


def ranked(weight, grad):
    weight -= 0.1 * grad
    assert RANK >= 0


def made_anew():
    """The same function, compiled again under another file name."""
    names = {"through": through}
    text = "def plain(weight, grad):\n    weight -= 0.1 * grad\n"
    exec(compile(text, f"<{threading.get_ident()}>", "exec"), names)
    return names["plain"]


DIFFERENT = {
    "update": ([lambda: through(plain), lambda: through(doubled)], "code of Mine.update"),
    "a partial function": (
        [lambda: through(functools.partial(plain)), lambda: through(functools.partial(doubled))],
        "code of Mine.update",
    ),
    "a constant of a rule": ([lambda: ruled(1.0), lambda: ruled(2.0)], "code of Mine.rule"),
    "a rule that is a property": (
        [lambda: ruled_by_property(1.0), lambda: ruled_by_property(2.0)],
        "code of rule step",
    ),
    "a method that is missing": (
        [lambda: through(plain), lambda: through(plain) | {"more": plain}],
        "code of Mine.more",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_code_of_an_optimizer_is_compared(name, grouped):
    kinds, words = DIFFERENT[name]
    grouped &= "rule" in name  # groups have no update() in Python

    def program(comm):
        weight = np.ones(4)
        mine = type("Mine", (optimizer.Optimizer,), kinds[comm.rank]())(lr=0.1)
        groups = {"^w$": {"optimizer": mine}} if grouped else None
        updater = ShardedUpdater(optimizer.SGD() if grouped else mine, comm, groups=groups)
        with pytest.raises(ValueError, match=rf"ranks disagree: for {words}.* rank 0 has"):
            updater("w", np.ones(4), weight)
        assert (weight == 1).all()

    run_threads(2, program)


@pytest.mark.parametrize("make", [lambda: ranked, made_anew], ids=["ranked", "another file"])
def test_equal_code_is_equal(make):
    """Whatever the numbers that it refers to, and the file that it comes from."""

    def program(comm):
        weight = np.ones(4)
        mine = type("Mine", (optimizer.Optimizer,), through(make()))(lr=0.1)
        ShardedUpdater(mine, comm)("w", np.ones(4), weight)
        return weight

    np.testing.assert_allclose(run_threads(2, program), 0.8)
