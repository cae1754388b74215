"""Checkpoints of updaters that are in use: a load returns to the step of the checkpoint."""

import copy

import numpy as np
import pytest

import fastopt
from fastopt.checkpoint import CheckpointError
from helpers.settings import Setting, every_setting
from helpers.tensor_lists import everything, one_by_one
from helpers.written_headers import in_compiled_code

ADAM = Setting(fastopt.Adam)


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


def trained():
    updater, weights = ADAM.updater(), ADAM.weights()
    ADAM.train(updater, weights, range(3), one_by_one)
    return updater, weights, updater.states_dict()


@in_compiled_code
def test_states_of_the_present_form_need_no_new_records():
    updater, weights, saved = trained()
    for lr in (0.001, 0.001, 0.1):
        updater.optimizer.learning_rate = lr
        updater.load_states_dict(saved)
        assert updater.optimizer.learning_rate == 0.001
        ADAM.train(updater, weights, range(1), one_by_one)
    assert updater.info.slow.calls == len(weights)  # after the load of another learning rate


@pytest.mark.parametrize("change", ["shape", "count", "list", "slot"])
def test_records_do_not_excuse_states_from_checks(change):
    updater, weights, saved = trained()
    mean, square = saved["states"]["embed.weight"]
    if change == "count":
        saved["attributes"]["_index_update_count"]["embed.weight"] = -1
    else:
        short = {"shape": (mean[1:], square), "list": [mean, [square, mean]], "slot": (mean,)}
        saved["states"]["embed.weight"] = short[change]
    before = everything(updater, weights)
    with pytest.raises(CheckpointError, match=r"index 'embed.weight'|index_update_count"):
        updater.load_states_dict(saved)
    assert everything(updater, weights) == before
    ADAM.train(updater, weights, range(1), one_by_one)
    assert updater.info.slow.calls == 0
