"""Checkpoints of updaters that are in use: a load returns to the step of the checkpoint."""

import copy

import numpy as np

from helpers.settings import every_setting
from helpers.tensor_lists import everything


@every_setting()
def test_a_load_between_updates_is_that_of_a_new_updater(setting):
    updater, weights = setting.updater(), setting.weights()
    setting.train(updater, weights, range(3))
    saved, before = updater.states_dict(), copy.deepcopy(weights)
    setting.train(updater, weights, range(3, 6))
    expected, present = everything(updater, weights), updater.states
    past = copy.deepcopy(dict(present))
    for _ in range(2):
        updater.load_states_dict(saved)
        assert updater.states_synced == dict.fromkeys(updater.states, False)
        repeated = copy.deepcopy(before)
        setting.train(updater, repeated, range(3, 6))
        assert everything(updater, repeated) == expected
    np.testing.assert_equal(dict(present), past)
