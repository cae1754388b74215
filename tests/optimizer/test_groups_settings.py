"""Groups beside other settings and of optimizers of matrices: as by an updater for each weight."""

import copy
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import EMA, SWA, optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.lr_scheduler import FactorScheduler
from helpers.groups import WAYS, arrays, call, check_same, groups, train
from helpers.matrix_rules import FORMS
from helpers.settings import every_setting
from helpers.tensor_lists import as_list, everything, frozen
from helpers.users import InNumPy

ALL = {"accumulate": 2, "average": EMA(0.9), "clip_adaptive": 0.05}


def make(form, **changes):
    kind = FORMS.get(form, optimizer.Adam)
    return kind(learning_rate=0.1, rescale_grad=0.3, **{"wd": 0.1, **changes})


def together(form="adam", **settings):
    return optimizer.Updater(make(form), groups=groups(), **settings)


def alone(form="adam", **settings):
    """An updater for each weight, with the optimizer of its group."""
    made = {
        "embed.weight": make(form, clip_gradient=0.3),
        "body.weight": make(form),
        "body.bias": make(form, wd=0.0),
        "norm.scale": make(form, wd=0.0),
        "head.weight": optimizer.SGD(learning_rate=1.0, momentum=0.9, rescale_grad=0.3),
    }
    made["embed.weight"].set_lr_mult({"embed.weight": 0.1})
    return {name: optimizer.Updater(own, **copy.deepcopy(settings)) for name, own in made.items()}


def given_to(step):
    return {**arrays(step), "frozen.weight": None}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("form", ["adam", *FORMS])
def test_each_weight_is_updated_as_by_an_updater_of_its_own(form, way):
    made, each, weights, expected = together(form), alone(form), arrays(0), arrays(0)
    train(made, each, weights, expected, given_to, range(1, 6), way)
    check_same(made, each, weights, expected)


def fits(setting):
    """Whether an optimizer fits a group: it adds up no gradients and has no count of its own."""
    counts = setting.sums() or setting.make().begin_num_update
    return not (setting.is_whole or "groups" in setting.settings() or counts)


@every_setting(fits)
def test_a_group_of_any_kind_is_updated_as_by_an_updater_of_its_own(setting):
    """Beside one of another optimizer."""
    other = partial(optimizer.AdamW, wd=0.1, multi_precision=True)
    group = {"optimizer": setting.make()}
    made = optimizer.Updater(other(), groups={"weight$|^[ab]$": group}, **setting.settings())
    apart = [optimizer.Updater(make(), **setting.settings()) for make in (other, setting.make)]
    weights, expected = setting.weights(), setting.weights()
    for step in range(7):
        grads = setting.gradients(weights, step)
        as_list(made, weights, grads.values(), weights.values())
        for name, grad in grads.items():
            apart[name.endswith("weight") or name in "ab"](name, grad, expected[name])
    for updater in (made, *apart):
        for name in updater.states:
            updater.flush(name)
    assert frozen(weights) == frozen(expected)
    for kind in ("states", "averages"):
        found = [dict(getattr(updater, kind)) for updater in (made, *apart)]
        assert frozen(found[0]) == frozen(found[1] | found[2])


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (optimizer.Adam, ALL),
        (partial(optimizer.CAME, fallback="adamw"), {"accumulate": 2}),
    ],
)
def test_the_norm_is_that_of_all_groups_together(make, settings, scale):
    """Groups that override nothing are no groups, whatever is clipped."""
    ends = []
    head = {"^head": {"optimizer": make(learning_rate=0.1)}}
    for own in (None, {"bias|norm": {"lr_mult": 1.0}, "^embed": {"learning_rate": 0.1}, **head}):
        scaler = scale and LossScaler(init_scale=scale)
        made = optimizer.Updater(make(learning_rate=0.1), scaler, 0.01, groups=own, **settings)
        weights, infos = arrays(0), []
        for step in range(9):
            grads = arrays(step)
            if step == 4:
                grads["head.weight"][0] = np.inf
            call(made, grads, weights)
            infos.append(repr(made.info))
        ends.append((everything(made, weights)[:2], frozen(made.averages), infos))
    assert ends[0] == ends[1]
    assert sum("non_finite=('head.weight',)" in info for info in infos) == 1


@pytest.mark.parametrize(
    "kind", [lambda made, _, **own: fastopt.Updater(made, **own), ShardedUpdater]
)
def test_a_weight_that_is_frozen_within_a_window_loses_its_sum(kind):
    def run(comm):
        updater = kind(fastopt.SGD(lr=1.0), comm, accumulate=2)
        weights = {"a": np.zeros(1), "b": np.zeros(1)}
        updater.step({"a": np.full(1, 100.0), "b": np.ones(1)}, weights)
        updater.groups = {"a": {"frozen": True}}
        updater.step({"a": None, "b": np.ones(1)}, weights)
        updater.accumulate = 3  # no sum is open
        updater.groups = None
        for _ in range(3):
            updater.step({"a": np.ones(1), "b": np.ones(1)}, weights)
        assert weights == {"a": [-1.0], "b": [-2.0]}

    run_threads(1, run)


def test_a_weight_that_is_frozen_later_keeps_its_value_and_its_average():
    made, weights = optimizer.Updater("adam", average=EMA(0.9)), arrays(0)
    call(made, arrays(1), weights)
    kept = frozen((weights["body.bias"], made.averages["body.bias"]))
    made.groups = {"bias": {"frozen": True}}
    call(made, {**arrays(2), "body.bias": None}, weights)
    with made.averaged(weights):  # which may name a frozen one
        assert frozen((weights["body.bias"], made.averages["body.bias"])) == kept
        assert weights["body.weight"].tobytes() == made.averages["body.weight"].tobytes()
    made.groups = None
    call(made, arrays(3), weights)
    assert frozen(weights["body.bias"]) != kept[0]


UNFIT = {
    ("adam", "schedulefreesgd"): (EMA(0.5), "groups of ScheduleFreeSGD and Adam, as the former"),
    ("adam", "test"): (SWA(), r"SWA\(.*\) depends on the number of updates, and Test"),
}
"""Optimizers of an updater and of a group of it, and an average that they cannot have."""


@pytest.mark.parametrize(("main", "other"), UNFIT)
def test_settings_that_do_not_fit_all_groups_are_not_taken(main, other):
    average, words = UNFIT[main, other]
    own = {"^b": {"optimizer": other}, "^c": {"beta1": 0.5}}
    made, averaging = optimizer.Updater(main, groups=own), optimizer.Updater(main, average=average)
    before = made.optimizer
    for updater, name, value in (
        (made, "average", average),
        (averaging, "groups", own),
        (made, "optimizer", optimizer.SGD()),
    ):
        expected = (
            "SGD does not take beta1" if name == "optimizer" else rf"groups\['\^b'\]: .*{words}"
        )
        with pytest.raises(TypeError, match=expected):
            setattr(updater, name, value)
    assert (made.average, averaging.groups, made.optimizer) == (None, None, before)


muon = partial(optimizer.Muon, lr=0.1, wd=0.1, fallback="adamw")


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
    updater = fastopt.Updater(muon(fallback=made), groups=own)
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
    updater = fastopt.Updater(muon(fallback=made, wd=0.0), groups=own)
    weights = {k: np.zeros(1) for k in "abc"}
    call(updater, {k: np.ones(1) for k in "abc"}, weights)
    assert [weight.item() for weight in weights.values()] == [-0.25, -2.0, -1.0]
