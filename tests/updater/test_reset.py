"""After reset() an updater is like a new one, and knows the form of its parameters."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.settings import every_setting
from helpers.tensor_lists import everything, frozen

NAMES = "adam", "nadam", "lbsgd", "sgld"


def run(updater, setting, steps):
    """All that updates of new weights change; the last window of gradients is incomplete."""
    weights = setting.weights()
    setting.train(updater, weights, steps)
    for name in weights:
        updater.flush(name)
    return everything(updater, weights), frozen(dict(updater.averages))


@every_setting(lambda setting: "loss_scaler" not in setting.settings(), NAMES)
def test_every_updater_starts_again(setting):
    new, used = setting.updater(), setting.updater()
    begin = new.optimizer.num_update
    run(used, setting, range(50, 55))
    before = dict(used.states)
    used.reset()
    assert used.optimizer.num_update == begin
    assert all(state is before[name] for name, state in used.states.items())
    assert run(used, setting, range(5)) == run(new, setting, range(5))
    assert used.optimizer.num_update == new.optimizer.num_update


REMOVALS = {
    "one": lambda updater: updater.states.pop(0),
    "all": lambda updater: updater.states.clear(),
    "others": lambda updater: setattr(updater, "states", {}),
}


@pytest.mark.parametrize("remove", REMOVALS)
@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("name", ["adam", "asgd", "nadam", "prodigy"])
def test_a_parameter_without_a_state_has_no_count(name, begin, remove):
    new, used = (fastopt.Updater(optimizer.create(name, begin_num_update=begin)) for _ in range(2))
    for _ in range(2):
        used(0, np.ones(3), np.ones(3))
    REMOVALS[remove](used)
    assert used.optimizer.num_update == begin
    weights = np.ones((2, 3))
    for updater, weight in zip((new, used), weights, strict=True):
        updater(0, np.ones(3), weight)
    assert everything(new, weights[0]) == everything(used, weights[1])


def test_reset_raises_inside_an_update_and_while_the_weights_hold_their_averages():
    updater = fastopt.Updater(optimizer.SGD(lr=lambda _: updater.reset() or 0.1))
    weight = np.ones(3)
    with pytest.raises(RuntimeError, match=r"reset\(\) inside an update"):
        updater(0, weight.copy(), weight)
    assert not updater.states
    updater = fastopt.Updater(optimizer.SGD(momentum=0.9), average=fastopt.EMA(0.5))
    updater(0, weight.copy(), weight)
    with updater.averaged(), pytest.raises(RuntimeError, match="hold their averages"):
        updater.reset()
    assert updater.states[0].any()
