"""After reset() an updater is like a new one, and knows the form of its parameters."""

from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._kernels.numpy_abi import readable
from fastopt.lr_scheduler import FactorScheduler
from helpers.cases import FIRST, named
from helpers.tensor_lists import everything, normal

SHAPES = [(3, 4), (5, 2), (3, 4)]
SETTINGS = {
    "plain": {},
    "groups": {"groups": {"[02]": {"wd": 0.5}, "1": {"lr_mult": 0.5}}},
    "other optimizer": {"groups": {"[02]": {"optimizer": "nag"}}},
    "average": {"average": fastopt.EMA(0.5)},
    "average of some steps": {"average": fastopt.SWA(start=2, every=2)},
    "accumulate": {"accumulate": 3},
    "clips": {"clip_global_norm": 0.5},
}
OPTIONS = {
    "schedule": {
        "learning_rate": None,
        "lr_scheduler": FactorScheduler(step=2, factor=0.5, base_lr=0.1),
    },
    "8 bits": {"state_dtype": "int8", "state_min_size": 1},
    "begun": {"begin_num_update": 5},
}
STEPS = 4
"""With accumulate=3 the last window is incomplete."""


def run(updater, seed, dtype="float32", steps=STEPS):
    weights = [normal(seed + k, shape, dtype) for k, shape in enumerate(SHAPES)]
    for step in range(steps):
        grads = [normal(99 + seed + step + k, shape, dtype) for k, shape in enumerate(SHAPES)]
        updater([0, 1, 2], grads, weights)
        updater(1, grads[1], weights[1])
    averages = {index: array.tobytes() for index, array in updater.averages.items()}
    return everything(updater, weights), averages, updater.optimizer.num_update


def check(make, dtype="float32", **settings):
    try:
        new, used = (fastopt.Updater(make(), **settings) for _ in range(2))
        run(used, 50, dtype)
    except (TypeError, ValueError) as error:
        pytest.skip(f"refused: {error}")
    used.reset()
    assert run(used, 7, dtype) == run(new, 7, dtype)


@pytest.mark.parametrize("name", named(sorted(FIRST), "adam", "nadam", "lbsgd", "sgld", "muon"))
def test_every_optimizer_starts_again(name):
    check(partial(FIRST[name].make, wd=FIRST[name].wd))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["adam", "sgld"])
def test_updaters_with_settings_start_again(name, setting):
    check(partial(FIRST[name].make, wd=FIRST[name].wd), **SETTINGS[setting])


@pytest.mark.parametrize("option", OPTIONS)
def test_optimizers_with_options_start_again(option):
    check(partial(optimizer.Adam, **OPTIONS[option]))


@pytest.mark.parametrize("setting", ["plain", "average"])
def test_masters_start_again_from_the_weights(setting):
    check(partial(optimizer.Adam, multi_precision=True), "float16", **SETTINGS[setting])


@pytest.mark.parametrize("sparse_decay", ["touched", "catch_up"])
def test_rows_start_again(sparse_decay):
    def steps(updater):
        weight = np.ones((6, 2), np.float32)
        for row in (1, 4, 1):
            updater(0, (np.ones((1, 2), np.float32), np.array([row])), weight)
        updater.flush(0)
        return weight.tolist()

    made = [optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay=sparse_decay) for _ in "ab"]
    new, used = map(fastopt.Updater, made)
    steps(used)
    used.reset()
    assert steps(used) == steps(new)


@pytest.mark.skipif(not readable(), reason="there are no records")
def test_the_next_call_needs_no_python(monkeypatch):
    updater = fastopt.Updater(optimizer.Adam())
    run(updater, 0)
    states = {index: state[0] for index, state in updater.states.items()}
    updater.reset()
    assert not any(array.any() for array in states.values())
    monkeypatch.setattr(fastopt.Updater, "_update", None)
    run(updater, 1)
    assert all(updater.states[index][0] is array for index, array in states.items())


def _removed(updater):
    del updater.states[0]


def _cleared(updater):
    updater.states.clear()


def _replaced(updater):
    updater.states = {}


@pytest.mark.parametrize("remove", [_removed, _cleared, _replaced])
@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("name", ["adam", "asgd", "nadam", "prodigy"])
def test_a_parameter_without_a_state_has_no_count(name, begin, remove):
    new, used = (fastopt.Updater(optimizer.create(name, begin_num_update=begin)) for _ in range(2))
    gradient, first, second = np.ones(3), np.ones(3), np.ones(3)
    used(0, gradient, np.ones(3))
    used(0, gradient, np.ones(3))
    remove(used)
    assert used.optimizer.num_update == begin
    for updater, weight in ((new, first), (used, second)):
        updater(0, gradient, weight)
    assert everything(new, [first]) == everything(used, [second])


def test_a_removed_state_leaves_others_their_count():
    updater, gradient = fastopt.Updater(optimizer.Adam()), np.ones(3)
    for index in (0, 1, 1):
        updater(index, gradient, np.ones(3))
    del updater.states[0]
    updater.reset()
    assert updater.optimizer.num_update == 0
    updater(1, gradient, np.ones(3))
    updater.states = {1: updater.states[1]}
    assert updater.optimizer.num_update == 1


def test_reset_inside_an_update_raises():
    updater = fastopt.Updater(optimizer.SGD(learning_rate=lambda _: updater.reset() or 0.1))
    weight = np.ones(3, np.float32)
    with pytest.raises(RuntimeError, match=r"reset\(\) inside an update"):
        updater(0, weight.copy(), weight)
    assert not updater.states


def test_reset_raises_while_the_weights_hold_their_averages():
    updater = fastopt.Updater(optimizer.SGD(), average=fastopt.EMA(0.5))
    weight = np.ones(3, np.float32)
    updater(0, weight.copy(), weight)
    with updater.averaged(), pytest.raises(RuntimeError, match="hold their averages"):
        updater.reset()
    assert updater.states
