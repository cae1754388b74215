"""Checkpoints of updaters: the next steps are those of a run that was never interrupted."""

import copy
import json

import numpy as np
import pytest
from cases import CASES, chosen, every_or_few, sampled

from fastopt.checkpoint import Skipped

NAMES = {0: "a_weight", 1: "a_bias", "top": "b_weight"}
SHAPES = {0: (7, 5), 1: (3, 2), "top": (4, 6)}

RESUME = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint_resume import chosen, resumed
cases = enumerate(chosen({}))
print(json.dumps([resumed(case, sys.argv[2] + "/" + str(n)) for n, case in cases]))
"""


def updater_of(case, **kwargs):
    kwargs.setdefault("param_idx2name", NAMES)
    return case.updater(wd=case.wd, seed=3, **kwargs)


def start():
    rng = np.random.default_rng(1)
    return {index: rng.normal(size=shape) for index, shape in SHAPES.items()}


def train(updater, weights, steps):
    for step in steps:
        for index, weight in weights.items():
            gradient = np.random.default_rng([step, *weight.shape]).normal(size=weight.shape)
            updater(index, gradient, weight)


def digits(weights):
    return [weight.tobytes().hex() for weight in weights.values()]


def resumed(case, path):
    """Bits of the weights after two further steps."""
    updater = updater_of(case)
    updater.load(f"{path}.safetensors")
    weights = dict(np.load(f"{path}.npz"))
    weights = {index: weights[str(index)] for index in SHAPES}
    train(updater, weights, range(3, 5))
    return digits(weights)


@every_or_few
def test_a_new_process_goes_on_with_the_same_bits(every, tmp_path, run_python):
    expected = []
    for number, case in enumerate(chosen(every)):
        updater, weights = updater_of(case, learning_rate=0.01), start()
        train(updater, weights, range(3))
        updater.save(tmp_path / f"{number}.safetensors")
        np.savez(tmp_path / f"{number}.npz", **{str(i): w for i, w in weights.items()})
        train(updater, weights, range(3, 5))
        expected.append(digits(weights))
    got = json.loads(run_python(RESUME.format(every), __file__.rpartition("/")[0], tmp_path))
    assert got == expected


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_an_updater_goes_back_to_what_it_was(case, tmp_path):
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
