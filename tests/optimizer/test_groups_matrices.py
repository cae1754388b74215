"""Groups of optimizers of matrices, and groups with these beside optimizers with rules."""

import copy
import pickle

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import FactorScheduler
from fastopt.sparse import RowSparse
from helpers.matrix_rules import F32, FORMS
from helpers.resuming import WAYS, resumed

SHAPES = {
    "body.weight": (4, 6),
    "body.bias": (5,),
    "head.weight": (3, 2),
    "embed.weight": (6, 2),
    "slow.weight": (2, 2),
    "frozen.weight": (2, 3),
}
EACH = {
    "body.weight": {},
    "body.bias": {"wd": 0.0},
    "head.weight": {"lr": 0.01, "clip_gradient": 0.3},
    "slow.weight": {"lr": 0.05, "wd": 0.05},
}
"""Arguments that an optimizer of each weight alone has."""


def groups():
    return {
        "bias$": {"wd": 0.0},
        "^head": {"lr": 0.01, "clip_gradient": 0.3},
        "^slow": {"lr_mult": 0.5, "wd_mult": 0.5},
        "^embed": {"optimizer": optimizer.Adam(learning_rate=0.2)},
        "^frozen": {"frozen": True},
    }


def make(form, **options):
    return FORMS[form](**{"lr": 0.1, "wd": 0.1, "fallback": "adamw", **options})


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(F32) for name, shape in SHAPES.items()}


def as_list(updater, grads, weights):
    updater([*weights], [grads[name] for name in weights], [*weights.values()])


def one_by_one(updater, grads, weights):
    for name, weight in weights.items():
        updater(name, grads[name], weight)


def bits(weights):
    return {name: weight.tobytes() for name, weight in weights.items()}


def trained(updater, way=as_list, steps=range(5), weights=None):
    weights = arrays(99) if weights is None else weights
    for step in steps:
        way(updater, {**arrays(step), "frozen.weight": None}, weights)
    return weights


def alone(form, steps=range(5), **settings):
    """Weights after updates by an updater for each of them."""
    weights = arrays(99)
    each = {name: fastopt.Updater(make(form, **own), **settings) for name, own in EACH.items()}
    each["embed.weight"] = fastopt.Updater(optimizer.Adam(learning_rate=0.2), **settings)
    for step in steps:
        for name, updater in each.items():
            updater(name, arrays(step)[name], weights[name])
    return weights


@pytest.mark.parametrize("way", [as_list, one_by_one])
@pytest.mark.parametrize("form", FORMS)
def test_each_group_is_updated_as_by_an_updater_of_its_own(form, way):
    updater = fastopt.Updater(make(form), groups=groups())
    weights = trained(updater, way)
    assert bits(weights) == bits(alone(form))
    assert updater.optimizer._index_update_count == dict.fromkeys([*SHAPES][:-1], 5)
    assert updater.optimizer.num_update == 5
    assert updater.states.keys() == {*SHAPES} - {"frozen.weight"}


@pytest.mark.parametrize("form", ["muon", "adammini", "galore"])
def test_an_optimizer_of_matrices_may_be_that_of_a_group(form):
    """In list order: a tied weight is updated by both."""
    ends = []
    for way in (as_list, one_by_one):
        own = {"^(head|slow)": {"optimizer": make(form)}, "^frozen": {"frozen": True}}
        updater = fastopt.Updater(optimizer.Adam(learning_rate=0.1), groups=own)
        weights = arrays(99)
        weights["body.weight"] = weights["head.weight"]
        for step in range(5):
            grads = {**arrays(step), "frozen.weight": None}
            grads["body.weight"] = grads["body.weight"].reshape(-1)[:6].reshape(3, 2)
            way(updater, grads, weights)
        ends.append((bits(weights), updater.optimizer.num_update))
    assert ends[0] == ends[1]
    other, slow = fastopt.Updater(make(form)), arrays(99)["slow.weight"]
    for step in range(5):
        other("slow.weight", arrays(step)["slow.weight"], slow)
    assert slow.tobytes() == weights["slow.weight"].tobytes()


def test_an_update_in_python_has_groups_too():
    class Plain(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            self._update_count(index)
            weight -= self._get_lr(index) * grad

    own = {"b": {"lr_mult": 0.5}, "c": {"lr": 3.0}, "d": {"optimizer": "sgd"}}
    updater, weights = fastopt.Updater(Plain(lr=1.0), groups=own), [np.zeros(1) for _ in "abcd"]
    updater(list("abcd"), [np.ones(1)] * 4, weights)
    assert [weight.item() for weight in weights] == [-1, -0.5, -3, -0.01]


@pytest.mark.parametrize("way", [as_list, one_by_one])
def test_the_norm_covers_all_groups_and_gradients_accumulate(way):
    settings = {"clip_global_norm": 0.5, "accumulate": 2}
    updater = fastopt.Updater(
        make("came"), groups=groups(), loss_scaler=LossScaler(init_scale=8.0), **settings
    )
    weights, expected = arrays(99), arrays(99)
    own = {pattern: given for pattern, given in groups().items() if pattern != "^frozen"}
    plain = fastopt.Updater(make("came"), groups=own)
    del expected["frozen.weight"]
    for step in range(0, 6, 2):
        pairs = [arrays(step), arrays(step + 1)]
        for grads in pairs:
            way(updater, {**{k: 8 * g for k, g in grads.items()}, "frozen.weight": None}, weights)
        means = {k: (pairs[0][k] + pairs[1][k]) / 2 for k in expected}
        norm = np.sqrt(sum(np.square(g, dtype=float).sum() for g in means.values()))
        for name, grad in means.items():
            own = np.linalg.norm(grad.astype(float)) if way is one_by_one else norm
            plain(name, grad * F32(min(1, 0.5 / own)), expected[name])
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, rtol=2e-5, atol=2e-6)
    before = bits(weights)
    bad = {**arrays(0), "head.weight": np.full((3, 2), np.inf, F32), "frozen.weight": None}
    updater.accumulate = 1
    as_list(updater, bad, weights)
    assert updater.info.non_finite == ("head.weight",)
    assert bits(weights) == before


@pytest.mark.parametrize("fallback", ["adamw", "nadam", None])
def test_a_fallback_takes_what_its_group_overrides(fallback):
    """An object of the user has the multipliers of the group, and what it overrides."""
    made = optimizer.AdamW(learning_rate=0.2, wd=0.3) if fallback is None else fallback
    own = {"^a": {"wd": 0.0}, "^b": {"wd_mult": 0.5}, "^c": {"lr": 0.01}, "^d": {"momentum": 0.5}}
    updater = fastopt.Updater(make("muon", fallback=made), groups=own)
    other = {} if fallback else {"lr": 0.2, "wd": 0.3}
    lr, wd = other.get("lr", 0.1), other.get("wd", 0.1)
    changes = {"a": {"wd": 0.0}, "b": {"wd": wd / 2}, "c": {"lr": 0.01}, "d": {}, "e": {}}
    name = fallback or "adamw"
    each = {
        k: fastopt.Updater(optimizer.create(name, **{"lr": lr, "wd": wd, **c}))
        for k, c in changes.items()
    }
    weights, expected = ({k: np.ones(3) for k in changes} for _ in "ab")
    for step in range(4):
        if step == 2:  # the user's object is followed
            target = made if fallback is None else updater.optimizer
            target.clip_gradient = 0.1
            for k in each:
                each[k].optimizer.clip_gradient = 0.1
        grads = {k: np.array([1.0, -2.0, step]) for k in changes}
        as_list(updater, grads, weights)
        for k, one in each.items():
            one(k, grads[k], expected[k])
    np.testing.assert_equal(weights, expected)


def test_a_schedule_of_the_fallback_gives_way_to_the_rate_of_a_group():
    made = optimizer.SGD(lr_scheduler=FactorScheduler(step=1, factor=0.5, base_lr=1.0))
    own = {"a": {"lr": 0.25}, "b": {"lr_scheduler": lambda count: 2.0}}
    updater = fastopt.Updater(make("muon", fallback=made, wd=0.0), groups=own)
    weights = {k: np.zeros(1) for k in "abc"}
    as_list(updater, {k: np.ones(1) for k in "abc"}, weights)
    assert [weight.item() for weight in weights.values()] == [-0.25, -2.0, -1.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["muon", "kron"])
def test_a_run_continues_from_all_kinds_of_states(form, way, tmp_path):
    updater = fastopt.Updater(make(form), groups=groups())
    weights = trained(updater)
    other = resumed(way, updater, fastopt.Updater(make(form, lr=3.0), groups=groups()), tmp_path)
    copies = copy.deepcopy(weights)
    trained(updater, steps=range(5, 9), weights=weights)
    trained(other, steps=range(5, 9), weights=copies)
    assert bits(copies) == bits(weights)


@pytest.mark.parametrize("form", ["adammini", "shampoo"])
def test_a_reset_starts_again(form):
    fallback = optimizer.Nadam(learning_rate=0.1, per_parameter=True)
    updater = fastopt.Updater(make(form, fallback=fallback, fallback_for="head"), groups=groups())
    first = bits(trained(updater))
    updater.reset()
    assert updater.optimizer.num_update == 0
    assert bits(trained(updater)) == first


def test_masters_copies_and_rows_of_groups():
    own = {"^rows": {"optimizer": optimizer.Adam(learning_rate=0.1, lazy_update=True)}}
    own["^half"] = {"optimizer": optimizer.SGD(learning_rate=0.1, multi_precision=True)}
    updater = fastopt.Updater(make("muon", multi_precision=True), groups=own)
    weights = {
        "body": np.ones((2, 2), np.float16),
        "rows": np.ones((3, 2), F32),
        "half": np.ones((2, 2), np.float16),
    }
    copied = np.zeros((3, 2), np.float16)
    updater.set_copy("rows", copied)
    grads = {name: np.full(weight.shape, 1e-4, weight.dtype) for name, weight in weights.items()}
    grads["rows"] = RowSparse(np.ones((1, 2), F32), [1], (3, 2))
    for _ in range(3):
        as_list(updater, grads, weights)
    assert updater.states["half"][1].dtype == updater.states["body"][0].dtype == F32
    np.testing.assert_allclose(updater.states["half"][1], 1 - 3e-5, rtol=1e-6)
    np.testing.assert_array_equal(copied, weights["rows"].astype(np.float16))
    assert weights["rows"][0].tolist() == [1, 1]
    assert weights["rows"][1, 0] < 0.8


WRONG = {
    "shape": ("head.weight", np.ones((2, 2), F32), "shape"),
    "of the other optimizer": ("embed.weight", np.ones(3, F32), "shape"),
    "rows": ("slow.weight", RowSparse(np.ones((1, 2), F32), [0], (2, 2)), "takes dense gradients"),
}


@pytest.mark.parametrize(("name", "grad", "words"), WRONG.values(), ids=WRONG)
def test_a_call_that_fails_changes_nothing(name, grad, words):
    updater = fastopt.Updater(make("soap"), groups=groups())
    weights = trained(updater)
    state = updater.optimizer.__getstate__()
    before = copy.deepcopy((bits(weights), dict(updater.states), state))
    with pytest.raises((TypeError, ValueError), match=words):
        as_list(updater, {**arrays(0), name: grad, "frozen.weight": None}, weights)
    now = bits(weights), dict(updater.states), updater.optimizer.__getstate__()
    np.testing.assert_equal(now, before)


def test_what_does_not_fit_is_refused_at_construction():
    for own, words in (
        ({"a": {"momentun": 0.5}}, "did you mean momentum"),
        ({"a": {"momentum": 2.0}}, r"groups\['a'\]: momentum must be"),
        ({"a": {"optimizer": optimizer.LBSGD()}}, "LBSGD accumulates"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            fastopt.Updater(make("muon"), groups=own)
    words = r"groups\['a'\]: average is computed in the pass of a rule, and Muon overrides"
    with pytest.raises(TypeError, match=words):
        fastopt.Updater("adam", groups={"a": {"optimizer": "muon"}}, average=fastopt.EMA(0.5))


def test_updaters_with_groups_are_copied():
    updater = fastopt.Updater(make("came"), groups=groups())
    weights = trained(updater)
    for other in (copy.deepcopy(updater), pickle.loads(pickle.dumps(updater))):
        copies = trained(other, steps=range(5, 8), weights=copy.deepcopy(weights))
    trained(updater, steps=range(5, 8), weights=weights)
    assert bits(weights) == bits(copies)
