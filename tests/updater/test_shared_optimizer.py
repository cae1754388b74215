"""An optimizer object given to several updaters: each starts at zero, settings are common."""

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.parameter import Parameter
from fastopt.table import EmbeddingTable
from helpers.cases import FIRST, named
from helpers.tensor_lists import everything, normal

SHAPE = 3, 4


def in_turn(updaters, steps=3):
    """Weights, states and counts of updaters that are called in turn."""
    weights = [normal(k, SHAPE, "float32") for k, _ in enumerate(updaters)]
    for step in range(steps):
        for updater, weight in zip(updaters, weights, strict=True):
            updater("w", normal(step, SHAPE, "float32"), weight)
    return [everything(*pair) for pair in zip(updaters, ([each] for each in weights), strict=True)]


@pytest.mark.parametrize("name", named(sorted(FIRST), "adam", "nadam", "lars", "prodigy", "soap"))
def test_each_updater_starts_at_zero(name):
    made = FIRST[name].make()
    apart = in_turn([fastopt.Updater(FIRST[name].make()) for _ in range(2)])
    assert in_turn([fastopt.Updater(made) for _ in range(2)]) == apart
    assert in_turn([fastopt.Updater(made) for _ in range(2)]) == apart  # the first two are gone
    again = fastopt.Updater(made)
    again.optimizer = made
    assert in_turn([again]) == apart[:1]


@pytest.mark.parametrize("use", [
    lambda other: fastopt.Updater(optimizer.Adam(), groups={"w": {"optimizer": other}}),
    lambda other: fastopt.Updater(optimizer.Muon(fallback=other, fallback_for="w")),
])  # fmt: skip
def test_an_optimizer_of_a_group_or_a_fallback_belongs_to_one_updater(use):
    def ends(others):
        return [end[:2] for end in in_turn([use(other) for other in others])]

    assert ends([optimizer.Nadam()] * 2) == ends([optimizer.Nadam(), optimizer.Nadam()])


class Decreasing(optimizer.Optimizer):
    """A user's class with an attribute that is no argument, and counts of its own."""

    def __init__(self, live, **common):
        super().__init__(**common)
        self.live, self.strength, self.calls = live, 1.0, 0

    def restart(self, indices):
        super().restart(indices)
        self.calls = 0

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.calls += 1
        weight -= self.strength * self.lr / self.calls * grad


def test_attributes_of_a_users_class_are_common_and_its_counts_start_again():
    live, steps = np.zeros(3), []
    made = Decreasing(live, lr=1.0)
    for made.strength in (1.0, 0.5, 0.25):
        updater, weight = fastopt.Updater(made), np.zeros(1)
        for _ in range(2):
            updater(0, np.ones(1), weight)
        assert updater.optimizer.live is live
        steps.append(-weight[0] / 1.5)
    assert steps == [1.0, 0.5, 0.25]


def test_the_optimizer_of_the_first_updater_is_the_given_one():
    made, owned = optimizer.Adam(), []
    for _ in range(3):
        updater = fastopt.Updater(made)
        owned.append(updater.optimizer is made)
        updater("w", np.ones(3), np.ones(3))
    assert owned == [True, False, False]
    with pytest.raises(ValueError, match="not a regular expression"):
        fastopt.Updater(unused := optimizer.SGD(), groups={"(": {}})
    assert fastopt.Updater(unused).optimizer is unused


def test_settings_of_the_optimizer_are_those_of_all_its_updaters():
    made = optimizer.Adam(lr=0.1)
    updaters = [fastopt.Updater(made) for _ in range(3)]
    in_turn(updaters)
    made.learning_rate = 0.5
    updaters[1].optimizer.beta1 = 0.5
    updaters[2].optimizer.wd = 0.25
    made.lr_mult["w"] = 2.0
    updaters[1].optimizer.set_wd_mult({"w": 3.0})
    for own in (updater.optimizer for updater in updaters):
        assert (own.lr, own.beta1, own.wd) == (0.5, 0.5, 0.25)
        assert (own.lr_mult, own.wd_mult) == ({"w": 2.0}, {"w": 3.0})
    with pytest.raises(ValueError, match="beta2 must be"):
        made.beta2 = 2.0
    assert updaters[2].optimizer.beta2 == 0.999
    updaters.pop().optimizer.lr_mult = {"v": 3.0}  # which survives the updater
    assert made.lr_mult == updaters[1].optimizer.lr_mult == {"v": 3.0}


COPIES = copy.copy, copy.deepcopy, lambda updater: pickle.loads(pickle.dumps(updater))


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_an_updater_goes_on_with_its_counts(copied):
    updater = fastopt.Updater(optimizer.Nadam())
    in_turn([updater])
    in_turn([other := copied(updater)], 1)
    assert (updater.optimizer.num_update, other.optimizer.num_update) == (3, 4)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_the_multipliers_of_param_dict_without_its_objects(copied):
    parameter = SimpleNamespace(name="a", lr_mult=2.0, wd_mult=0.5, live=lambda: None)
    updater = fastopt.Updater(optimizer.SGD(lr=1.0, wd=1.0, param_dict={0: parameter}))
    made = copied(updater).optimizer
    assert [(made._get_lr(k), made._get_wd(k)) for k in range(2)] == [(2, 0.5), (1, 1)]
    assert made.param_dict[0] == SimpleNamespace(name="a", lr_mult=2.0, wd_mult=0.5)
    parameter.lr_mult = 4.0
    assert (updater.optimizer._get_lr(0), made._get_lr(0)) == (4, 2)


def test_an_updater_that_takes_an_optimizer_and_states_goes_on():
    """As MXNet does, also for Adam's bias correction; parameters without a state start."""
    old, new, fresh = (fastopt.Updater(optimizer.Adam()) for _ in range(3))
    weights, grad = np.ones((3, *SHAPE)), normal(0, SHAPE, "float64")
    for index in "ab":
        old(index, grad, weights[0])
    new.optimizer = old.optimizer
    new.states["a"] = copy.deepcopy(old.states["a"])
    for index, one, other in (("a", old, new), ("b", fresh, new)):
        weights[:] = weights[0]
        one(index, grad, weights[1])
        other(index, grad, weights[2])
        assert np.array_equal(*weights[1:])
    assert new.optimizer._index_update_count == {"a": 2, "b": 1}
    assert old.optimizer._index_update_count == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("adam", "adamw", True),
        ("sgd", "ccsgd", True),
        ("adagrad", "sgd", False),
        ("nag", "sgd", False),
        ("lion", "signum", False),
        ("soap", "muon", False),
    ],
)
@pytest.mark.filterwarnings("ignore:ccSGD is deprecated:DeprecationWarning")
def test_states_stay_with_another_optimizer_if_it_means_the_same(before, after, stays):
    arguments = {"momentum": 0.9} if before in ("sgd", "nag") else {}
    made = fastopt.Updater(optimizer.create(before, **arguments))
    weight = np.ones((2, 2))
    made("w", weight.copy(), weight)
    for change in ("optimizer", "groups"):
        other = optimizer.create(after, **({"momentum": 0.9} if "sgd" in after else {}))
        value = other if change == "optimizer" else {"w": {"optimizer": other}}
        with nullcontext() if stays else pytest.raises(ValueError, match=r"'w': .* delete it"):
            setattr(made, change, value)
        made("w", np.ones((2, 2)), weight)


def test_a_users_counter_goes_on_with_all_states():
    old, new = fastopt.Updater(Decreasing(None)), fastopt.Updater(optimizer.SGD())
    in_turn([old], 3)
    new.optimizer = old.optimizer
    new.set_states(old.get_states())
    in_turn([new], 1)
    assert (old.optimizer.calls, new.optimizer.calls) == (3, 4)


def test_an_optimizer_that_no_updater_has_keeps_its_counts():
    made = optimizer.Adam()
    in_turn([fastopt.Updater(made)])
    assert fastopt.Updater(pickle.loads(pickle.dumps(made))).optimizer.num_update == 3


def of_trainer(made):
    parameter = Parameter("p", shape=1, init="zeros")
    parameter.initialize()
    trainer = fastopt.Trainer([parameter], made)
    for _ in range(2):
        parameter.add_grad([1.0])
        trainer.step(8)
    return trainer, parameter.data().tolist()


def of_table(made):
    table = EmbeddingTable(2, made, init="zeros")
    for _ in range(2):
        table.update([7], np.ones((1, 2), np.float32))
    return table, table.weight.tolist()


def of_function(made):
    init, update = fastopt.functional(made)
    weight = np.ones(2)
    return None, update(np.ones(2), init(weight), weight)[0].tolist()


@pytest.mark.parametrize("use", [of_trainer, of_table, of_function])
def test_all_that_share_an_optimizer_start_at_zero(use):
    """While others live, and with the optimizer of another."""
    made, other = (optimizer.Adam(lr=0.1, epsilon=1.0) for _ in range(2))
    (first, *found), (_, expected) = use(made), use(other)
    found += [use(made)[1], use(getattr(first, "optimizer", made))[1]]
    del first
    assert [*found, use(made)[1]] == [expected] * 4
