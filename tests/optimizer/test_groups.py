"""Groups: each weight is updated as by an updater of its own, in one call for all."""

import builtins
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import EMA, SWA, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.lr_scheduler import FactorScheduler
from helpers.groups import WAYS, arrays, call, check_same, groups, train
from helpers.matrix_rules import FORMS
from helpers.resuming import resumed
from helpers.settings import every_setting
from helpers.tensor_lists import as_list, everything, frozen
from helpers.users import InNumPy

FROZEN = {"^frozen": {"frozen": True}}


def updater(name="adam", own=None, **options):
    made = optimizer.create(name, learning_rate=0.1, wd=0.1)
    return optimizer.Updater(made, groups=groups() if own is None else own, **options)


def trained(made, *seeds):
    """The updater after steps of all weights, and the weights; a frozen one needs no gradient."""
    weights = arrays(0)
    for seed in seeds:
        call(made, {**arrays(seed), "frozen.weight": None}, weights)
    return made, weights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "the gradient of another"])
@pytest.mark.parametrize("kind", [optimizer.SGD, optimizer.Muon])
def test_weights_of_two_groups_may_share_memory(kind, tied):
    """In list order."""
    ends = []
    for way in WAYS[:2]:
        first, second, *grads = arrays(0, "abcd").values()
        weights, grads = ([first, first], grads) if tied else ([first, second], [grads[0], first])
        made = updater(own={"^b": {"optimizer": kind(learning_rate=0.5)}})
        for _ in range(3):
            way(made, ["a", "b"], grads, weights)
        ends.append(frozen(weights))
    assert ends[0] == ends[1]


def test_a_frozen_weight_has_no_state_and_no_count():
    made, weight = updater(), np.ones(2)
    weight.flags.writeable = False
    for gradient in (None, np.ones(2), np.ones(5), "anything"):
        made("frozen.a", gradient, weight)
        assert not made.info.stepped
        made(["frozen.a", "frozen.b"], [gradient, gradient], [weight, None])
        made.step({"frozen": {"a": gradient}}, {"frozen": {"a": weight}})
    assert weight.tolist() == [1, 1]
    assert made.states == {}
    assert made.optimizer._index_update_count == {}


def test_a_frozen_weight_may_share_memory():
    made, weight = updater(), np.ones(2)
    made(["frozen", "w"], [weight, np.ones(2)], [weight[:1], weight])
    assert weight.round(6).tolist() == [0.9, 0.9]


def test_the_first_match_wins_of_the_name_that_the_optimizer_has_or_the_index():
    own = {
        "^head.bias": {},
        "bias": {"lr_mult": 0.0},
        "^head": {"lr_mult": 2.0},
        "^7$": {"lr": 4.0},
    }
    names = {0: "head.bias", 1: "a.bias", 2: "head.weight", 3: "a.weight"}
    sgd = optimizer.SGD(learning_rate=1.0, param_idx2name=names)

    def rename():
        sgd.idx2name = dict(enumerate([*names.values()][::-1]))

    steps = [(lambda: None, [1, 0, 2, 1, 4]), (rename, [1, 2, 0, 1, 4])]
    follow(steps, optimizer.Updater(sgd, groups=own), [0, 1, 2, 3, 7])


def follow(steps, updater, names):
    """Assert what each weight loses to a gradient of 1 after each change of settings."""
    for change, expected in steps:
        change()
        weights = {name: np.zeros(1) for name in names}
        call(updater, dict.fromkeys(names, np.ones(1)), weights)
        assert [-weight.item() for weight in weights.values()] == expected


def test_multipliers_of_a_group_replace_those_of_the_table():
    sgd = optimizer.SGD(learning_rate=1.0)
    made = optimizer.Updater(sgd, groups={"b": {"lr_mult": 0.5}, "c": {"wd": 0.0}})
    steps = [
        (lambda: None, [1, 0.5, 1]),
        (lambda: sgd.set_lr_mult({"a": 2.0, "b": 3.0, "c": 4.0}), [2, 0.5, 4]),
        (lambda: sgd.lr_mult.update(c=5.0), [2, 0.5, 5]),
        (lambda: setattr(made, "groups", {"a": {"lr_mult": 7.0}}), [7, 3, 5]),
        (lambda: setattr(made, "groups", None), [2, 3, 5]),
    ]
    follow(steps, made, "abc")


def test_what_a_group_does_not_override_follows_the_optimizer():
    other, sgd = optimizer.SGD(learning_rate=3.0), optimizer.SGD(learning_rate=1.0)
    own = {"b": {"wd": 0.0}, "c": {"learning_rate": 0.5}, "d": {"optimizer": other}}
    made = optimizer.Updater(sgd, groups=own)

    def more():
        for k in range(40):  # more counts than there was room for
            made(f"a{k}", np.ones(1), np.ones(1))

    steps = [
        (lambda: None, [1, 1, 0.5, 3]),
        (lambda: sgd.set_learning_rate(2.0), [2, 2, 0.5, 3]),
        (lambda: setattr(sgd, "rescale_grad", 0.5), [1, 1, 0.25, 1.5]),
        (lambda: setattr(other, "lr", 4.0), [1, 1, 0.25, 2]),
        (lambda: setattr(sgd, "maximize", True), [-1, -1, -0.25, 2]),
        (lambda: setattr(sgd, "_index_update_count", {}), [-1, -1, -0.25, 2]),
        (more, [-1, -1, -0.25, 2]),
    ]
    follow(steps, made, "abcd")
    assert [sgd._index_update_count[name] for name in "abcd"] == [2] * 4
    made.optimizer = optimizer.SGD(learning_rate=10.0)
    follow([(lambda: None, [10, 10, 0.5, 4])], made, "abcd")
    assert made.optimizer._index_update_count == dict.fromkeys("abcd", 1)


def test_a_schedule_of_the_optimizer_serves_its_groups():
    own = {"b": {"lr_mult": 0.5}, "c": {"lr_scheduler": None, "learning_rate": 7.0}}
    own["d"] = {"lr_scheduler": FactorScheduler(step=1, factor=0.5, base_lr=8.0)}
    made = optimizer.Updater(optimizer.SGD(lr_scheduler=lambda n: float(n)), groups=own)
    follow([(lambda: None, [1, 0.5, 7, 8]), (lambda: None, [2, 1, 7, 4])], made, "abcd")
    with pytest.raises(ValueError, match=r"groups\['b'\]: learning_rate has no effect with"):
        made.groups = {"b": {"learning_rate": 1.0}}
    made = optimizer.Updater(optimizer.SGD(), groups={"b": {"learning_rate": 1.0}})
    made.optimizer.lr_scheduler = lambda n: 1.0
    weight = np.zeros(1)
    with pytest.raises(ValueError, match="learning_rate has no effect with an lr_scheduler"):
        made("b", np.ones(1), weight)
    assert weight.item() == 0


def test_an_optimizer_of_a_group_stays_the_same_object(tmp_path):
    head = optimizer.SGD(learning_rate=5.0, momentum=0.5)
    new = updater(own={"^head": {"optimizer": head}})
    other = resumed("save", trained(updater(), 0)[0], new, tmp_path)
    assert other.groups["^head"]["optimizer"] is head
    assert (head.lr, head.momentum) == (1.0, 0.9)


def test_a_file_without_groups_leaves_those_of_the_updater(tmp_path):
    made, _ = trained(optimizer.Updater(optimizer.Adam(learning_rate=0.1), groups=FROZEN), 0)
    made.groups = None
    assert "groups" not in made.states_dict()
    other = resumed("save", made, updater(own={"bias": {"frozen": True}}), tmp_path)
    assert list(other.groups) == ["bias"]


def test_a_schedule_that_cannot_be_saved_is_that_of_the_present_group():
    own = {"b": {"lr_scheduler": lambda n: 0.25}}
    made = optimizer.Updater(optimizer.SGD(learning_rate=1.0), groups=own)
    made("b", np.ones(1), np.ones(1))
    states = made.states_dict()
    with pytest.raises(CheckpointError, match=r"groups\['b'\]: its lr_scheduler was not saved"):
        optimizer.Updater(optimizer.SGD()).load_states_dict(states)
    other = optimizer.Updater(optimizer.SGD(), groups=own)
    other.load_states_dict(states)
    follow([(lambda: None, [0.25])], other, "b")


BAD_FILES = {
    "its groups must be dicts by pattern": {"a": 3},
    "does not take momentun": {"a": {"momentun": 1.0}},
    "beta1 must be a finite number": {"a": {"beta1": 2.0}},
    "class Un is not": {"a": {"class": "Un", "attributes": {"lr_scheduler": None}}},
    "no attributes of SGD": {"a": {"class": "SGD"}},
    "not a regular expression": {"(": {}},
    "optimizer must be an Optimizer": {"w": {"optimizer": None}},
}


@pytest.mark.parametrize("words", BAD_FILES)
def test_damaged_groups_are_refused_and_change_nothing(words):
    made, _ = trained(updater(), 0)
    other, weights = trained(updater(own={**FROZEN, "^head": {"optimizer": optimizer.SGD()}}), 0)
    before = everything(other, weights)
    with pytest.raises(CheckpointError, match=words):
        other.load_states_dict({**made.states_dict(), "groups": BAD_FILES[words]})
    assert everything(other, weights) == before
    call(other, arrays(1), weights)
    assert other.optimizer._index_update_count["head.weight"] == 2


def constant(update):
    return 1.0


MISTAKES = [
    (3, "TypeError: groups must map patterns to .*wd_mult.*, got 3"),
    ([{"params": [], "lr": 1.0}], "TypeError: such as .*wd_mult.*, got"),  # groups of torch
    ({"a": 0.5}, r"TypeError: groups\['a'\] must be a dict of hyper-parameters"),
    ({3: {}}, "TypeError: regular expressions as keys, got 3"),
    ({"a(": {}}, r"ValueError: groups\['a\('\] is not a regular expression: miss"),
    ({"a": {"beta3": 1}}, "TypeError: Adam does not take beta3; did you mean beta"),
    ({"a": {"lr_mul": 1}}, "TypeError: did you mean lr_mult"),
    ({"a": {"epss": 1}}, "TypeError: does not take epss; did you mean eps"),
    ({"a": {"momentum": 0.9}}, "TypeError: does not take momentum; did you mean beta1"),
    ({"a": {"beta1": 2}}, r"ValueError: groups\['a'\]: beta1 must be .* below 1"),
    ({"a": {"wd": "x"}}, r"TypeError: groups\['a'\]: wd must be a number, got 'x'"),
    ({"a": {"wd_mult": np.nan}}, r"ValueError: groups\['a'\]: wd_mult must be a finite"),
    ({"a": {"frozen": 1}}, r"TypeError: groups\['a'\]: frozen must be True or False"),
    ({"a": {"frozen": True, "wd": 0}}, "ValueError: cannot have wd too"),
    ({"a": {"lr": 1.0, "learning_rate": 1.0}}, "TypeError: not both"),
    ({"a": {"rescale_grad": 2}}, "TypeError: is the same in all groups"),
    ({"a": {"lr": constant, "lr_scheduler": constant}}, "TypeError: and lr_scheduler another"),
    (
        {"a": {"optimizer": "adma"}},
        r"ValueError: 'a'\]: .* 'adma'; did you mean 'adam'\? The names",
    ),
    ({"a": {"optimizer": optimizer.SGD}}, "TypeError: must be an Optimizer, got <class"),
    ({"a": {"params": [3]}}, "TypeError: does not take params; weights go to each call"),
    ({"a": {"optimizer": optimizer.SGD(), "wd": 0.1}}, "ValueError: pass wd to that one"),
    ({"a": {"optimizer": optimizer.LBSGD()}}, "TypeError: LBSGD accumulates"),
    ({"a": {"sparse_decay": "catch_up"}}, r"ValueError: groups\['a'\]: .*='catch_up' needs"),
]


SCHEDULED = FactorScheduler(step=1, factor=0.5, base_lr=0.3)
SPELLINGS = [
    ({"lr": SCHEDULED}, {"lr_scheduler": SCHEDULED}),
    ({"learning_rate": SCHEDULED}, {"lr_scheduler": SCHEDULED}),
    ({"optimizer": "SGD"}, {"optimizer": optimizer.SGD()}),
]


@pytest.mark.parametrize(("spelled", "plain"), SPELLINGS, ids=str)
def test_a_group_may_name_its_optimizer_and_give_its_schedule_as_a_rate(spelled, plain, tmp_path):
    made, weights = trained(updater(own=groups() | {"^head": spelled}), 0, 1, 2)
    assert frozen(weights) == frozen(trained(updater(own=groups() | {"^head": plain}), 0, 1, 2)[1])
    made = resumed("save", made, updater(own=groups() | {"^head": spelled}), tmp_path)
    assert made.groups["^head"].keys() == plain.keys()


def test_representations_show_groups_without_addresses():
    made = updater(own={"^head": {"lr": lambda n: 0.1}, "b": {"optimizer": optimizer.SGD()}})
    assert "groups={'^head': {'lr_scheduler': <lambda>}, 'b': {'optimizer': SGD(" in repr(made)
    of_head = made.parameters.groups.groups[0].optimizer
    assert repr(of_head) == "Adam(wd=0.1, lr_scheduler=<lambda>)"


@pytest.mark.parametrize(("own", "error"), MISTAKES)
def test_mistakes_are_reported_at_construction(own, error):
    kind, _, words = error.partition(": ")
    made = updater()
    before = dict(made.groups)
    for take in (lambda: updater(own=own), lambda: setattr(made, "groups", own)):
        with pytest.raises(getattr(builtins, kind), match=words):
            take()
    assert dict(made.groups) == before


def test_groups_are_read_only():
    made = updater()
    with pytest.raises(TypeError, match="groups are read-only, and"):
        made.groups["bias$|norm"]["wd_mult"] = 1.0


def test_a_pattern_that_matches_nothing_warns_once():
    made = updater(own={"bais$": {"wd_mult": 0.0}, "w": {}, "weight": {"wd": 0.0}})
    with pytest.warns(UserWarning, match="has no effect") as caught:
        call(made, arrays(1), weights := arrays(0))
    call(made, arrays(2), weights)
    assert [str(warning.message) for warning in caught] == [
        "groups['bais$'] has no effect: no parameter has a name that it matches",
        "groups['weight'] has no effect: patterns before it match the same names",
    ]


def test_a_pattern_may_match_a_name_that_comes_later():
    for accumulate, names in ((1, {0: "a_weight", "b_bias": "b_bias"}), (3, {})):
        sgd = optimizer.SGD(learning_rate=0.1, param_idx2name=names)
        made = optimizer.Updater(sgd, groups={"bias": {"wd_mult": 0.0}}, accumulate=accumulate)
        for index in (0, "b_bias", 0):
            made(index, np.ones(1), np.ones(1))


def test_a_frozen_weight_needs_no_gradient():
    """Not even a key, in this updater alone."""
    sgd = optimizer.SGD(learning_rate=1.0)
    frozen = optimizer.Updater(sgd, groups={"mask$": {"frozen": True}})
    weights = {"layer": {"mask": np.ones(2), "scale": np.ones(2)}, "norm.mask": np.ones(1)}
    grads = {"layer": {"scale": np.ones(2)}}
    frozen.step(grads, weights)
    weights = frozen.updated(grads, weights)
    assert (weights["layer"]["scale"] == -1).all()
    assert (weights["layer"]["mask"] == 1).all()
    with pytest.raises(ValueError, match="mask' has no gradient"):
        optimizer.Updater(optimizer.SGD()).step(grads, weights)
    with pytest.raises(ValueError, match=r"weight 'layer\.scale' has no gradient"):
        frozen.step({"layer": {"mask": np.ones(2)}}, weights)


# As by an updater for each weight


ALL = {"accumulate": 2, "average": EMA(0.9), "clip_adaptive": 0.05}


def make(form, **changes):
    kind = FORMS.get(form, optimizer.Adam)
    return kind(learning_rate=0.1, rescale_grad=0.3, **{"wd": 0.1, **changes})


def alone(form):
    """An updater for each weight, with the optimizer of its group."""
    made = {
        "embed.weight": make(form, clip_gradient=0.3),
        "body.weight": make(form),
        "body.bias": make(form, wd=0.0),
        "norm.scale": make(form, wd=0.0),
        "head.weight": optimizer.SGD(learning_rate=1.0, momentum=0.9, rescale_grad=0.3),
    }
    made["embed.weight"].set_lr_mult({"embed.weight": 0.1})
    return {name: optimizer.Updater(own) for name, own in made.items()}


def given_to(step):
    return {**arrays(step), "frozen.weight": None}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("form", ["adam", *FORMS])
def test_each_weight_is_updated_as_by_an_updater_of_its_own(form, way):
    made, each = optimizer.Updater(make(form), groups=groups()), alone(form)
    weights, expected = arrays(0), arrays(0)
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
        with pytest.warns(UserWarning, match=r"gradients of .'a'. waited .* call finish"):
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
