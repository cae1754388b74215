"""Groups beside accumulate, average and clip_adaptive: each weight as by an updater of its own."""

import copy
import pickle
import warnings

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError
from helpers.cases import exhaustive, nightly

NAMES = ["embed.weight", "body.weight", "body.bias", "norm.scale", "head.weight", "frozen.weight"]
TRAINED = NAMES[:-1]
SHAPE = (3, 2)

AVERAGES = [
    *(None, EMA(0.9), EMA(0.9, warmup=True), SWA(start=2, every=2), Lookahead(k=2, alpha=0.3)),
]
ALL = {"accumulate": 2, "average": EMA(0.9), "clip_adaptive": 0.05}
SETTINGS = {
    "accumulate": {"accumulate": 2},
    "EMA": {"average": EMA(0.9)},
    "SWA": {"average": SWA(start=2, every=2)},
    "Lookahead": {"average": Lookahead(k=2, alpha=0.3)},
    "clip_adaptive": {"clip_adaptive": 0.05},
    "all": ALL,
    "all with SWA": {**ALL, "average": SWA(start=1, every=2)},
}
ALONE = ["accumulate", "EMA", "SWA", "clip_adaptive"]
"""Those that others have too."""
EACH = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
MOST = pytest.mark.parametrize(
    "settings",
    [
        SETTINGS["all"],
        *exhaustive(SETTINGS["all with SWA"], SETTINGS["Lookahead"]),
        *nightly(*(SETTINGS[name] for name in ALONE)),
    ],
    ids=["all", "all with SWA", "Lookahead", *ALONE],
)


@fastopt.rule(hyper=("lr",))
def unscaled(weight, grad, state, h):
    return weight - h.lr * grad, ()


class Unscaled(optimizer.Optimizer):
    """Its rule does not look at rescale_grad, so that gradients are multiplied before it."""

    rule = unscaled


def groups():
    return {
        r"bias$|norm": {"wd_mult": 0.0},
        r"^embed": {"lr_mult": 0.1, "beta1": 0.5},
        r"^frozen": {"frozen": True},
        r"^head": {"optimizer": optimizer.SGD(learning_rate=1.0, momentum=0.9)},
    }


def together(**settings):
    main = optimizer.Adam(learning_rate=0.1, wd=0.1, rescale_grad=0.3)
    return optimizer.Updater(main, groups=groups(), **settings)


def alone(**settings):
    """An updater for each weight, with the optimizer of its group."""
    common = {"rescale_grad": 0.3}
    made = {
        "embed.weight": optimizer.Adam(learning_rate=0.1, wd=0.1, beta1=0.5, **common),
        "body.weight": optimizer.Adam(learning_rate=0.1, wd=0.1, **common),
        "body.bias": optimizer.Adam(learning_rate=0.1, **common),
        "norm.scale": optimizer.Adam(learning_rate=0.1, **common),
        "head.weight": optimizer.SGD(learning_rate=1.0, momentum=0.9, **common),
    }
    made["embed.weight"].set_lr_mult({"embed.weight": 0.1})
    return {name: optimizer.Updater(own, **copy.deepcopy(settings)) for name, own in made.items()}


def arrays(seed, names=NAMES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=SHAPE).astype(dtype) for name in names}


def as_list(made, grads, weights):
    made([*weights], [grads[name] for name in weights], [*weights.values()])


def one_by_one(made, grads, weights):
    for name, weight in weights.items():
        made(name, grads[name], weight)


def nested(made, grads, weights):
    made.step({name: grads[name] for name in weights}, weights)


WAYS = [as_list, one_by_one, nested]


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def is_equal(made, each, weights, expected):
    """Weights, states, averages and counts are those of the updaters of single weights."""
    names = [name for name in each if name in weights]
    assert bits(weights) == bits(expected)
    for name in names:
        own = each[name]
        np.testing.assert_equal(made.states.get(name), own.states.get(name))
        np.testing.assert_equal(made.averages.get(name), own.averages.get(name))
        counts = [of.optimizer._index_update_count.get(name) for of in (made, own)]
        assert counts[0] == counts[1]
    assert made.states.keys() <= each.keys()


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
    calls = [*calls, *[(as_list, NAMES)] * 6]
    for step, (way, names) in enumerate(calls):
        grads = {**arrays(step + 1), "frozen.weight": None}
        way(made, grads, {name: weights[name] for name in names})
        for name in names:
            if name in each:
                each[name](name, grads[name], expected[name])
    is_equal(made, each, weights, expected)
    if average is not None:
        exact = weights["frozen.weight"].copy()
        with made.averaged():
            for name, own in each.items():
                with own.averaged():
                    assert weights[name].tobytes() == expected[name].tobytes()
            assert weights["frozen.weight"].tobytes() == exact.tobytes()
    assert bits(weights) == bits(expected)


def lazy_rows(rng, step):
    rows = [[0], [2, 0], [1], [0, 1, 2]][step % 4]
    return RowSparse(rng.normal(size=(len(rows), 2)).astype(np.float32), rows, SHAPE)


def mixed_rows(rng, step):
    grad = lazy_rows(rng, step)
    return grad.to_dense() if step % 3 == 2 else grad


def half_values(rng, step):
    return rng.normal(size=SHAPE).astype(np.float16)


KINDS = {
    "lazy rows": (lazy_rows, np.float32, {"lazy_update": True}),
    "rows and dense": (mixed_rows, np.float32, {"lazy_update": True}),
    "deferred decay": (lazy_rows, np.float32, {"lazy_update": True, "sparse_decay": "catch_up"}),
    "masters": (half_values, np.float16, {"multi_precision": True}),
    "split masters": (half_values, np.float16, {"multi_precision": True, "master": "split"}),
    "half": (half_values, np.float16, {"rounding": "stochastic"}),
}
KINDS_ = pytest.mark.parametrize(
    "kind",
    [
        *("lazy rows", "masters"),
        *exhaustive("rows and dense", "deferred decay", "half"),
    ],
)


@pytest.mark.slow("exhaustive")
@KINDS_
@MOST
def test_row_sparse_gradients_and_half_precision_in_one_group(kind, settings, rng):
    gradient, dtype, own = KINDS[kind]
    adamw = {"learning_rate": 0.1, "wd": 0.1}
    given = {"^x": dict(own), "^s": {"optimizer": optimizer.SGD(learning_rate=0.5)}}
    made = optimizer.Updater(optimizer.AdamW(**adamw), groups=given, **settings)
    each = {
        "x": optimizer.Updater(optimizer.AdamW(**adamw, **own), **settings),
        "y": optimizer.Updater(optimizer.AdamW(**adamw), **settings),
        "s": optimizer.Updater(optimizer.SGD(learning_rate=0.5), **settings),
    }
    weights = {**arrays(0, "x", dtype), **arrays(1, "ys")}
    expected, held = copy.deepcopy(weights), arrays(2, "y", np.float16)
    copies = {name: np.zeros(SHAPE, np.float16) for name in "ys"}
    for name, array in copies.items():
        made.set_copy(name, array)
    for step in range(9):
        grads = {"x": gradient(rng, step), **arrays(step, "ys")}
        as_list(made, grads, weights)
        for name, updater in each.items():
            updater(name, grads[name], expected[name])
    is_equal(made, each, weights, expected)
    for name, array in copies.items():
        assert array.tobytes() == weights[name].astype(np.float16).tobytes()
    if made.average is not None:
        with made.averaged(), each["x"].averaged():
            assert weights["x"].tobytes() == expected["x"].tobytes()
            held["y"][:] = made.averages["y"]
            assert copies["y"].tobytes() == held["y"].tobytes()
    made.flush("x")
    each["x"].flush("x")
    assert weights["x"].tobytes() == expected["x"].tobytes()


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("name", ["signum", *exhaustive("lamb", "sgld", "lars", "adadelta")])
@pytest.mark.parametrize(
    "settings", [ALL, *exhaustive(SETTINGS["Lookahead"])], ids=["all", "Lookahead"]
)
def test_rules_with_sums_and_noise_in_a_group(name, settings):
    def create():
        return optimizer.create(name, wd=0.1)

    made = optimizer.Updater(optimizer.Adam(), groups={"b": {"optimizer": create()}}, **settings)
    each = {"a": optimizer.Updater(optimizer.Adam(), **settings)}
    each["b"] = optimizer.Updater(create(), **settings)
    weights, expected = arrays(0, "ab"), arrays(0, "ab")
    for step in range(6):
        as_list(made, arrays(step, "ab"), weights)
        for index, updater in each.items():
            updater(index, arrays(step, "ab")[index], expected[index])
    is_equal(made, each, weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", Unscaled])
@MOST
def test_rules_that_do_not_scale_gradients_take_scaled_ones(name, settings):
    """Beside such a group the factor of the other groups is the one that they have alone."""
    scaler = {"loss_scaler": LossScaler(init_scale=10.0, dynamic=False)}

    def create(kind):
        kind = Unscaled if kind is Unscaled else optimizer.Adam
        return kind(learning_rate=0.1, rescale_grad=0.3)

    other = "adam" if name is Unscaled else Unscaled
    given = {"b": {"optimizer": create(other)}, "c": {"lr_mult": 0.5}}
    made = optimizer.Updater(create(name), groups=given, **settings, **scaler)
    each = {"a": optimizer.Updater(create(name), **settings, **scaler)}
    each["b"] = optimizer.Updater(create(other), **settings, **scaler)
    each["c"] = optimizer.Updater(create(name), **settings, **scaler)
    each["c"].optimizer.set_lr_mult({"c": 0.5})
    weights, expected = arrays(0, "abc"), arrays(0, "abc")
    for step in range(8):
        grads = arrays(step, "abc")
        if step < 6:
            as_list(made, grads, weights)
        else:
            one_by_one(made, grads, weights)
        for index, updater in each.items():
            updater(index, grads[index], expected[index])
    is_equal(made, each, weights, expected)


@pytest.mark.parametrize("scale", [None, 8.0])
@MOST
def test_the_norm_is_that_of_all_groups_together(scale, settings):
    """Groups that override nothing are no groups, whatever is clipped."""
    ends = []
    head = {"^head": {"optimizer": optimizer.Adam(learning_rate=0.1)}}
    for own in (None, {"bias|norm": {"lr_mult": 1.0}, "^embed": {"learning_rate": 0.1}, **head}):
        settings = copy.deepcopy(settings)
        if scale is not None:
            settings["loss_scaler"] = LossScaler(init_scale=scale)
        made = optimizer.Updater(
            optimizer.Adam(learning_rate=0.1), clip_global_norm=0.01, groups=own, **settings
        )
        weights, infos = arrays(0), []
        for step in range(9):
            grads = arrays(step)
            if step == 4:
                grads["head.weight"][0] = np.inf
            as_list(made, grads, weights)
            infos.append(made.info)
        states = {name: [array.tobytes() for array in own] for name, own in made.states.items()}
        scale_at_end = made.loss_scaler and made.loss_scaler.scale
        ends.append((bits(weights), bits(made.averages), states, repr(infos), scale_at_end))
        assert sum(info.skipped for info in infos) == 1
    assert ends[0] == ends[1]


# The same bits in all ways


@EACH
def test_settings_may_change_between_calls(settings):
    """As for single weights; groups may come later and go."""
    made = optimizer.Updater(optimizer.Adam(learning_rate=0.1, wd=0.1, rescale_grad=0.3))
    each, weights, expected = alone(), arrays(0), arrays(0)

    def steps(names, first):
        for step in range(first, first + 4):
            grads = arrays(step)
            as_list(made, grads, {name: weights[name] for name in names})
            for name in names:
                if name in each:
                    each[name](name, grads[name], expected[name])

    steps(["body.weight"], 0)
    made.groups = groups()
    steps(NAMES, 4)
    for name, value in settings.items():
        for updater in (made, *each.values()):
            setattr(updater, name, value)
    steps(NAMES, 8)
    is_equal(made, each, weights, expected)
    made.groups = dict(made.groups)
    steps(NAMES, 12)
    for updater in (made, *each.values()):
        updater.accumulate, updater.average, updater.clip_adaptive = 1, None, None
    steps(NAMES, 16)
    is_equal(made, each, weights, expected)


def everything(made, weights):
    """What a call may change."""
    parts = [
        made.optimizer,
        *(own["optimizer"] for own in made.groups.values() if "optimizer" in own),
    ]
    windows = made._windows
    sums = None if windows is None else (dict(windows.calls), windows.open_sums())
    states = [part.__getstate__() for part in parts]
    return copy.deepcopy((weights, dict(made.states), made.averages, sums, states))


# What is frozen


def test_a_frozen_weight_has_neither_sum_nor_average():
    made, weights = together(**ALL), arrays(0)
    for step in range(4):
        as_list(made, {**arrays(step), "frozen.weight": None}, weights)
    assert made.averages.keys() == made.states.keys() == set(TRAINED)
    assert "frozen.weight" not in made._windows.sums
    exact = bits(weights)["frozen.weight"]
    with made.averaged(weights):  # which may name it
        assert bits(weights)["frozen.weight"] == exact
        np.testing.assert_array_equal(weights["body.bias"], made.averages["body.bias"])
    other, words = {"other": np.ones(SHAPE)}, "'other': the updater has no average"
    with pytest.raises(ValueError, match=words), made.averaged({**weights, **other}):
        pass


def test_a_weight_that_is_frozen_later_keeps_its_value_and_its_average():
    made, each, weights, expected = together(**ALL), alone(**ALL), arrays(0), arrays(0)

    def steps(frozen):
        for step in range(4):
            as_list(made, arrays(step), weights)
            for name, updater in each.items():
                if name not in frozen:
                    updater(name, arrays(step)[name], expected[name])

    steps([])
    present = made.groups
    made.groups = {r"^body.weight": {"frozen": True}, **present}
    steps(["body.weight"])
    exact = weights["body.weight"].copy()
    with made.averaged():
        assert weights["body.weight"].tobytes() == exact.tobytes()
        assert weights["body.bias"].tobytes() == made.averages["body.bias"].tobytes()
    made.groups = present
    steps([])
    is_equal(made, each, weights, expected)


@pytest.mark.filterwarnings("error")
def test_patterns_match_names_of_accumulated_gradients():
    own = {"bias": {"wd_mult": 0.0}, "^head": {"lr_mult": 2.0}}
    made, weights = optimizer.Updater("sgd", groups=own, accumulate=3), arrays(0)
    for step in range(3):
        one_by_one(made, arrays(step), weights)


# Copies and checkpoints


def test_states_bring_groups_and_an_optimizer_that_present_groups_do_not_fit():
    own = {"^head": {"momentum": 0.5}}
    made = optimizer.Updater(optimizer.SGD(momentum=0.9), groups=own, **ALL)
    weights, other = arrays(0), together(**ALL)
    for step in range(3):
        as_list(made, arrays(step), weights)
    copies = copy.deepcopy(weights)
    other.set_states(made.get_states(dump_optimizer=True))
    for step in range(3, 6):
        as_list(made, arrays(step), weights)
        as_list(other, arrays(step), copies)
    assert bits(weights) == bits(copies)
    assert list(other.groups) == ["^head"]


def test_what_is_saved_inside_of_averaged_restores_the_weights(tmp_path):
    made, weights = together(average=EMA(0.5)), arrays(0)
    for step in range(3):
        as_list(made, arrays(step), weights)
    with made.averaged():
        made.save(tmp_path / "run.safetensors")
        copies = copy.deepcopy(weights)
    new = together(average=EMA(0.5))
    new.load(tmp_path / "run.safetensors")
    new.restore_weights({name: copies[name] for name in TRAINED})
    assert bits(copies) == bits(weights)


# What cannot be averaged together


def free():
    return optimizer.ScheduleFreeSGD(learning_rate=0.1)


MIXED = {
    "in a group": ("adam", free, "groups of ScheduleFreeSGD and Adam"),
    "in all but a group": (free, "adam", "groups of ScheduleFreeSGD and Adam"),
}


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(("main", "other", "words"), MIXED.values(), ids=MIXED)
def test_averages_beside_those_of_one_optimizer_are_one_error(main, other, words):
    main, other = (optimizer.create(x() if callable(x) else x) for x in (main, other))
    own = {"^b": {"optimizer": other}}
    words = rf"groups\['\^b'\]: average cannot be combined with {words}, as the former averages"
    with pytest.raises(TypeError, match=words):
        optimizer.Updater(main, groups=own, average=EMA(0.5))
    made, weights = optimizer.Updater(main, groups=own), arrays(0, "ab")
    with pytest.raises(TypeError, match=words):
        made.average = EMA(0.5)
    assert made.average is None
    as_list(made, arrays(1, "ab"), weights)
    averaging = optimizer.Updater(copy.deepcopy(main), average=EMA(0.5))
    with pytest.raises(TypeError, match=words):
        averaging.groups = own
    with pytest.raises(CheckpointError, match=words):
        averaging.load_states_dict(made.states_dict())
    with pytest.raises(CheckpointError, match=words):
        averaging.set_states(made.get_states(dump_optimizer=True))
    assert averaging.groups is None
    assert averaging.states == {}
    as_list(averaging, arrays(1, "ab"), arrays(0, "ab"))


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"clip_adaptive": 0.05}], ids=str)
def test_averages_of_an_optimizer_go_with_other_settings(settings):
    made = optimizer.Updater("adam", groups={"b": {"optimizer": free()}}, **settings)
    each = {"a": optimizer.Updater("adam", **settings)}
    each["b"] = optimizer.Updater(free(), **settings)
    weights, expected = arrays(0, "ab"), arrays(0, "ab")
    for step in range(6):
        as_list(made, arrays(step, "ab"), weights)
        for index, updater in each.items():
            updater(index, arrays(step, "ab")[index], expected[index])
    is_equal(made, each, weights, expected)
    with made.averaged(), each["b"].averaged():
        assert bits(weights) == bits(expected)


def test_an_optimizer_that_counts_in_its_own_way_takes_a_plain_ema_alone():
    own = {"^b": {"optimizer": optimizer.Test()}}
    words = r"groups\['\^b'\]: SWA\(start=1, every=1\) depends on the number of updates, and Test"
    made = optimizer.Updater("adam", groups=own, average=EMA(0.5))
    with pytest.raises(TypeError, match=words):
        made.average = SWA()
    assert made.average == EMA(0.5)
    weights = arrays(0, "ab")
    as_list(made, arrays(1, "ab"), weights)
    assert made.averages.keys() == {"a", "b"}


def test_an_optimizer_that_does_not_fit_the_groups_is_not_taken():
    made, weights = together(**ALL), arrays(0)
    for step in range(3):
        as_list(made, arrays(step), weights)
    before, own = everything(made, weights), made.optimizer
    with pytest.raises(TypeError, match="SGD does not take beta1"):
        made.optimizer = optimizer.SGD()
    assert made.optimizer is own
    np.testing.assert_equal(everything(made, weights), before)
    other, copies = pickle.loads(pickle.dumps(made)), copy.deepcopy(weights)
    as_list(made, arrays(4), weights)
    as_list(other, arrays(4), copies)
    assert bits(weights) == bits(copies)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.optimizer = optimizer.Adam(learning_rate=0.1)
        as_list(made, arrays(5), weights)
