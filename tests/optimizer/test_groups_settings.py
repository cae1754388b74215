"""Groups beside other settings and of optimizers of matrices: as by an updater for each weight."""

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
from fastopt.lr_scheduler import FactorScheduler
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive
from helpers.groups import NAMES, WAYS, arrays, call, check_same, groups, train
from helpers.matrix_rules import F32, FORMS
from helpers.settings import every_setting
from helpers.tensor_lists import as_list, everything, frozen, one_by_one
from helpers.users import InNumPy

AVERAGES = None, EMA(0.9), EMA(0.9, warmup=True), SWA(start=2, every=2), Lookahead(k=2, alpha=0.3)
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
        with made.averaged(weights):  # which may name a frozen one
            for name, own in each.items():
                with own.averaged():
                    assert weights[name].tobytes() == expected[name].tobytes()
            assert weights["frozen.weight"].tobytes() == expected["frozen.weight"].tobytes()
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
    with made.averaged():
        assert frozen((weights["body.bias"], made.averages["body.bias"])) == kept
        assert weights["body.weight"].tobytes() == made.averages["body.weight"].tobytes()
    made.groups = None
    call(made, arrays(3), weights)
    assert frozen(weights["body.bias"]) != kept[0]


def test_patterns_match_names_of_accumulated_gradients():
    own = {"bias": {"wd_mult": 0.0}, "^head": {"lr_mult": 2.0}}
    made, weights = optimizer.Updater("sgd", groups=own, accumulate=3), arrays(0)
    for step in range(3):
        call(made, arrays(step), weights, one_by_one)


UNFIT = {
    ("adam", "schedulefreesgd"): (EMA(0.5), "groups of ScheduleFreeSGD and Adam, as the former"),
    ("schedulefreesgd", "adam"): (EMA(0.5), "groups of ScheduleFreeSGD and Adam, as the former"),
    ("adam", "test"): (SWA(), r"SWA\(.*\) depends on the number of updates, and Test"),
}
"""Optimizers of an updater and of a group of it, and an average that they cannot have."""


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(("main", "other"), UNFIT)
def test_an_average_that_does_not_fit_all_groups_is_refused_and_changes_nothing(main, other):
    average, words = UNFIT[main, other]
    own = {"^b": {"optimizer": other}}
    made, averaging = optimizer.Updater(main, groups=own), optimizer.Updater(main, average=average)
    call(made, arrays(1, "ab"), arrays(0, "ab"))
    for refused in (
        lambda: optimizer.Updater(main, groups=own, average=average),
        lambda: setattr(made, "average", average),
        lambda: setattr(averaging, "groups", own),
        lambda: averaging.load_states_dict(made.states_dict()),
        lambda: averaging.set_states(made.get_states(dump_optimizer=True)),
    ):
        with pytest.raises((TypeError, CheckpointError), match=rf"groups\['\^b'\]: .*{words}"):
            refused()
    assert (made.average, averaging.groups, averaging.states) == (None, None, {})


def test_an_optimizer_that_does_not_fit_the_groups_is_not_taken():
    made = optimizer.Updater("adam", groups={"^embed": {"beta1": 0.5}})
    with pytest.raises(TypeError, match="SGD does not take beta1"):
        made.optimizer = optimizer.SGD()
    assert isinstance(made.optimizer, optimizer.Adam)


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


def test_masters_copies_and_rows_of_groups():
    own = {"^rows": {"optimizer": optimizer.Adam(learning_rate=0.1, lazy_update=True)}}
    own["^half"] = {"optimizer": optimizer.SGD(learning_rate=0.1, multi_precision=True)}
    updater = fastopt.Updater(muon(multi_precision=True), groups=own)
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
