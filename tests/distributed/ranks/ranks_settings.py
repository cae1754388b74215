"""Checks of settings of one process on ranks: accumulated and clipped gradients, several lists."""

import tempfile
from pathlib import Path

import numpy as np
from ranks_common import INDICES, LAST, comm, raised, slopes, started

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import everything

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
    sharded, weight = ShardedUpdater(optimizer.SGD(momentum=0.5), comm, accumulate=2), np.zeros(8)
    ones = np.ones(8)
    sharded(0, ones, weight)
    before = everything(sharded.shard, [weight])
    if comm.size > 1:
        sharded.optimizer.lr = 0.5 if LAST else 0.25
        with raised(ValueError, "ranks disagree: for lr"):
            sharded(0, ones, weight)
        sharded.optimizer.lr = 0.01
        assert everything(sharded.shard, [weight]) == before
    with raised(ValueError, "gradients of 1 parameters wait for their update"):
        sharded.save("nowhere")
    with raised(ValueError, "equal numbers of calls"):
        sharded([0, 1], [ones, ones], [weight, np.zeros(8)])
    sharded(0, ones, weight)
    np.testing.assert_allclose(weight, -0.01 * comm.size, rtol=1e-12)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.bcast(folder), "state")
        sharded.save(path)
        sharded(0, ones, weight)
        sharded.load(path)  # drops the open window
        sharded.save(path)
        comm.Barrier()
    with raised(ValueError, "accumulate sends gradients once in several calls"):
        ShardedUpdater(optimizer.SGD(), comm, accumulate=2, overlap=True)


def check_an_invalid_gradient_in_any_call_of_a_window_is_an_error_of_all():
    sharded, weight = ShardedUpdater(optimizer.SGD(momentum=0.5), comm, accumulate=3), np.zeros(8)
    ones = np.ones(8)
    for _ in range(3):
        before = everything(sharded.shard, [weight]), sharded._windows.open_sums()
        last = f"rank {comm.size - 1}: " if comm.size > 1 else ""
        with raised(ValueError, f"{last}index 0: gradient must have shape (8,), got (7,)"):
            sharded(0, np.ones(7) if LAST else ones, weight)
        now = everything(sharded.shard, [weight]), sharded._windows.open_sums()
        assert str(now) == str(before)
        sharded(0, ones, weight)
    np.testing.assert_allclose(weight, -0.01 * comm.size, rtol=1e-12)


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


def check_frozen_parameters_need_no_gradient():
    weight = np.ones(8)
    sharded = ShardedUpdater(optimizer.SGD(), comm, groups={"w": {"frozen": True}})
    sharded("w", None, weight)
    sharded(["w", "v"], [None, ONES], [weight, ONES * 1])
    sharded("w", ONES, weight)
    assert not sharded.info.stepped
    assert (weight == ONES).all()


def check_groups_that_differ_are_told():
    if comm.size == 1:
        return
    sharded, weight = ShardedUpdater(optimizer.Adam(), comm), ONES * 1
    sharded(0, ONES, weight)
    for groups in ({"0": {"beta1": 0.5 + LAST / 4}}, {"0": {"frozen": bool(LAST)}}):
        sharded.groups = groups
        with raised(ValueError, "ranks disagree"):
            sharded(0, ONES, weight)
    groups = {"0": {"optimizer": optimizer.SGD(momentum=0.5 + LAST / 4)}}
    sharded = ShardedUpdater(optimizer.Adam(), comm, groups=groups)
    with raised(ValueError, "ranks disagree", "momentum of groups['0']"):
        sharded(0, ONES, weight)


def check_plans_of_several_lists_are_kept():
    """Also those of single parameters, in any order; a warm call makes no plan."""
    pair = started(optimizer.Adam, "float32", bucket_bytes=1 << 12)
    lists = [INDICES, INDICES[:3], INDICES[3:], INDICES[::-1], *([k] for k in INDICES)]
    weights = pair.ours, pair.theirs
    for step in range(3):
        kept = [*pair.sharded._plans.values()]
        for indices in lists:
            pair.ours, pair.theirs = ([each[k] for k in indices] for each in weights)
            pair.step(indices, lambda k, r, i=indices, s=step: slopes(s, np.float32)(i[k], r))
            assert pair.same()
        found = [*pair.sharded._plans.values()]
        assert len(found) == len(lists)
        assert step == 0 or all(a is b for a, b in zip(found, kept, strict=True))
