"""Threads that share an updater: a call sees the settings before a change or after it."""

import threading
from itertools import cycle

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler

CHANGES = {
    "optimizer": optimizer.SGD,
    "groups": lambda: {"w": {"lr_mult": 0.5}},
    "states": dict,
    "loss_scaler": LossScaler,
    **dict.fromkeys(("clip_global_norm", "clip_adaptive", "clip_adaptive_eps"), lambda: 1.0),
    "accumulate": lambda: 2,
    "average": lambda: fastopt.EMA(0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_between_calls(name):
    updater, weight = fastopt.Updater(optimizer.SGD(lr=1.0)), np.zeros(3)
    updater("w", np.ones(3), weight)
    before = getattr(updater, name)
    thread = threading.Thread(target=setattr, args=(updater, name, CHANGES[name]()))
    with updater.lock:  # as in a call
        thread.start()
        thread.join(0.05)
        updater.optimizer.wd = 0.0  # records follow the settings once more
        assert getattr(updater, name) is before
        updater("w", np.ones(3), weight)
        assert weight.tolist() == [-2.0] * 3
    thread.join()
    assert getattr(updater, name) is not before
    updater("w", np.ones(3), weight)


@pytest.mark.filterwarnings("ignore:.* has no effect")
@pytest.mark.parametrize("change", ["optimizer", "clip_global_norm", "groups", "none"])
def test_no_update_is_lost_while_settings_change(change):
    made = [optimizer.SGD(lr=1.0), optimizer.SGD(lr=1.0)]
    groups = [None, {"a": {"lr_mult": 1.0}}]
    choices = {"optimizer": made, "clip_global_norm": [None, 1e9], "groups": groups, "none": [0]}
    updater, calls, errors = fastopt.Updater(made[0]), 60, []
    weights = {name: np.zeros(size, np.float32) for name, size in (("a", 200_000), ("b", 3))}

    def update():
        try:
            for step in range(calls):
                grads = {name: np.ones_like(weight) for name, weight in weights.items()}
                for names in (("a", "b"),) if step % 3 else ("a", "b"):
                    updater([*names], [grads[n] for n in names], [weights[n] for n in names])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=update) for _ in range(3)]
    for thread in threads:
        thread.start()
    for choice in cycle(choices[change]):
        setattr(updater, change, choice)
        if not any(thread.is_alive() for thread in threads):
            break
    assert not errors
    for name, weight in weights.items():
        assert np.unique(weight).tolist() == [-3 * calls]
        assert sum(each._index_update_count.get(name, 0) for each in made) == 3 * calls
