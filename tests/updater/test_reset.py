"""After reset() an updater is like a new one, and knows the form of its parameters."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.settings import TABLE, every_setting
from helpers.tensor_lists import everything, frozen
from helpers.written_headers import in_compiled_code

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
    used.reset()
    assert used.optimizer.num_update == begin
    assert run(used, setting, range(5)) == run(new, setting, range(5))
    assert used.optimizer.num_update == new.optimizer.num_update


@in_compiled_code
def test_the_next_call_needs_no_python(monkeypatch):
    updater, setting = fastopt.Updater(optimizer.Adam()), TABLE["groups"]
    run(updater, setting, range(3))
    states = {index: state[0] for index, state in updater.states.items()}
    updater.reset()
    assert not any(array.any() for array in states.values())
    monkeypatch.setattr(fastopt.Updater, "_update", None)
    run(updater, setting, range(3))
    assert all(updater.states[index][0] is array for index, array in states.items())


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
    ends = []
    for updater in (new, used):
        weight = np.ones(3)
        updater(0, np.ones(3), weight)
        ends.append(everything(updater, weight))
    assert ends[0] == ends[1]


def test_a_removed_state_leaves_others_their_count():
    updater = fastopt.Updater(optimizer.Adam())
    for index in (0, 1, 1):
        updater(index, np.ones(3), np.ones(3))
    del updater.states[0]
    updater.reset()
    assert updater.optimizer.num_update == 0
    updater(1, np.ones(3), np.ones(3))
    updater.states = {1: updater.states[1]}
    assert updater.optimizer.num_update == 1


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
