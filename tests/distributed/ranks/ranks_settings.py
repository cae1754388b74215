"""Checks of what ranks share with one process: settings, windows, whole states, reset."""

import tempfile
from pathlib import Path

import numpy as np
from ranks_common import INDICES, LAST, all_refused, comm, of_last, raised, slopes, started

from fastopt import EMA, Updater, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import dumps
from fastopt.distributed import ShardedUpdater
from helpers.refusals import each
from helpers.tensor_lists import everything, frozen

ONES = np.ones(8)


def check_within_a_window_no_gradient_is_sent():
    options = {"loss_scaler": LossScaler, "clip_global_norm": 1e9}
    pair = started(optimizer.Adam, "float32", accumulate=2, **options)
    for step in range(6):
        before = pair.sharded._ranks.waits
        pair.step(INDICES, slopes(step, "float32"))
        assert pair.same()
        assert pair.sharded.info == pair.alone.info
        if step % 2 == 0 and comm.size > 1:
            assert pair.sharded._ranks.waits == before + 1


def check_a_window_that_fails_is_repeated():
    sharded = ShardedUpdater(optimizer.SGD(momentum=0.5), comm, accumulate=2)
    weight, ones = np.zeros(8), np.ones(8)
    sharded(0, ones, weight)
    before = everything(sharded.shard, [weight])
    with raised(ValueError, f"{of_last}index 0: gradient must have shape (8,), got (7,)"):
        sharded(0, np.ones(7) if LAST else ones, weight)
    if comm.size > 1:
        sharded.optimizer.lr = 0.5 if LAST else 0.25
        with raised(ValueError, "ranks disagree: for lr"):
            sharded(0, ones, weight)
        sharded.optimizer.lr = 0.01
    words = "equal numbers of calls since their updates, got index 0 1, index 1 0: pass each in"
    with raised(ValueError, words):
        sharded([0, 1], [ones, ones], [weight, np.zeros(8)])
    for call in (lambda: sharded.save("nowhere"), sharded.state_dict):
        with raised(ValueError, "gradients of 1 parameters wait for their update"):
            call()
    assert everything(sharded.shard, [weight]) == before
    sharded(0, ones, weight)
    np.testing.assert_allclose(weight, -0.01 * comm.size, rtol=1e-12)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.bcast(folder), "state")
        sharded.save(path)
        sharded(0, ones, weight)
        sharded.load(path)  # drops the open window
        sharded.save(path)
        comm.Barrier()


def check_lists_of_a_window_are_compared():
    sharded = ShardedUpdater(optimizer.SGD(), comm, accumulate=2)
    weights, ones = [np.zeros(3) for _ in "ab"], np.ones(3)
    for calls in range(2):
        if comm.size > 1:
            words = f"index 0 after {calls} calls", "index 1 after 0 calls"
            with raised(ValueError, "ranks disagree: for tensor 0", *words):
                sharded(int(LAST), ones, weights[LAST])
        sharded(0, ones, weights[0])
    np.testing.assert_allclose(weights, [[-0.01 * comm.size] * 3, [0] * 3])


def check_state_of_a_slice_in_another_dtype():
    sharded = ShardedUpdater(optimizer.Adam(state_dtype="bfloat16"), comm)
    sharded(0, np.ones(6, np.float32), np.ones(6, np.float32))
    for own, other in zip(sharded.state_as(0), sharded.states[0], strict=True):
        assert own.dtype == np.float32
        assert own.shape == other.shape


KINDS = [
    (optimizer.Adam, "float32", {"average": EMA(decay=0.5)}),
    (lambda: optimizer.Muon(fallback="adamw"), "float32", {}),
    (lambda: optimizer.SGD(momentum=0.5, multi_precision=True), "float16",
     {"loss_scaler": LossScaler}),
]  # fmt: skip


OLD = {"w": [np.ones((3, 2)), 2.0], "b": np.zeros(5)}
GRADS = {"w": [np.ones((3, 2)), 1.0], "b": np.full(5, -1.0)}
UNFIT = {
    "sharded.load_state_dict({'states': {}})": "CheckpointError: not the checkpoint of an updater",
    "sharded.set_states(b'' if LAST else given)": f"CheckpointError: {of_last}not a safetensors",
    "sharded.get_states('yes' if LAST else True)":
        f"TypeError: {of_last}.*dump_optimizer must be True or False",
    "setattr(sharded, 'accumulate', 0)": "ValueError: accumulate must be at least 1, got 0",
    **each("{}", "ValueError: accumulate sends gradients once in several calls",
           "ShardedUpdater('sgd', comm, accumulate=2, overlap=True)",
           "setattr(ShardedUpdater('sgd', comm, overlap=True), 'accumulate', 2)"),
    "sharded.updated(GRADS, {'w': 3} if LAST else OLD)": f"ValueError: {of_last}gradient 'b'",
}  # fmt: skip


def check_what_cannot_be_loaded_changes_nothing_on_any_rank():
    pair = started(optimizer.Adam, "float32", steps=1)
    sharded = pair.sharded
    given, other = sharded.get_states(), sharded.state_dict()
    other["states"][0][0].flat[0] += LAST
    held = lambda: (everything(sharded.shard, pair.ours), dumps(sharded.state_dict()))  # noqa: E731
    all_refused(UNFIT, held, globals() | locals())
    if comm.size > 1:
        with raised(ValueError, "ranks disagree: for run"):
            sharded.load_state_dict(other)


def check_a_run_that_was_reset_is_a_new_one():
    for make, dtype, options in KINDS:
        pair, other = (started(make, dtype, steps=2, overlap=True, **options) for _ in "ab")
        pair.sharded.begin(1, slopes(9, dtype)(1, comm.rank))
        pair.sharded.reset()
        pair.ours = started(make, dtype, **options).ours
        for step in range(2):
            pair.sharded(INDICES, [slopes(step, dtype)(k, comm.rank) for k in INDICES], pair.ours)
        assert frozen(pair.ours) == frozen(other.ours)
        states = [dumps(each.sharded.state_dict()["states"]) for each in (pair, other)]
        assert states[0] == states[1]


def check_updated_weights_are_copies():
    sharded, alone = ShardedUpdater(optimizer.Adam(), comm), Updater(optimizer.Adam())
    before = frozen(OLD)
    for _ in range(2):
        new, other = sharded.updated(GRADS, OLD), alone.updated(GRADS, OLD)
        np.testing.assert_allclose(new["b"], other["b"], rtol=1e-6)
        np.testing.assert_allclose(new["w"][0], other["w"][0], rtol=1e-6)
        assert type(new["w"][1]) is float
    assert frozen(OLD) == before


def check_accumulate_is_assigned_between_windows():
    sharded, weight = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm), np.zeros(2)
    ones = np.full(2, 1 / comm.size)
    sharded.accumulate = 2
    for _ in range(3):
        sharded(0, ones, weight)
    with raised(ValueError, "accumulate cannot change while gradients of [0] wait"):
        sharded.accumulate = 1
    sharded.finish()
    sharded.accumulate = 1
    sharded(0, ones, weight)
    np.testing.assert_allclose(weight, -3, rtol=1e-12)
