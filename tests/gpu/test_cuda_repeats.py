"""Calls with the arrays of the call before are made by compiled code, up to the launches."""

import gc

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from fastopt._engine.device_call import SETS
from fastopt._engine.devices import Devices
from fastopt._kernels import record_words
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import CosineScheduler
from helpers.device_arrays import Foreign, check_close, host, on_device

pytestmark = pytest.mark.gpu

SHAPES = [(3, 2), (7, 10), (5, 1)]
CALLS = 4
"""Calls after which everything that a call repeats is known."""


def arrays(rng, dtype=np.float32):
    return [rng.normal(size=shape).astype(dtype) for shape in SHAPES]


class Pair:
    """The same parameters on the host and on the device."""

    def __init__(self, rng, make=optimizer.Adam, dtype=np.float32, **kwargs):
        self.here, self.there = (optimizer.Updater(make(**{"wd": 0.1, **kwargs})) for _ in range(2))
        self.weights = arrays(rng, dtype)
        self.on_device = on_device(self.weights)

    def step(self, grads, moved, indices=(0, 1, 2), single=False):
        if single:
            for k in indices:
                self.here(k, grads[k], self.weights[k])
                self.there(k, moved[k], self.on_device[k])
            return
        own = list(indices)
        self.here(own, [grads[k] for k in own], [self.weights[k] for k in own])
        self.there(own, [moved[k] for k in own], [self.on_device[k] for k in own])

    def steps(self, *sets, times=CALLS, single=False):
        """Steps with each of some lists of gradients, on the host and on the device, in turn."""
        for turn in range(times * len(sets)):
            self.step(*sets[turn % len(sets)], single=single)

    def set(self, **values):
        for each in (self.here, self.there):
            for name, value in values.items():
                setattr(each.optimizer if hasattr(each.optimizer, name) else each, name, value)

    def check(self):
        check_close(self.on_device, self.weights)
        assert self.there.optimizer._index_update_count == self.here.optimizer._index_update_count


@pytest.fixture
def in_python(monkeypatch):
    """The number of calls that Python has read and launched."""
    calls, enter = [], Devices._enter
    monkeypatch.setattr(Devices, "_enter", lambda *args: calls.append(1) or enter(*args))
    return calls


NAMES = {0: "a_weight", 1: "b_weight", 2: "c_weight"}
WARM = [
    (optimizer.SGD, {}, None),
    (optimizer.Adam, {}, None),
    (optimizer.Adam, {"lr_scheduler": CosineScheduler(9)}, None),
    (optimizer.GroupAdaGrad, {"wd": 0.0}, None),
    (optimizer.Adam, {"state_dtype": "int8", "state_min_size": 1}, None),
    (optimizer.Lion, {"param_idx2name": NAMES}, None),
    (optimizer.Adam, {"param_idx2name": {**NAMES, 1: "b_bias"}}, None),
    (optimizer.LAMB, {}, None),
    (optimizer.Adam, {}, 0.5),
    (optimizer.LAMB, {}, 0.5),
]
"""Classes and their arguments, and limits of the norm."""


@pytest.mark.parametrize("single", [False, True], ids=["list", "single"])
@pytest.mark.parametrize(("make", "kwargs", "clip"), WARM, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_warm_calls_run_no_python_and_do_the_same(
    make, kwargs, clip, dtype, single, in_python, rng
):
    pair, sets = Pair(rng, make, dtype, **kwargs), [arrays(rng, dtype) for _ in range(2)]
    sets = [*zip(sets, on_device(sets), strict=True)]
    pair.set(clip_global_norm=clip)
    pair.steps(*sets, single=single)
    in_python.clear()
    pair.steps(*sets, times=5, single=single)
    assert not in_python
    assert clip is None or pair.there.info.global_norm == pytest.approx(pair.here.info.global_norm)
    pair.set(rescale_grad=0.3)
    pair.steps(*sets, times=2, single=single)
    pair.check()


def test_random_numbers_of_warm_calls_are_those_of_calls_in_python(monkeypatch, in_python, rng):
    weights, grads = arrays(rng, np.float16), arrays(rng, np.float16)
    found = []
    for compiled in (True, False):
        monkeypatch.setattr("fastopt._engine.devices.readable", lambda found=compiled: found)
        updater = optimizer.Updater(optimizer.SGD(rounding="stochastic"))
        own, moved = on_device(weights), on_device(grads)
        in_python.clear()
        for _ in range(2 * CALLS):
            updater([0, 1, 2], moved, own)
        assert (len(in_python) <= CALLS) == compiled
        found.append([host(each) for each in own])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_that_change_between_warm_calls_are_followed(in_python, rng):
    pair, grads = Pair(rng), arrays(rng)
    moved = on_device(grads)
    for rate in (0.1, 0.01, 0.1):
        pair.set(lr=rate)
        pair.steps((grads, moved))
    in_python.clear()
    pair.set(lr=0.2, rescale_grad=0.5)
    pair.step(grads, moved)
    pair.set(clip_global_norm=0.1)
    pair.step(grads, moved)
    assert in_python
    pair.check()


@pytest.mark.parametrize("single", [False, True], ids=["list", "single"])
def test_buffers_of_gradients_that_are_used_in_turns_run_no_python(single, in_python, rng):
    pair = Pair(rng)
    sets = [arrays(rng) for _ in range(3)]
    moved = on_device(sets)
    moved[2][0] = moved[1][0]  # so that the first array does not tell which set it is
    sets[2][0] = sets[1][0]
    pair.steps(*zip(sets, moved, strict=True), single=single)
    in_python.clear()
    for k in (0, 1, 2, 2, 0, 1):
        pair.step(sets[k], moved[k], single=single)
    assert not in_python
    pair.check()


def test_a_step_that_is_launched_again_is_skipped_and_reported(in_python, rng):
    pair, grads, scalers = Pair(rng), arrays(rng), [LossScaler(2.0**4) for _ in range(2)]
    moved = on_device(grads)
    for each, scaler in zip((pair.here, pair.there), scalers, strict=True):
        each.loss_scaler = scaler
    for turn in range(8):
        if turn == CALLS:
            in_python.clear()
        value = np.inf if turn in (5, 7) else grads[1][0, 0]
        used = [each.copy() for each in grads]
        used[1][0, 0] = value
        moved[1].copy_to_device(used[1])
        pair.step(used, moved)
        if turn % 2:
            assert pair.there.info.skipped == pair.here.info.skipped == (turn in (5, 7))
    assert len(in_python) <= 2  # the scale that has changed is uploaded by the same way
    assert scalers[0].scale == scalers[1].scale
    pair.check()


def test_a_norm_that_is_measured_in_between_uses_other_memory_of_the_table(rng):
    """A skipped step is marked in the table on the device, which other launches do not see."""
    pair = Pair(rng)
    sets = [arrays(rng) for _ in range(2)]
    moved = on_device(sets)
    broken = [np.full(shape, np.inf, np.float32) for shape in SHAPES]
    unusable = on_device(broken)
    for turn in range(18):
        skips = turn % 6 == 5
        pair.set(clip_global_norm=0.1 if skips else None)
        if skips:
            pair.step(broken, unusable)
        pair.step(sets[turn % 2], moved[turn % 2])
    pair.check()


def test_gradients_of_which_one_is_replaced_are_read_again(in_python, rng):
    """The first and the last array are those of a known set, whose others are gone."""
    pair = Pair(rng)
    sets = [arrays(rng) for _ in range(2)]
    moved = on_device(sets)
    for turn in range(12):
        k = turn % 2
        if turn > 8:
            sets[k][1] = arrays(rng)[1]
            moved[k][1] = None  # whose id the new one may get
            moved[k][1] = on_device(sets[k][1])
            in_python.clear()
        pair.step(sets[k], moved[k])
        assert in_python or turn <= 8
    pair.check()


def test_a_gradient_that_is_gone_is_not_read(rng):
    """Another array may have its id, or its memory."""
    pair, grads = Pair(rng), arrays(rng)
    moved = on_device(grads)
    pair.steps((grads, moved))
    for _ in range(20):
        grads = arrays(rng)
        moved = on_device(grads)
        gc.collect()
        pair.step(grads, moved)
    pair.check()


@pytest.mark.parametrize(
    ("single", "clip", "keep"),
    [(False, None, False), (False, 0.5, True), (True, None, True), (True, 0.5, False)],
    ids=str,
)
def test_new_gradients_run_no_python_and_do_the_same(single, clip, keep, in_python, rng):
    """Beside gradients that are known, for more calls than the memory of uploads has slots."""
    pair, kept = Pair(rng), []
    pair.set(clip_global_norm=clip)
    known = arrays(rng)
    there = on_device(known)
    for turn in range(SETS + 40):
        if turn == SETS + CALLS:
            in_python.clear()
        grads = arrays(rng)
        moved = on_device(grads)
        kept += [moved] * keep
        pair.step(grads, moved, single=single)
        if turn % 5 == 1:
            pair.step(known, there, single=single)
    assert not in_python
    pair.check()


def test_new_gradients_of_other_forms_are_read_by_python(in_python, rng):
    pair = Pair(rng)

    def step(change, mutate=lambda grads: grads):
        grads = mutate(arrays(rng))
        moved = on_device(grads)
        pair.step(grads, change(moved))

    for _ in range(2 * CALLS):
        step(list)
    in_python.clear()
    step(list)
    assert not in_python
    stream = cuda.stream()
    of_stream = lambda moved: [moved[0].bind(stream), *moved[1:]]  # noqa: E731
    fortran = lambda grads: [np.asfortranarray(each) for each in grads]  # noqa: E731
    for change, mutate in (
        (of_stream, list),
        (list, fortran),
        (lambda g: [Foreign(g[0]), *g[1:]], list),
    ):
        in_python.clear()
        step(change, mutate)
        assert in_python
        step(list)
    for wrong in ([np.ones((2, 3), np.float32)], [np.ones((3, 2), np.int32)], arrays(rng)[:2]):
        with pytest.raises((TypeError, ValueError)):
            pair.there([0, 1, 2], on_device([*wrong, *arrays(rng)][:3]), pair.on_device)
    pair.check()


def test_a_new_gradient_in_memory_that_is_written_to_is_no_new_gradient(rng):
    """It is the weight, or its state."""
    pair = Pair(rng)
    for _ in range(2 * CALLS):
        grads = arrays(rng)
        pair.step(grads, on_device(grads))
    own = pair.on_device[1]
    grads = [grads[0], pair.weights[1], grads[2]]
    moved = [on_device(grads[0]), own.view(own.dtype), on_device(grads[2])]
    with pytest.raises(ValueError, match="memory"):
        pair.there([0, 1, 2], moved, pair.on_device)
    pair.check()


def test_a_launch_that_fails_is_reported_and_not_counted(in_python, rng):
    """It is not made again, as others of the call may have been launched."""
    pair, grads = Pair(rng), arrays(rng)
    moved = on_device(grads)
    pair.steps((grads, moved))
    (repeat,) = pair.there.records.devices.repeats.values()
    across = repeat.rows[:, record_words.L_ACROSS].copy()
    repeat.rows[:, record_words.L_ACROSS] = 1 << 20  # more threads than a block may have
    in_python.clear()
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE"):
        pair.there([0, 1, 2], moved, pair.on_device)
    assert not in_python
    pair.check()
    repeat.rows[:, record_words.L_ACROSS] = across
    pair.step(grads, moved)
    pair.check()


def test_lists_whose_headers_cannot_be_read_are_read_by_python(monkeypatch, in_python, rng):
    monkeypatch.setattr("fastopt._engine.devices.readable", lambda: False)
    pair, grads = Pair(rng), arrays(rng)
    moved = on_device(grads)
    pair.steps((grads, moved))
    assert len(in_python) >= CALLS
    pair.check()


def test_a_list_of_two_layouts_is_two_launches(in_python, rng):
    pair, grads = Pair(rng), arrays(rng)
    pair.weights[1], grads[1] = pair.weights[1].astype(np.float64), grads[1].astype(np.float64)
    pair.on_device, moved = on_device(pair.weights), on_device(grads)
    pair.steps((grads, moved))
    in_python.clear()
    pair.steps((grads, moved), times=5)
    assert not in_python
    (repeat,) = pair.there.records.devices.repeats.values()
    assert len(repeat.rows) == 2
    pair.check()
