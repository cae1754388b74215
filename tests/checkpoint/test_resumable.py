"""Checkpoints of updaters: the next steps are those of a run that was never interrupted."""

import copy
import json

import numpy as np
import pytest

from fastopt.checkpoint import Skipped
from helpers.cases import CASES, CHOICES, every_choice, kept
from helpers.resumed_runs import SETTINGS, digits, start, train, updater_of, updater_with

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


@pytest.mark.parametrize("case", kept(CASES, "adam"), ids=str)
def test_an_updater_reloads_its_own_checkpoint(case, tmp_path):
    updater, weights = updater_of(case, learning_rate=0.01), start()
    train(updater, weights, range(3))
    updater.save(tmp_path / "file")
    before, saved = copy.deepcopy(weights), updater.states_dict()
    train(updater, weights, range(3, 6))
    for again in (lambda: updater.load(tmp_path / "file"), lambda: updater.load_states_dict(saved)):
        assert again() == Skipped([], [])
        assert updater.states_synced == dict.fromkeys(updater.states, False)
        repeated = copy.deepcopy(before)
        train(updater, repeated, range(3, 6))
        assert digits(repeated) == digits(weights)
