"""Checks of settings of one process on ranks: accumulated and clipped gradients, several lists."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from ranks_common import INDICES, LAST, comm, raised, slopes, started

from fastopt import EMA, SWA, Lookahead, optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import everything, frozen

ONES = np.ones(8)
FORMS = [
    (optimizer.Adam, "float32", {}),
    (optimizer.Adam, "float32", {"loss_scaler": LossScaler, "clip_global_norm": 1e9}),
    (optimizer.LAMB, "float32", {}),
    (lambda: optimizer.SGD(multi_precision=True), "float16", {}),
]


def same_or_close(pair, make):
    """Sums over tensors are added in another order on several ranks."""
    if make is optimizer.LAMB:
        pair.close(rtol=1e-5, atol=1e-6)
    else:
        assert pair.same()


def check_within_a_window_no_gradient_is_sent():
    for make, dtype, options in FORMS:
        pair = started(make, dtype, accumulate=2, **options)
        for step in range(6):
            before = pair.sharded._ranks.waits
            pair.step(INDICES, slopes(step, dtype))
            same_or_close(pair, make)
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


def check_units_of_rows_of_vectors_are_refused():
    sharded = ShardedUpdater(optimizer.SGD(lazy_update=True), comm, clip_adaptive=0.01)
    with raised(TypeError, "clip_adaptive needs a dense gradient"):
        sharded(1, (np.ones(1), np.array([0])), np.ones(4))


def check_state_of_a_slice_in_another_dtype():
    sharded = ShardedUpdater(optimizer.Adam(state_dtype="bfloat16"), comm)
    sharded(0, np.ones(6, np.float32), np.ones(6, np.float32))
    for own, other in zip(sharded.state_as(0), sharded.states[0], strict=True):
        assert own.dtype == np.float32
        assert own.shape == other.shape


RULES = {
    "twins": lambda: {
        r"^0$|^3$": {"lr_mult": 0.1, "wd": 0.0},
        r"^1$": {"beta1": 0.5, "lr_scheduler": lambda t: 0.1 / t},
    },
    "others": lambda: {
        r"^0$": {"optimizer": optimizer.SGD(momentum=0.9)},
        r"^4$": {"wd_mult": 0.0},
    },
    "frozen": lambda: {r"^[024]$": {"frozen": True}},
}
"""Groups by index; each updater has its own."""

UNSPLIT = {"average": SWA(start=3, every=2), "clip_adaptive": 0.01}
"""With it one rank has all of a vector and of its average, also in a step that does not average."""

MEANS = [
    (optimizer.Adam, {"average": EMA(decay=0.9)}),
    (optimizer.SGD, {"average": EMA(decay=0.9, warmup=True)}),
    (optimizer.Adam, {"average": SWA(start=2, every=2)}),
    (partial(optimizer.SGD, momentum=0.9), {"average": Lookahead(k=2, alpha=0.3)}),
    (optimizer.ScheduleFreeAdamW, {}),
    (optimizer.ASGD, {}),
]


def check_groups_are_those_of_one_process():
    for name, groups in RULES.items():
        pair = started(lambda: optimizer.Adam(wd=0.1), "float32", groups=groups, accumulate=2)
        for step in range(4):
            pair.step(INDICES, slopes(step, "float32"))
            assert pair.same(), name
            assert pair.sharded.info == pair.alone.info
    own = {"w": {"frozen": True}}
    sharded, weight = ShardedUpdater(optimizer.SGD(), comm, groups=own), ONES * 1
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


def check_averages_are_slices_of_those_of_one_process():
    for make, options in MEANS:
        pair = started(partial(make, multi_precision=True), "float16", accumulate=2, **options)
        for step in range(5):
            pair.step(INDICES, slopes(step, "float16"))
            assert pair.same(), options
        with pair.sharded.averaged(), pair.alone.averaged():
            assert pair.same(), options
            with raised(RuntimeError, "the weights hold their averages"):
                pair.sharded(INDICES, pair.ours, pair.ours)
        whole = pair.alone.averages
        for index, own in pair.sharded.averages.items():
            place = pair.sharded.placements[index]
            assert (own == place.slice_of(whole[index].reshape(-1), comm.rank)).all()
    plain = ShardedUpdater(optimizer.SGD(), comm)
    with raised(RuntimeError, "the updater has no average"), plain.averaged():
        pass


def weights_are_restored(pair, path):
    """After a load of what was saved inside of averaged()."""
    before = frozen(pair.ours)
    with pair.sharded.averaged():
        pair.sharded.save(path, dict(enumerate(pair.ours)))
    weights = dict(enumerate(map(np.copy, pair.ours)))
    pair.sharded.load(path, weights=weights)
    with raised(RuntimeError, "the weights hold their averages"):
        pair.sharded(INDICES, pair.ours, [*weights.values()])
    pair.sharded.restore_weights(weights)
    assert frozen([*weights.values()]) == before
    with raised(RuntimeError, "restore_weights() is for a state"):
        pair.sharded.restore_weights(weights)


def check_checkpoints_of_groups_and_averages():
    """Of ranks and of one process, in either direction, also from inside of averaged()."""
    decaying = partial(optimizer.AdamW, wd=0.1, sparse_decay="dense", lazy_update=True)
    for make, options in (*MEANS[::2], (optimizer.Adam, UNSPLIT), (decaying, {})):
        rules = {"groups": RULES["others"]} if "average" in options else {}
        first, other, again = (started(make, "float32", **rules, **options) for _ in range(3))
        for step in range(3):
            first.step(INDICES, slopes(step, "float32"))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(comm.bcast(folder), "state")
            first.sharded.save(path, dict(enumerate(first.ours)))
            other.sharded.load(path, weights=dict(enumerate(other.ours)))
            other.alone.load(path)
            if comm.rank == 0:
                first.alone.save(f"{path}1")
            comm.Barrier()
            again.sharded.load(f"{path}1")
            again.sharded.save(f"{path}2")  # before the states are sliced
            again.alone.load(f"{path}2")
            for pair, lists in ((other, "theirs"), (again, "ours"), (again, "theirs")):
                setattr(pair, lists, [weight.copy() for weight in first.theirs])
            for pair in (other, again):
                pair.step(INDICES, slopes(7, "float32"))
                assert pair.same()
                if make is decaying:
                    continue
                with pair.sharded.averaged(), pair.alone.averaged():
                    assert pair.same()
            if "average" in options:
                weights_are_restored(first, path)
            comm.Barrier()


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
