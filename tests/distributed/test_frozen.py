"""Frozen weights are saved, loaded and passed on ranks like all others."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.refusals import check_refused

GROUPS = {"^ice": {"frozen": True}}


def weights_of(value=1.0):
    head, ice = np.full((5, 3), value), np.asfortranarray(np.full((4, 2), value, np.float16))
    return {"head": head, "ice": ice, "ice.codes": np.full(7, 10 * value, np.int8)}


def made(comm, frozen=True, **settings):
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
        updater, weights = made(comm), weights_of()
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
            assert made(comm, frozen).load(path, weights=weights) == ([], [])
        return [*map(bits, found)]

    saved = run_threads(2, save)
    assert run_threads(ranks, load) == [saved[:1] * 2] * ranks
    alone = fastopt.Updater(optimizer.SGD(), groups=GROUPS)
    assert alone.load(path) == ([], [])
    assert list(alone.states) == ["head"]


REFUSED = {
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
        updater, weights, found = made(comm), weights_of(), weights_of(0.0)
        train(updater, weights)
        updater.save(path, weights=weights)
        updater.save(bare, weights={"head": weights["head"]})
        names = {"bare": bare, "path": path, "CheckpointError": CheckpointError, **locals()}
        for code, error in REFUSED.items():
            check_refused(code, error, globals() | names)
        updater.load(path, weights=found)
        assert bits(found) == bits(weights)

    run_threads(2, program)


def test_averages_take_all_weights(tmp_path):
    def program(comm):
        updater, weights = made(comm, average=fastopt.EMA(decay=0.5)), weights_of()
        train(updater, weights)
        before = bits(weights)
        with updater.averaged(weights):
            inside = bits(weights)
            updater.save(tmp_path / "state", weights=weights)
        assert bits(weights) == before
        assert [name for name in weights if inside[name] != before[name]] == ["head"]
        new, other = made(comm, average=fastopt.EMA(decay=0.5)), weights_of(0.0)
        new.load(tmp_path / "state", weights=other)
        assert bits(other) == inside
        with pytest.raises(RuntimeError, match="the weights hold their averages"):
            train(new, other)
        new.restore_weights(other)
        assert bits(other) == before
        with pytest.raises(RuntimeError, match=r"restore_weights\(\) is for a state"):
            new.restore_weights(other)

    run_threads(2, program)
