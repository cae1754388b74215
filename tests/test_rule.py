"""Rules: what may be declared, what a user's own rule gets, what its digest covers."""

import math

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.kernels.rule import Rule, rule, scalar


@scalar
def halve(x, h):
    return x * h.half


@fastopt.rule(state=("mom",), hyper=("lr", "half"))
def halving(weight, grad, state, h):
    mom = state[0] + halve(grad, h)
    return weight - h.lr * mom, (mom,)


class Halving(optimizer.Optimizer):
    rule = halving

    def hyper(self, t, lr, wd):
        return {"half": 0.5}


def test_a_rule_is_a_plain_function_of_scalars():
    h = np.ones(1, halving.record(np.float32))[0]
    h.half = 0.5
    weight, (mom,) = halving(np.float32(1), np.float32(2), (np.float32(3),), h)
    assert (weight, mom) == (-3, 4)
    assert weight.dtype == np.float32
    assert isinstance(halving, Rule)
    assert repr(halving) == "<rule halving: state ('mom',), hyper ('lr', 'half')>"


@pytest.mark.parametrize("size", [3, 50_000])
def test_a_users_rule_and_five_lines_make_an_optimizer(size):
    updater = optimizer.get_updater(Halving(learning_rate=0.1))
    weight = np.ones(size, np.float32)
    for _ in range(2):
        updater(0, np.ones(size, np.float32), weight)
    np.testing.assert_allclose(weight, 0.85, rtol=1e-6)


def test_a_users_numpy_update_works_as_in_mxnet():
    class AdaGradByHand(optimizer.Optimizer):
        def create_state(self, index, weight):
            return np.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            lr, wd = self._get_lr(index), self._get_wd(index)
            assert self._index_update_count[index] >= 1
            assert self.idx2name == {0: "a_weight"}
            grad = grad * self.rescale_grad
            state += grad * grad
            weight -= lr * (grad / np.sqrt(state + 1e-7) + wd * weight)

    arguments = {"learning_rate": 0.1, "wd": 0.1, "rescale_grad": 0.5}
    weight, expected = np.ones(5), np.ones(5)
    by_hand = optimizer.get_updater(AdaGradByHand(param_idx2name={0: "a_weight"}, **arguments))
    library = optimizer.get_updater(optimizer.AdaGrad(**arguments))
    for gradient in np.random.default_rng(0).normal(size=(4, 5)):
        by_hand(0, gradient, weight)
        library(0, gradient, expected)
    np.testing.assert_allclose(weight, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="shape"):
        by_hand(0, np.ones(4), weight)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"hyper": ("clip",)}, "'clip' is an attribute of NumPy records"),
        ({"hyper": ("lr", "lr")}, "repeats"),
        ({"hyper": ("l r",)}, "identifiers"),
        ({"hyper": "lr"}, "sequence of names"),
        ({"hyper": (), "state": ("a", "a")}, "repeats"),
        ({"hyper": (), "state": (1,)}, "identifiers"),
    ],
)
def test_bad_declarations_are_refused(declared, words):
    with pytest.raises(TypeError, match=words):
        rule(**declared)


def test_a_field_that_hyper_does_not_give_is_named():
    class Forgetful(optimizer.Optimizer):
        rule = halving

    updater, weight = optimizer.get_updater(Forgetful()), np.ones(2)
    with pytest.raises(TypeError, match=r"Forgetful.hyper\(\) does not give 'half'"):
        updater(0, np.ones(2), weight)
    assert updater.states == {}
    assert updater.optimizer._index_update_count == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"Wrong.hyper\(\) must return a dict of numbers, got None"),
        ({"half": "much"}, "rule halving needs numbers for .*'half'.*, got .*'much'"),
        ({"half": None}, "rule halving needs numbers"),
    ],
)
def test_a_hyper_that_is_no_dict_of_numbers_is_refused(given, words):
    class Wrong(optimizer.Optimizer):
        rule = halving

        def hyper(self, t, lr, wd):
            return given

    updater, weight = optimizer.get_updater(Wrong()), np.ones(2)
    with pytest.raises(TypeError, match=words):
        updater(0, np.ones(2), weight)
    assert updater.states == {}
    assert updater.optimizer._index_update_count == {}
    np.testing.assert_array_equal(weight, 1)


@rule(state=("total",), hyper=("lr",), row=lambda grad, h: grad)
def by_rows(weight, grad, state, h, mean):
    return weight - h.lr * mean, (state[0] + mean,)


class ByRows(optimizer.Optimizer):
    rule = by_rows


def test_a_row_rule_needs_no_more_than_its_class():
    updater, weight = optimizer.get_updater(ByRows(learning_rate=1.0)), np.zeros((2, 2))
    updater(0, np.array([[1.0, 3.0], [4.0, 4.0]]), weight)
    np.testing.assert_array_equal(weight, [[-2, -2], [-4, -4]])
    np.testing.assert_array_equal(updater.states[0], [[2], [4]])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 2)])
def test_a_row_rule_refuses_what_has_no_rows(shape):
    updater = optimizer.get_updater(ByRows())
    with pytest.raises(ValueError, match=r"index 0: rule by_rows .* two dimensions"):
        updater(0, np.ones(shape), np.ones(shape))
    assert updater.states == {}


def test_a_wrong_number_of_states_is_named():
    @rule(state=("a", "b"), hyper=("lr",))
    def short(weight, grad, state, h):
        return weight, (state[0],)

    class Short(optimizer.Optimizer):
        rule = short

    with pytest.raises(Exception, match="returns 1 values for 2 slots"):
        optimizer.get_updater(Short())(0, np.ones(2), np.ones(2))


def test_the_digest_covers_the_source_and_what_it_refers_to():
    def make(offset, body):
        namespace = {"rule": rule, "offset": offset, "math": math}
        exec(f"def added(weight, grad, state, h):\n return {body}, ()", namespace)
        return rule(hyper=("lr",))(namespace["added"]).digest

    first = make(1.0, "weight + offset")
    assert first == make(1.0, "weight + offset")
    assert first != make(2.0, "weight + offset")
    assert first != make(1.0, "weight - offset")
    assert halving.digest != optimizer.SGD().rule.digest
