"""Checks of what an updater of ranks shares with one process: whole states, reset, settings."""

import copy

import numpy as np
import pytest
from ranks_common import INDICES, LAST, SHAPES, comm, raised, slopes, started

from fastopt import EMA, Updater, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError, dumps
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import everything, frozen

KINDS = [
    (optimizer.Adam, "float32", {"average": EMA(decay=0.5)}),
    (lambda: optimizer.Adam(state_dtype="int8", state_min_size=1), "float32", {}),
    (lambda: optimizer.Muon(fallback="adamw"), "float32", {}),
    (lambda: optimizer.SGD(momentum=0.5, multi_precision=True), "float16",
     {"loss_scaler": LossScaler}),
]  # fmt: skip


def check_states_are_those_of_one_process_and_are_loaded_anywhere():
    some = [k for k in INDICES if 0 not in SHAPES[k]]
    for make, dtype, options in KINDS:
        pair, other = (started(make, dtype, **options) for _ in range(2))
        pair.ours, pair.theirs = ([each[k] for k in some] for each in (pair.ours, pair.theirs))
        for step in range(2):
            pair.step(some, lambda k, rank, of=slopes(step, dtype): of(some[k], rank))  # noqa: B008
        whole, given = pair.sharded.state_dict(), pair.sharded.get_states()
        assert dumps(whole) == dumps(pair.alone.state_dict())
        assert given == pair.alone.get_states()
        other.sharded.load_state_dict(whole)
        assert dumps(other.sharded.state_dict()) == dumps(whole)
        other.ours, grads = copy.deepcopy(pair.ours), copy.deepcopy(pair.ours)
        for each in (pair, other):
            each.sharded(some, grads, each.ours)
        assert frozen(other.ours) == frozen(pair.ours)
        other.sharded.set_states(given)
        assert other.sharded.get_states() == given


def check_what_cannot_be_loaded_changes_nothing_on_any_rank():
    pair = started(optimizer.Adam, "float32", steps=1)
    sharded, states = pair.sharded, pair.sharded.state_dict()
    before = everything(sharded.shard, pair.ours), dumps(states)
    of_last = f"rank {comm.size - 1}: " if comm.size > 1 else ""
    with raised(CheckpointError, "not the checkpoint of an updater"):
        sharded.load_state_dict({"states": {}})
    given = sharded.get_states()
    with raised(CheckpointError, of_last):
        sharded.set_states(b"" if LAST else given)
    with raised(TypeError, of_last, "dump_optimizer must be True or False"):
        sharded.get_states("yes" if LAST else True)
    if comm.size > 1:
        other = sharded.state_dict()
        other["states"][0][0].flat[0] += LAST
        with raised(ValueError, "ranks disagree: for run"):
            sharded.load_state_dict(other)
    assert (everything(sharded.shard, pair.ours), dumps(sharded.state_dict())) == before


def check_states_wait_for_the_end_of_a_window():
    sharded = ShardedUpdater(optimizer.SGD(), comm, accumulate=2)
    sharded(0, np.ones(3), np.ones(3))
    with raised(ValueError, "gradients of 1 parameters wait for their update"):
        sharded.state_dict()


def check_a_run_that_was_reset_is_a_new_one():
    for make, dtype, options in KINDS:
        pair, other = (started(make, dtype, steps=2, **options) for _ in range(2))
        pair.sharded.reset()
        pair.ours = started(make, dtype, **options).ours
        for step in range(2):
            pair.sharded(INDICES, [slopes(step, dtype)(k, comm.rank) for k in INDICES], pair.ours)
        assert frozen(pair.ours) == frozen(other.ours)
        states = [dumps(each.sharded.state_dict()["states"]) for each in (pair, other)]
        assert states[0] == states[1]


def check_gradients_that_were_begun_are_discarded_by_a_reset():
    sharded = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm, overlap=True)
    weight = np.zeros(4)
    for step in range(2):
        sharded.begin(0, np.ones(4))
        if step == 0:
            sharded(0, np.ones(4), weight)
    sharded.reset()
    sharded(0, np.ones(4), weight)
    np.testing.assert_array_equal(weight, -2.0 * comm.size)


def check_updated_weights_are_copies():
    sharded, alone = ShardedUpdater(optimizer.Adam(), comm), Updater(optimizer.Adam())
    old = {"w": [np.ones((3, 2)), 2.0], "b": np.zeros(5)}
    grads = {"w": [np.ones((3, 2)), 1.0], "b": np.full(5, -1.0)}
    for _ in range(2):
        new, other = sharded.updated(grads, old), alone.updated(grads, old)
        np.testing.assert_allclose(new["b"], other["b"], rtol=1e-6)
        np.testing.assert_allclose(new["w"][0], other["w"][0], rtol=1e-6)
        assert type(new["w"][1]) is float
    assert (old["w"][0] == 1).all()
    of_last = f"rank {comm.size - 1}" if comm.size > 1 else "gradient"
    with raised((TypeError, ValueError), of_last):
        sharded.updated(grads, {"w": 3} if LAST else old)


def check_accumulate_is_assigned_between_windows():
    sharded, weight = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm), np.zeros(2)
    ones = np.full(2, 1 / comm.size)
    sharded.accumulate = 2
    for _ in range(3):
        sharded(0, ones, weight)
    assert sharded.accumulate == 2
    with pytest.raises(ValueError, match=r"accumulate cannot change while gradients of \[0\] wait"):
        sharded.accumulate = 1
    sharded.finish()
    sharded.accumulate = 1
    sharded(0, ones, weight)
    np.testing.assert_allclose(weight, -3, rtol=1e-12)
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        sharded.accumulate = 0
    if comm.size > 1:
        sharded.accumulate = 3 if LAST else 2
        with raised(ValueError, "ranks disagree: for accumulate"):
            sharded(0, ones, weight)
    overlapping = ShardedUpdater(optimizer.SGD(), comm, overlap=True)
    with pytest.raises(ValueError, match="accumulate sends gradients once in several calls"):
        overlapping.accumulate = 2
