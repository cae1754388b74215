"""Checks of sharded updates, on any number of ranks."""

import gc
import tracemalloc
from functools import partial
from typing import ClassVar

import numpy as np
from ranks_common import (
    Pair,
    all_refused,
    comm,
    exact,
    of_last,
    state_bytes,
)

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.frames import frames
from helpers.refusals import each
from helpers.tensor_lists import everything, frozen, normal


def check_large_values_do_not_overflow_in_float16():
    weight = np.ones(40, np.float16)
    updater = ShardedUpdater(optimizer.SGD(learning_rate=1e-6, multi_precision=True), comm)
    updater(0, np.full(40, 60_000, np.float16), weight)
    expected = np.float32(1) - np.float32(1e-6) * np.float32(60_000 * comm.size)
    np.testing.assert_allclose(updater.states[0][1], np.float32(expected), rtol=1e-6)


def check_copies():
    pair = Pair(optimizer.Adam, [normal(0, (30,), "float32")])
    copies = [w[0].astype(np.float16) for w in (pair.ours, pair.theirs)]
    for updater, copy in zip((pair.sharded, pair.alone), copies, strict=True):
        updater.set_copy(0, copy)
    pair.step([0], lambda k, r: exact(r, (30,), np.float16))
    assert pair.same()
    assert frozen(copies[0]) == frozen(copies[1])


def check_a_weight_may_move_in_memory():
    made, weight = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm), np.zeros(8, np.float32)
    grad = np.ones_like(weight)
    for size in (1 << 20, 8, 8):
        for _ in range(3):  # the last of them repeats a plan
            made.step([grad], [weight])
        weight.resize(size, refcheck=False)
        weight.resize(8, refcheck=False)
    assert (weight == -9 * comm.size).all()


WAITS = (
    *("Ranks.", "MPICommunicator.", "SharedCounters.", "Meeting.", "Condition.", "Event."),
    *("Gloo", "Works.", "Store", "Future.", "_GeneratorContextManager", "contextmanager"),
)
NAMES = {"pending", "Test", "rest", "_send", "starts_last", "has_ended", "RLock"}
"""Functions that wait, any number of times."""


def check_python_of_a_step_does_not_grow_with_tensors():
    found = []
    for tensors in (100, 500):
        weights = [np.zeros((3, 5), np.float32) for _ in range(tensors)]
        grads = [np.ones_like(w) for w in weights]
        updater = ShardedUpdater(optimizer.Adam(), comm, check_every=0)
        call = partial(updater, [*range(tensors)], grads, weights)
        for _ in range(3):
            call()
        gc.collect()  # what it finalizes is no part of a call
        entered = [name for name in frames(call) if not name.startswith(WAITS)]
        found.append([name for name in entered if name.split(".")[-1] not in NAMES])
    assert found[0] == found[1]


def check_rows_are_shared_out():
    updater = ShardedUpdater(optimizer.AdamW(sparse_decay="catch_up", wd=0.1), comm)
    for shape in ((1, 2), (0, 2)):  # tables with less rows than ranks
        rows = np.ones((shape[0], 2), np.float32), np.zeros(shape[0], np.int64)
        updater(str(shape), rows, np.ones(shape, np.float32))
    updater("table", (np.ones((2, 3), np.float32), np.array([7, 50])), np.ones((60, 3), np.float32))
    state = updater.states["table"]
    assert state_bytes({"table": state}) <= 2 * 4 * 3 * (60 / comm.size + 1)


def check_state_is_shared_out():
    """Memory of state, and of all that the updater allocates, falls as one over the ranks."""
    weights = [np.zeros((1000, 300), np.float32), np.zeros(4001, np.float32)]
    grads, total = [np.ones_like(w) for w in weights], sum(w.nbytes for w in weights)
    for _ in range(2):  # the first compiles
        updater = ShardedUpdater(optimizer.Adam(), comm, bucket_bytes=1 << 16)
        tracemalloc.start()
        updater([0, 1], grads, weights)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert abs(state_bytes(updater.states) - 2 * total / comm.size) < 16 * comm.size
    summed = total / comm.size if comm.size > 1 else 0  # the gradients of this rank's slices
    assert 0 < held - state_bytes(updater.states) - summed < 7 * (1 << 16) + 150_000, held


def check_operations_of_a_step_are_two_a_bucket_and_one():
    """Two more where a norm is needed first: its agreement and its sum."""
    for more, options in ((1, {}), (3, {"clip_global_norm": 1.0})):
        weights = [np.zeros(1000, np.float32), np.zeros((20, 30), np.float32)]
        made = ShardedUpdater(optimizer.Adam(), comm, bucket_bytes=1000, **options)
        for _ in range(3):
            before = made._ranks.waits
            made([0, 1], [np.ones_like(w) for w in weights], weights)
            found = made._ranks.waits - before
        if comm.size > 1:
            assert found == 2 * len(made._plan.buckets) + more
    assert ShardedUpdater(optimizer.Adam(), comm).bucket_bytes == 1 << 22


def check_operations_for_rows_do_not_grow_with_tensors():
    for tensors in (1, 9):
        made = ShardedUpdater(optimizer.Adam(), comm)
        weights = [np.zeros((12, 1 + k % 3), np.float32) for k in range(tensors)]
        for step in range(3):
            before = made._ranks.waits
            grads = [(np.ones((2, w.shape[1]), np.float32), np.array([step, 7])) for w in weights]
            made([*range(tensors)], grads, weights)
        assert made._ranks.waits - before <= 8


def check_gradients_may_travel_in_half_precision():
    """Each is rounded, without sums within nodes, and may overflow; one rank sends nothing."""
    precise = 1 + 2**-10 + 2**-12
    for wire, rounded in (("float16", 1 + 2**-10), ("bfloat16", 1.0)):
        for dtype in ("float32", "float64", "float16"):
            sgd = optimizer.SGD(learning_rate=1.0, multi_precision=True)
            sharded = ShardedUpdater(sgd, comm, wire=wire, hierarchical=False)
            weight = np.zeros((40, 30), dtype)
            sharded(0, np.full_like(weight, precise), weight)
            total = -comm.size * (rounded if comm.size > 1 else precise)
            np.testing.assert_array_equal(weight, np.array(total).astype(dtype))
    scaler, weight = LossScaler(init_scale=8.0), np.zeros(3, np.float32)
    sharded = ShardedUpdater(optimizer.SGD(), comm, scaler, wire="float16", hierarchical=False)
    sharded(0, np.full(3, 1e5, np.float32), weight)
    assert sharded.info.skipped == (comm.size > 1)


class Device:
    """Stands for an array on a CUDA device."""

    __cuda_array_interface__: ClassVar[dict] = {}


REFUSED = {
    "made([0, 1], [wrong if LAST else good[0], good[1]], weights)":
        r"ValueError: index 0 \(fc_weight\): gradient must have shape \(6, 2\), got \(2, 2\)",
    "made([0, 1], [good[0], good[1].astype('i8' if LAST else 'f4')], weights)":
        "TypeError: gradient must have the weight's dtype float32 or another real",
    "made([0, 0], [good[0]] * 2, [weights[0]] * 2)":
        r"ValueError: index 0 \(fc_weight\) is in the list twice",
    "made([1, 2], [good[1]] * 2, [weights[1], weights[1][:]])":
        "ValueError: index 2 shares memory with",
    "made(0, rows, weights[0])":
        "TypeError: the first gradient was dense",
    "made([0, 1], [good[0], weights[0].reshape(-1)[1:6]], weights)":
        "ValueError: index 1: gradient shares memory with the weight of index 0",
    "made(0, good[0], Device())":
        "TypeError: weight must be a NumPy array .* memory of the host, got Device",
    "made(2, good[1] * np.nan, 0 * good[1])": "ValueError: learning rate must be",
    "made.step({'a': good[: 2 - LAST]}, {'a': weights})":
        f"ValueError: {of_last}weight 'a.1' has no gradient",
    **each("ShardedUpdater('{}', comm)(0, rows, np.ones((4, 2), 'f'))",
           "TypeError: index 0: .* takes dense gradients of matrices", "muon", "soap", "shampoo"),
    **each("{}", "TypeError: groups: Muon overrides update.., and groups on ranks need",
           "ShardedUpdater('adam', comm, groups=matrices)",
           "ShardedUpdater('muon', comm, groups={'w': {'wd': 0.5}})",
           "setattr(made, 'groups', matrices)"),
    "ShardedUpdater('sgd', comm, wire='float32')":
        r"ValueError: wire must be one of \('float16', 'bfloat16'\), got 'float32'",
    "made.flush('other')": "ValueError: flush needs the weight",
    "made.resize(0, weights[0], range(6))": r"AttributeError: save\(\) on all ranks.*resize\(\)",
}  # fmt: skip


def check_calls_that_fail_change_nothing():
    weights = [normal(0, (6, 2), "float32"), normal(1, (5,), "float32")]
    made = ShardedUpdater(optimizer.Adam(param_idx2name={0: "fc_weight"}), comm)
    good, wrong = [np.ones_like(w) for w in weights], np.ones((2, 2), "f")
    made([0, 1], good, weights)
    made.optimizer.lr_mult[2] = -1.0
    good[0].flags.writeable = False
    rows, matrices = (np.ones((1, 2), "f"), np.array([0])), {"w": {"optimizer": optimizer.Muon()}}
    held = lambda: (everything(made.shard, weights), made.groups)  # noqa: E731
    before = held()
    all_refused(REFUSED, held, globals() | locals())
    made([0, 1], good, weights)
    assert held() != before
