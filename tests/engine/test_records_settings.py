"""Records with the settings of updaters: groups, clips, loss scale, averages, accumulation."""

from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.cases import slow
from helpers.settings import settings_of
from helpers.tensor_lists import as_list, everything, normal, one_by_one
from helpers.written_headers import in_compiled_code

pytestmark = [in_compiled_code, pytest.mark.usefixtures("unrecorded")]

SHAPES = [(3, 4), (5,), (3, 4), (2, 3, 2), (1,)]


@pytest.mark.parametrize("setting", [None, "clip_global_norm", "loss_scaler", "accumulate"])
def test_a_schedule_may_change_attributes_and_states(setting):
    ends = []
    for inside in (False, True):
        made = optimizer.SGD(momentum=0.5)
        updater, weight = fastopt.Updater(made, **settings_of(setting)), np.ones(3)

        def schedule(update, updater=updater, inside=inside):
            if inside:
                updater.states = dict(updater.states)
                updater.optimizer.wd = 0.1 * ((update - 1) // 2)
            return 0.1

        made.lr_scheduler = schedule
        for _ in range(6):
            if not inside:
                made.wd = 0.1 * (made.num_update // 2)
            updater(0, np.full(3, 5.0), weight)
        ends.append((weight.tobytes(), made.num_update))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("way", [as_list, one_by_one])
def test_multipliers_of_parameters_are_read_in_every_call(way):
    parameters = {k: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for k in range(2)}
    updater = fastopt.Updater(optimizer.SGD(lr=1.0, param_dict=parameters))
    weights, total = [np.zeros(1), np.zeros(1)], 0.0
    for step in range(30):
        if step == 20:
            updater.optimizer.param_dict[0] = SimpleNamespace(wd_mult=1.0)
        updater.optimizer.param_dict[0].lr_mult = 1.0 + step
        total += 1.0 + step
        way(updater, [0, 1], [np.ones(1), np.ones(1)], weights)
    np.testing.assert_array_equal(weights, [[-total], [-30]])


def test_hyper_may_depend_on_the_count_of_each_tensor():
    class Slowing(optimizer.SGD):
        def hyper(self, t, lr, wd):
            return {"momentum": 0.0, "lr": lr / t}

    updater, weights = fastopt.Updater(Slowing(lr=1.0)), [np.zeros(1), np.zeros(1)]
    for _ in range(3):
        updater(0, np.ones(1), weights[0])
    for _ in range(2):
        updater([0, 1], [np.ones(1), np.ones(1)], weights)  # the counts differ
    np.testing.assert_allclose(weights, [[-sum(1 / t for t in range(1, 6))], [-1.5]], rtol=1e-15)
    updater(1, np.ones(1), weights[1])
    assert weights[1] == -(1 + 1 / 2 + 1 / 3)


def test_an_index_that_occurs_twice_is_measured_twice_and_accumulated_once():
    updater, weight = fastopt.Updater(optimizer.SGD(lr=1.0), clip_global_norm=1.0), np.zeros(1)
    for step in range(1, 4):
        updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])
        np.testing.assert_allclose(weight, -step * 2**0.5, rtol=1e-15)
    updater = fastopt.Updater(optimizer.SGD(lr=1.0), accumulate=2)
    for _ in range(3):
        updater(0, np.ones(1), weight)
        with pytest.raises(ValueError, match="takes an index once"):
            updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])


@pytest.mark.parametrize(
    "setting", [None, *slow("clip_global_norm", "loss_scaler", "clip_adaptive", "accumulate")]
)
@pytest.mark.parametrize("rate", [0.1, lambda update: 0.1 / update], ids=["rate", "schedule"])
def test_frozen_parameters_of_a_list_are_left_out(setting, rate):
    """Whatever their gradients, with the bits of lists without them, and without Python."""
    ends, order = [], [[4, 0, 1, 2, 3], [3, 1, 0]]
    for frozen in ([1, 4], []):
        groups = {**{f"^{k}$": {"frozen": True} for k in frozen}, "0": {"wd": 0.5}}
        updater = fastopt.Updater(
            optimizer.Prodigy(learning_rate=rate), groups=groups, **settings_of(setting)
        )
        weights = [normal(9, shape, "float32") for shape in SHAPES]
        for step in range(8):
            indices = [k for k in order[step % 2] if frozen or k not in (1, 4)]
            grads = [None if k == 4 else normal(step + k, SHAPES[k], "float32") for k in indices]
            updater(indices, grads, [weights[k] for k in indices])
        assert updater.info.slow.calls <= (setting == "accumulate")
        ends.append(everything(updater, weights)[:4])
    assert ends[0] == ends[1]
