"""Calls with the arrays of the call before are made by compiled code, up to the launches."""

import gc

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.device_call import SETS
from fastopt._engine.devices import Devices
from fastopt._kernels import record_words
from fastopt.lr_scheduler import CosineScheduler
from helpers.device_arrays import Foreign, check_close, on_device
from helpers.tensor_lists import one_by_one

pytestmark = pytest.mark.gpu

SHAPES = [(3, 2), (7, 10), (5, 1)]
CALLS = 4
"""Calls after which everything that a call repeats is known."""


def arrays(rng, dtypes=(np.float32,) * 3):
    pairs = zip(SHAPES, dtypes, strict=True)
    return [rng.normal(size=shape).astype(dtype) for shape, dtype in pairs]


class Pair:
    """The same parameters on the host and on the device."""

    def __init__(self, weights, make=optimizer.Adam, **kwargs):
        self.here, self.there = (optimizer.Updater(make(**{"wd": 0.1, **kwargs})) for _ in range(2))
        self.weights, self.on_device = weights, on_device(weights)

    def step(self, grads, moved, single=False):
        sides = (self.here, grads, self.weights), (self.there, moved, self.on_device)
        for updater, *lists in sides:
            if single:
                one_by_one(updater, range(3), *lists)
            else:
                updater([0, 1, 2], *lists)

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
    (optimizer.SGLD, {}, None),
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
@pytest.mark.parametrize("dtypes", ["fff", "ddd", "fdf"])
def test_warm_calls_run_no_python_and_do_the_same(
    make, kwargs, clip, dtypes, single, in_python, rng
):
    """Although the first array does not tell which of the known gradients they have."""
    pair, sets = Pair(arrays(rng, dtypes), make, **kwargs), [arrays(rng, dtypes) for _ in range(3)]
    moved = on_device(sets)
    sets[2][0], moved[2][0] = sets[1][0], moved[1][0]
    pair.set(clip_global_norm=clip)
    for scale in (1.0, 0.5):
        pair.set(rescale_grad=scale)
        for turn in (0, 1, 2) * CALLS:
            pair.step(sets[turn], moved[turn], single)
    in_python.clear()
    for turn in (0, 1, 2, 2, 0, 1):
        pair.step(sets[turn], moved[turn], single)
    assert not in_python
    assert clip is None or pair.there.info.global_norm == pytest.approx(pair.here.info.global_norm)
    pair.set(rescale_grad=0.3)
    pair.step(sets[0], moved[0], single)
    pair.check()


def test_a_norm_that_is_measured_in_between_uses_other_memory_of_the_table(rng):
    """A skipped step is marked in the table on the device, which other launches do not see."""
    pair, grads = Pair(arrays(rng)), arrays(rng)
    broken = [np.full(shape, np.inf, np.float32) for shape in SHAPES]
    moved, unusable = on_device((grads, broken))
    for turn in range(18):
        if turn % 6 == 5:
            pair.set(clip_global_norm=0.1)
            pair.step(broken, unusable)
            pair.set(clip_global_norm=None)
        pair.step(grads, moved)
    pair.check()


def test_gradients_of_which_one_is_replaced_are_read_again(in_python, rng):
    """The first and the last array are those of a known set, whose others are gone."""
    pair = Pair(arrays(rng))
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


@pytest.mark.parametrize(
    ("single", "clip", "keep"),
    [(False, None, False), (False, 0.5, True), (True, None, True), (True, 0.5, False)],
    ids=str,
)
def test_new_gradients_run_no_python_and_do_the_same(single, clip, keep, in_python, rng):
    """Beside gradients that are known, for more calls than the memory of uploads has slots."""
    pair, kept = Pair(arrays(rng)), []
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


def test_a_gradient_that_is_gone_is_not_read(rng):
    """Another array may have its id, or its memory."""
    pair = Pair(arrays(rng))
    for turn in range(20 + CALLS):
        if turn in (0, *range(CALLS, 20 + CALLS)):
            grads = arrays(rng)
            moved = on_device(grads)
            gc.collect()
        pair.step(grads, moved)
    pair.check()


def test_a_new_gradient_that_is_written_to_or_of_another_form_is_no_new_gradient(in_python, rng):
    """It is the weight or its state, in other memory order, or of another library."""
    pair = Pair(arrays(rng))
    for _ in range(2 * CALLS):
        grads = arrays(rng)
        pair.step(grads, on_device(grads))
    for change in (lambda moved: [Foreign(moved[0]), *moved[1:]], list):
        in_python.clear()
        grads = [np.asfortranarray(grad) for grad in arrays(rng)]
        pair.step(grads, change(on_device(grads)))
        assert in_python
    own, moved = pair.on_device[1], on_device(arrays(rng))
    for wrong in (own.view(own.dtype), on_device(np.ones((7, 10), np.int32))):
        with pytest.raises((TypeError, ValueError), match=r"memory|int32"):
            pair.there([0, 1, 2], [moved[0], wrong, moved[2]], pair.on_device)
    pair.check()


def test_a_launch_that_fails_is_reported_and_not_counted(in_python, rng):
    """It is not made again, as others of the call may have been launched."""
    pair, grads = Pair(arrays(rng)), arrays(rng)
    moved = on_device(grads)
    for _ in range(CALLS):
        pair.step(grads, moved)
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
    pair, grads = Pair(arrays(rng)), arrays(rng)
    moved = on_device(grads)
    for _ in range(CALLS):
        pair.step(grads, moved)
    assert len(in_python) >= CALLS
    pair.check()
