"""Groups of optimizers of matrices, and groups with these beside optimizers with rules."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.lr_scheduler import FactorScheduler
from fastopt.sparse import RowSparse
from helpers.groups import arrays, call, train
from helpers.matrix_rules import F32, FORMS
from helpers.users import InNumPy


def make(form, **options):
    return FORMS[form](**{"lr": 0.1, "wd": 0.1, "fallback": "adamw", **options})


def test_an_update_in_python_has_groups_too():
    own = {"b": {"lr_mult": 0.5}, "c": {"lr": 3.0}, "d": {"optimizer": "sgd"}}
    updater, weights = fastopt.Updater(InNumPy(lr=1.0), groups=own), [np.zeros(1) for _ in "abcd"]
    updater(list("abcd"), [np.ones(1)] * 4, weights)
    assert [weight.item() for weight in weights] == [-1, -0.5, -3, -0.01]


@pytest.mark.parametrize("fallback", ["adamw", "nadam", None])
def test_a_fallback_takes_what_its_group_overrides(fallback):
    """An object of the user has the multipliers of the group, and what it overrides."""
    made = optimizer.AdamW(learning_rate=0.2, wd=0.3) if fallback is None else fallback
    lr, wd = (0.1, 0.1) if fallback else (0.2, 0.3)
    own = {"^a": {"wd": 0.0}, "^b": {"wd_mult": 0.5}, "^c": {"lr": 0.01}, "^d": {"momentum": 0.5}}
    updater = fastopt.Updater(make("muon", fallback=made), groups=own)
    changes = {"a": {"wd": 0.0}, "b": {"wd": wd / 2}, "c": {"lr": 0.01}, "d": {}, "e": {}}
    each = {
        name: fastopt.Updater(optimizer.create(fallback or "adamw", **{"lr": lr, "wd": wd, **own}))
        for name, own in changes.items()
    }
    weights, expected = arrays(0, changes, shape=(3,)), arrays(0, changes, shape=(3,))
    train(updater, each, weights, expected, lambda step: arrays(step, changes, shape=(3,)), (1, 2))
    (updater.optimizer if fallback else made).clip_gradient = 0.1  # the user's object is followed
    for one in each.values():
        one.optimizer.clip_gradient = 0.1
    train(updater, each, weights, expected, lambda step: arrays(step, changes, shape=(3,)), (3, 4))
    np.testing.assert_equal(weights, expected)


def test_a_schedule_of_the_fallback_gives_way_to_the_rate_of_a_group():
    made = optimizer.SGD(lr_scheduler=FactorScheduler(step=1, factor=0.5, base_lr=1.0))
    own = {"a": {"lr": 0.25}, "b": {"lr_scheduler": lambda count: 2.0}}
    updater = fastopt.Updater(make("muon", fallback=made, wd=0.0), groups=own)
    weights = {k: np.zeros(1) for k in "abc"}
    call(updater, {k: np.ones(1) for k in "abc"}, weights)
    assert [weight.item() for weight in weights.values()] == [-0.25, -2.0, -1.0]


def test_masters_copies_and_rows_of_groups():
    own = {"^rows": {"optimizer": optimizer.Adam(learning_rate=0.1, lazy_update=True)}}
    own["^half"] = {"optimizer": optimizer.SGD(learning_rate=0.1, multi_precision=True)}
    updater = fastopt.Updater(make("muon", multi_precision=True), groups=own)
    halves, rows = (np.ones((2, 2), np.float16) for _ in "ab"), np.ones((3, 2), F32)
    weights = {**dict(zip(("body", "half"), halves, strict=True)), "rows": rows}
    updater.set_copy("rows", copied := np.zeros((3, 2), np.float16))
    grads = dict.fromkeys(("body", "half"), np.full((2, 2), 1e-4, np.float16))
    grads["rows"] = RowSparse(np.ones((1, 2), F32), [1], (3, 2))
    for _ in range(3):
        call(updater, grads, weights)
    assert updater.states["half"][1].dtype == updater.states["body"][0].dtype == F32
    np.testing.assert_allclose(updater.states["half"][1], 1 - 3e-5, rtol=1e-6)
    np.testing.assert_array_equal(copied, rows.astype(np.float16))
    np.testing.assert_array_equal((rows < 0.8).all(axis=1), [False, True, False])
