"""Checkpoints of updaters: the next steps are those of a run that was never interrupted."""

import copy
import json

import numpy as np
import pytest

import fastopt
from fastopt.checkpoint import CheckpointError
from helpers.cases import CASES, CHOICES, FIRST, every_choice, kept
from helpers.resumed_runs import SETTINGS, SHAPES, digits, start, train, updater_of, updater_with

RESUME = """
import json, sys
from helpers.cases import CHOICES
from helpers.resumed_runs import SETTINGS, resumed, updater_of, updater_with
updaters = enumerate([*map(updater_of, CHOICES[{!r}]), *map(updater_with, SETTINGS)])
print(json.dumps([resumed(updater, sys.argv[1] + "/" + str(n)) for n, updater in updaters]))
"""


@every_choice
def test_a_new_process_resumes_with_the_same_bits(choice, tmp_path, run_python):
    expected = []
    updaters = [updater_of(case, learning_rate=0.01) for case in CHOICES[choice]]
    for number, updater in enumerate([*updaters, *map(updater_with, SETTINGS)]):
        weights = start()
        train(updater, weights, range(3))
        updater.save(tmp_path / f"{number}.safetensors")
        np.savez(tmp_path / f"{number}.npz", **{str(i): w for i, w in weights.items()})
        train(updater, weights, range(3, 5))
        expected.append(digits(weights))
    got = json.loads(run_python(RESUME.format(choice), tmp_path))
    assert got == expected


@pytest.mark.parametrize("case", kept(CASES, *map(str, FIRST.values())), ids=str)
def test_a_load_between_updates_is_that_of_a_new_updater(case):
    updater, weights = updater_of(case, learning_rate=0.01), start()
    train(updater, weights, range(3))
    saved, before = updater.states_dict(), copy.deepcopy(weights)
    train(updater, weights, range(3, 6))
    present = updater.states
    past = copy.deepcopy(dict(present))
    for _ in range(2):
        updater.load_states_dict(saved)
        assert updater.states_synced == dict.fromkeys(updater.states, False)
        repeated = copy.deepcopy(before)
        train(updater, repeated, range(3, 6))
        assert digits(repeated) == digits(weights)
        assert updater.states_synced == dict.fromkeys(updater.states, True)
    np.testing.assert_equal(dict(present), past)


def test_states_of_the_present_form_need_no_new_records():
    updater, weights = fastopt.Updater(fastopt.Adam()), start()
    train(updater, weights, range(3))
    saved = updater.states_dict()
    for lr in (0.001, 0.001, 0.1):
        updater.optimizer.learning_rate = lr
        updater.load_states_dict(saved)
        assert updater.optimizer.learning_rate == 0.001
        train(updater, weights, range(1))
    assert updater.info.slow.calls == len(SHAPES)  # after the load of another learning rate


@pytest.mark.parametrize("change", ["shape", "count", "list", "slot"])
def test_records_do_not_excuse_states_from_checks(change):
    updater, weights = fastopt.Updater(fastopt.Adam()), start()
    train(updater, weights, range(3))
    saved = updater.states_dict()
    mean, square = saved["states"][0]
    if change == "count":
        saved["attributes"]["_index_update_count"][0] = -1
    else:
        short = {"shape": (mean[1:], square), "list": [mean, [square, mean]], "slot": (mean,)}
        saved["states"][0] = short[change]
    before = copy.deepcopy((updater.states, updater.states_synced, updater.optimizer.num_update))
    with pytest.raises(CheckpointError, match=r"index 0|index_update_count"):
        updater.load_states_dict(saved)
    after = updater.states, updater.states_synced, updater.optimizer.num_update
    np.testing.assert_equal(after, before)
    train(updater, weights, range(1))
    assert updater.info.slow.calls == 0
