"""Checkpoints of updaters that are in use: a load returns to the step of the checkpoint."""

import copy

import numpy as np

import fastopt
from helpers.settings import Setting, every_setting
from helpers.tensor_lists import everything, one_by_one
from helpers.written_headers import in_compiled_code


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


@in_compiled_code
def test_states_of_the_present_form_need_no_new_records():
    setting = Setting(fastopt.Adam)
    updater, weights = setting.updater(), setting.weights()
    setting.train(updater, weights, range(3), one_by_one)
    saved = updater.states_dict()
    for lr in (0.001, 0.001, 0.1):
        updater.optimizer.learning_rate = lr
        updater.load_states_dict(saved)
        assert updater.optimizer.learning_rate == 0.001
        setting.train(updater, weights, range(1), one_by_one)
    assert updater.info.slow.calls == len(weights)  # after the load of another learning rate
