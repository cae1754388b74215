"""A load returns to the step of the checkpoint, and restores the user's schedule in place."""

import copy

import numpy as np
import pytest

import fastopt
from fastopt import lr_scheduler as schedules
from fastopt.checkpoint import CheckpointError
from helpers.resuming import WAYS, resumed
from helpers.settings import every_setting
from helpers.tensor_lists import everything

IN_PLACE = [way for way in WAYS if way != "pickle"]


@pytest.fixture
def stepped(registries):
    """A registered class of the user, with state in an array and in schedules."""

    @schedules.register
    class Stepped(schedules.LRScheduler):
        def __init__(self, *parts, **kwargs):
            super().__init__(**kwargs)
            self.parts, self.count = parts, np.zeros(1)

        def step(self, metric):
            self.count += 1
            for part in self.parts:
                part.step(metric)

        def _rate(self, num_update):
            return self.base_lr / (1 + self.count[0]) * self.parts[0](num_update)

    return Stepped


def plateau(**kwargs):
    return schedules.PlateauScheduler(0.5, patience=1, **{"base_lr": 1.0, **kwargs})


def updater_of(schedule):
    return fastopt.Updater(fastopt.SGD(lr=None, lr_scheduler=schedule))


def with_other_rate(schedule):
    """The optimizer has a shallow copy of the schedule."""
    with pytest.warns(UserWarning, match="replaces base_lr"):
        return fastopt.Updater(fastopt.SGD(lr=2.0, lr_scheduler=schedule))


def grouped(**settings):
    return fastopt.Updater(fastopt.SGD(lr=1.0), groups={"^w": settings})


def test_a_schedule_stays_the_object_with_an_optimizer_of_another_class():
    schedule = plateau()
    new, saved = (
        updater_of(schedule),
        fastopt.Updater(fastopt.Adam(lr=None, lr_scheduler=plateau())),
    )
    for metric in (1, 1, 1):
        saved.optimizer.lr_scheduler.step(metric)
    new.set_states(saved.get_states(dump_optimizer=True))
    assert new.optimizer.lr_scheduler is schedule
    assert new.optimizer.learning_rate == saved.optimizer.learning_rate == 0.25


PLACES = [
    updater_of,
    with_other_rate,
    lambda schedule: grouped(learning_rate=schedule),
    lambda schedule: grouped(optimizer=fastopt.Adam(lr=None, lr_scheduler=schedule)),
    lambda schedule: updater_of(
        schedules.JoinedScheduler([schedules.FactorScheduler(9), schedule], [1])
    ),
    lambda schedule: fastopt.Updater(
        fastopt.Muon(lr=1.0, fallback=fastopt.Adam(lr=None, lr_scheduler=schedule))
    ),
]
"""Updaters that have the schedule somewhere."""


def rate(updater):
    """Learning rate of the weight."""
    made = updater.parameters.optimizer_of("w")
    return getattr(made, "fallback", made).learning_rate


@pytest.mark.parametrize("way", IN_PLACE)
@pytest.mark.parametrize("make", PLACES)
def test_a_load_restores_the_schedule_that_the_user_steps(make, way, tmp_path):
    saved, held = plateau(), plateau()
    old, new = make(saved), make(held)
    old("w", np.ones(1), np.zeros(1))
    start = rate(old)
    for schedule, metric in ((saved, 1.0),) * 2 + ((held, 9.0),) * 4:
        schedule.step(metric)
    resumed(way, old, new, tmp_path)
    assert held.shared == saved.shared == {"best": 1.0, "reductions": 1, "bad_steps": 0}
    assert rate(new) == rate(old) == start / 2
    held.step(2.0)
    assert rate(new) == start / 4
    assert rate(old) == start / 2


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_load_restores_the_schedule_of_a_users_class(stepped, way, tmp_path):
    (old_part, old_schedule), (part, held) = (
        (each, stepped(each, base_lr=1.0)) for each in (plateau(), plateau())
    )
    old, new = updater_of(old_schedule), updater_of(held)
    old("w", np.ones(1), np.zeros(1))
    for metric in (1.0, 2.0):
        old_schedule.step(metric)
    held.cache = "of this run"
    resumed(way, old, new, tmp_path)
    assert vars(held).keys() == vars(old_schedule).keys()
    assert (held.count, part.shared) == (2, old_part.shared)
    held.step(2.0)
    assert rate(new) == held(1) == 1 / 4 * 1 / 4
    assert rate(old) == 1 / 3 * 1 / 2


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_load_that_is_refused_or_has_another_class_does_not_change_the_schedule(way, tmp_path):
    held, other, saved = plateau(), schedules.CosineScheduler(9), plateau()
    old, new, replaced = map(updater_of, (saved, held, other))
    before = dict(vars(other))
    saved.step(1.0)
    resumed(way, old, replaced, tmp_path)
    assert type(replaced.optimizer.lr_scheduler) is schedules.PlateauScheduler
    assert vars(other) == before
    old("w", np.ones(2), np.zeros(2))
    old.states["w"] = np.ones(2)  # SGD without momentum has no state
    with pytest.raises(CheckpointError):
        resumed(way, old, new, tmp_path)
    assert held.shared == plateau().shared


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
