"""A warm call takes a bounded number of Python frames, whatever the optimizer."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import EMA, optimizer
from fastopt.parameter import ParameterDict
from fastopt.trainer import Trainer
from helpers.cases import FIRST, OF_STEPS, exhaustive, named
from helpers.frames import LIST, SINGLE, frames
from helpers.written_headers import in_compiled_code

pytestmark = in_compiled_code

IN_PYTHON = {"lbsgd", *OF_STEPS, "test"}
"""They compute rates in Python; Test overrides counts. In a list of LBSGD with a
schedule, the count of each weight determines the next one's rate."""

NAMES = sorted({*FIRST} - IN_PYTHON)
INDICES = [0, 1, 2, 3]


def at(update):
    return 0.1 / (update + 1)


SETTINGS = {
    "plain": {},
    "schedule": {"lr_scheduler": at},
    "multipliers": {"wd": 0.1, "param_idx2name": dict(enumerate("abcd"))},
    "param_dict": {"param_dict": dict.fromkeys(INDICES, SimpleNamespace(lr_mult=0.5, wd_mult=0.5))},
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def made(name, setting="plain"):
    kwargs = dict(SETTINGS[setting])
    if "wd" in kwargs:
        kwargs["wd"] = FIRST[name].wd
    found = FIRST[name].make(learning_rate=0.01, **kwargs)
    if setting == "multipliers":
        found.lr_mult.update({0: 0.5, "b": 2.0})
        found.wd_mult.update({0: 0.5, "b": 2.0})
    return found


def warm(single, updater, steps=4):
    """Frames of the last of several calls."""
    weights = [np.ones((4, 3), np.float32) for _ in INDICES]
    for _ in range(steps):
        grads = [np.ones((4, 3), np.float32) for _ in INDICES]
        call = (0, grads[0], weights[0]) if single else (INDICES, grads, weights)
        found = frames(lambda call=call: updater(*call))
    return found


@pytest.mark.parametrize("single", [True, False], ids=["single", "list"])
@every_setting
@pytest.mark.parametrize("name", [*named(NAMES, "adam", "adamw"), "lbsgd"])
def test_frames_of_a_warm_call(name, setting, single):
    single = single or name == "lbsgd"
    found = warm(single, optimizer.Updater(made(name, setting)))
    assert len(found) <= (SINGLE if single else LIST), found


@pytest.mark.parametrize("average", [None, *exhaustive(EMA())], ids=str)
@pytest.mark.parametrize("single", [True, *exhaustive(False)], ids=["single", "list"])
def test_frames_of_a_warm_call_with_groups(single, average):
    """An average costs none, and a list three for each group besides."""
    groups = {"a": {"wd_mult": 0.0}, "b": {"optimizer": optimizer.SGD(lr=0.1, momentum=0.9)}}
    adam = optimizer.Adam(param_idx2name=dict(enumerate("abcd")))
    found = warm(single, optimizer.Updater(adam, groups=groups, average=average))
    assert len(found) <= (SINGLE if single else LIST + 3 * 3), found


@pytest.mark.parametrize("name", named(NAMES, "adam", "adamw"))
def test_frames_of_a_trainer(name):
    params = ParameterDict()
    for letter in "abcd":
        params.get(letter, shape=(4, 3), init="ones")
    params.initialize()
    trainer = Trainer(params, made(name))
    for _ in range(4):
        for parameter in params.values():
            parameter.grad()[:] = 1
        found = frames(lambda: trainer.step(batch_size=4))
    assert len(found) <= LIST, found


def test_the_second_call_is_warm():
    found = warm(True, optimizer.Updater(optimizer.Adam()), steps=2)
    assert len(found) <= SINGLE, found
