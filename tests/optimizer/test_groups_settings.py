"""Groups beside accumulate, average and clip_adaptive: each weight as by an updater of its own."""

import copy
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import EMA, SWA, Lookahead, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.cases import exhaustive
from helpers.groups import NAMES, WAYS, arrays, call, check_same, train
from helpers.matrix_rules import FORMS
from helpers.settings import every_setting
from helpers.tensor_lists import as_list, everything, frozen, one_by_one
from helpers.users import Unscaled

TRAINED = NAMES[:-1]

AVERAGES = None, EMA(0.9), EMA(0.9, warmup=True), SWA(start=2, every=2), Lookahead(k=2, alpha=0.3)
ALL = {"accumulate": 2, "average": EMA(0.9), "clip_adaptive": 0.05}
TOGETHER = {average: {**ALL, "average": average} for average in (AVERAGES[1], *AVERAGES[3:])}
every_average = pytest.mark.parametrize("settings", TOGETHER.values(), ids=map(str, TOGETHER))


def groups():
    return {
        r"bias$|norm": {"wd_mult": 0.0},
        r"^embed": {"lr_mult": 0.1, "clip_gradient": 0.3},
        r"^frozen": {"frozen": True},
        r"^head": {"optimizer": optimizer.SGD(learning_rate=1.0, momentum=0.9)},
    }


def make(form, **changes):
    kind = FORMS.get(form, optimizer.Adam)
    return kind(**{"learning_rate": 0.1, "wd": 0.1, "rescale_grad": 0.3, **changes})


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


@pytest.mark.parametrize("average", [*AVERAGES[:2], *exhaustive(*AVERAGES[2:])], ids=str)
@hypothesis.settings(max_examples=10)
@given(
    every=st.sampled_from([1, 2, 3]),
    clip=st.sampled_from([None, 0.05]),
    scale=st.sampled_from([None, 8.0]),
    calls=st.lists(
        st.tuples(st.sampled_from(WAYS), st.lists(st.sampled_from(NAMES), min_size=1, unique=True)),
        min_size=1,
        max_size=9,
    ),
)
@pytest.mark.filterwarnings("ignore:groups.* has no effect")
def test_each_weight_is_updated_as_by_an_updater_of_its_own(every, average, clip, scale, calls):
    settings = {"accumulate": every, "average": average, "clip_adaptive": clip}
    if scale is not None:
        settings["loss_scaler"] = LossScaler(init_scale=scale, dynamic=False)
    made, each, weights, expected = together(**settings), alone(**settings), arrays(0), arrays(0)
    for step, (way, names) in enumerate([*calls, *[(WAYS[0], NAMES)] * 6]):
        chosen = {name: weights[name] for name in names}
        train(made, each, chosen, expected, given_to, [step + 1], way)
    check_same(made, each, weights, expected)
    if average is not None:
        exact = weights["frozen.weight"].copy()
        with made.averaged():
            for name, own in each.items():
                with own.averaged():
                    assert weights[name].tobytes() == expected[name].tobytes()
            assert weights["frozen.weight"].tobytes() == exact.tobytes()
    assert frozen(weights) == frozen(expected)


def given_to(step):
    return {**arrays(step), "frozen.weight": None}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_is_updated_as_by_an_updater_of_its_own(form, way):
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


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(optimizer.Adam, Unscaled), (Unscaled, optimizer.Adam)])
@every_average
def test_rules_that_do_not_scale_gradients_take_scaled_ones(kinds, settings):
    """Beside such a group the factor of the other groups is the one that they have alone."""
    settings = {**settings, "loss_scaler": LossScaler(init_scale=10.0, dynamic=False)}
    main, other = (partial(kind, learning_rate=0.1) for kind in kinds)
    given = {"b": {"optimizer": other()}, "c": {"lr_mult": 0.5}}
    made = optimizer.Updater(main(), groups=given, **settings)
    makes = {"a": main, "b": other, "c": main}
    each = {name: optimizer.Updater(make(), **settings) for name, make in makes.items()}
    each["c"].optimizer.set_lr_mult({"c": 0.5})
    weights, expected = arrays(0, "abc"), arrays(0, "abc")
    for way in (WAYS[0], one_by_one):
        train(made, each, weights, expected, lambda step: arrays(step, "abc"), range(4), way)
    check_same(made, each, weights, expected)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (optimizer.Adam, ALL),
        (optimizer.Adam, {}),
        (partial(optimizer.CAME, fallback="adamw"), {"accumulate": 2}),
        (optimizer.Adam, TOGETHER[AVERAGES[3]]),
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
            infos.append(made.info)
        ends.append((everything(made, weights)[:2], frozen(made.averages), repr(infos)))
        assert [info.non_finite for info in infos if info.skipped] == [("head.weight",)]
    assert ends[0] == ends[1]


@every_average
def test_settings_may_change_between_calls(settings):
    """As for single weights; groups may come later and go."""
    made = optimizer.Updater(optimizer.Adam(learning_rate=0.1, wd=0.1, rescale_grad=0.3))
    each, weights, expected = alone(), arrays(0), arrays(0)

    def steps(first, names=NAMES):
        chosen = {name: weights[name] for name in names}
        train(made, each, chosen, expected, arrays, range(first, first + 4))

    steps(0, ["body.weight"])
    made.groups = groups()
    steps(4)
    for name, value in settings.items():
        for updater in (made, *each.values()):
            setattr(updater, name, value)
    steps(8)
    check_same(made, each, weights, expected)
    made.groups = dict(made.groups)
    steps(12)
    for updater in (made, *each.values()):
        updater.accumulate, updater.average, updater.clip_adaptive = 1, None, None
    steps(16)
    check_same(made, each, weights, expected)


def test_a_frozen_weight_has_neither_sum_nor_average():
    made, weights = together(**ALL), arrays(0)
    for step in range(4):
        call(made, given_to(step), weights)
    assert made.averages.keys() == made.states.keys() == set(TRAINED)
    assert "frozen.weight" not in made._windows.sums
    exact = weights["frozen.weight"].tobytes()
    with made.averaged(weights):  # which may name it
        assert weights["frozen.weight"].tobytes() == exact
        np.testing.assert_array_equal(weights["body.bias"], made.averages["body.bias"])
    other, words = {"other": np.ones((3, 2))}, "'other': the updater has no average"
    with pytest.raises(ValueError, match=words), made.averaged({**weights, **other}):
        pass


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
    made, each, weights, expected = together(**ALL), alone(**ALL), arrays(0), arrays(0)
    train(made, each, weights, expected, arrays, range(4))
    present = made.groups
    made.groups = {r"^body.weight": {"frozen": True}, **present}
    others = {name: own for name, own in each.items() if name != "body.weight"}
    train(made, others, weights, expected, arrays, range(4))
    exact = weights["body.weight"].copy()
    with made.averaged():
        assert weights["body.weight"].tobytes() == exact.tobytes()
        assert weights["body.bias"].tobytes() == made.averages["body.bias"].tobytes()
    made.groups = present
    train(made, each, weights, expected, arrays, range(4))
    check_same(made, each, weights, expected)


def test_patterns_match_names_of_accumulated_gradients():
    own = {"bias": {"wd_mult": 0.0}, "^head": {"lr_mult": 2.0}}
    made, weights = optimizer.Updater("sgd", groups=own, accumulate=3), arrays(0)
    for step in range(3):
        call(made, arrays(step), weights, one_by_one)


MIXED = "average cannot be combined with groups of ScheduleFreeSGD and Adam, as the former averages"
COUNTS = r"SWA\(start=1, every=1\) depends on the number of updates, and Test"
UNFIT = {
    ("adam", "schedulefreesgd"): (EMA(0.5), MIXED),
    ("schedulefreesgd", "adam"): (EMA(0.5), MIXED),
    ("adam", "test"): (SWA(), COUNTS),
}
"""Optimizers of an updater and of a group of it, and an average that they cannot have."""


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(("main", "other"), UNFIT)
def test_an_average_that_does_not_fit_all_groups_is_refused_and_changes_nothing(main, other):
    average, words = UNFIT[main, other]
    words, own = rf"groups\['\^b'\]: {words}", {"^b": {"optimizer": other}}
    made = optimizer.Updater(main, groups=own)
    call(made, arrays(1, "ab"), arrays(0, "ab"))
    averaging = optimizer.Updater(main, average=average)
    for error, refused in (
        (TypeError, lambda: optimizer.Updater(main, groups=own, average=average)),
        (TypeError, lambda: setattr(made, "average", average)),
        (TypeError, lambda: setattr(averaging, "groups", own)),
        (CheckpointError, lambda: averaging.load_states_dict(made.states_dict())),
        (CheckpointError, lambda: averaging.set_states(made.get_states(dump_optimizer=True))),
    ):
        with pytest.raises(error, match=words):
            refused()
    assert (made.average, averaging.groups, averaging.states) == (None, None, {})
    call(averaging, arrays(1, "ab"), arrays(0, "ab"))


def test_an_optimizer_that_does_not_fit_the_groups_is_not_taken():
    made, weights = together(**ALL), arrays(0)
    made.groups = {**groups(), "^embed": {"beta1": 0.5}}
    call(made, arrays(0), weights)
    before, own = everything(made, weights), made.optimizer
    with pytest.raises(TypeError, match="SGD does not take beta1"):
        made.optimizer = optimizer.SGD()
    assert made.optimizer is own
    assert everything(made, weights) == before
