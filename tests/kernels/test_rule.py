"""Rules: what may be declared, what a user's own rule gets, what its digest covers."""

import types

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


def sizes(weight, grad, state, h):
    return abs(grad), abs(weight)


def by_largest(sums, h):
    h.of_grad, h.of_weight = sums[0], sums[1]


@fastopt.rule(hyper=("of_grad", "of_weight"), passes=[(sizes, by_largest, max)])
def largest(weight, grad, state, h):
    return weight * h.of_grad + h.of_weight, ()


class Largest(optimizer.Optimizer):
    rule = largest

    @optimizer.constant
    def hyper(self, t, lr, wd):
        return {"of_grad": 1.0, "of_weight": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_pass_computes_maxima(dtype, rng):
    """Of every element of any number of blocks and threads; a NaN is the largest."""
    for size in (1, 65, 1025, 100_001):
        grad, weight = (rng.normal(size=size).astype(dtype) for _ in range(2))
        for at in {0, size // 2, size - 1}:
            for number in (9.0, -9.0, np.nan):
                grad[at], after = number, weight.copy()
                fastopt.Updater(Largest())([0, 1], [grad, grad[:1]], [after, np.ones(1, dtype)])
                expected = weight * np.abs(grad).max() + np.abs(weight).max()
                np.testing.assert_allclose(after, expected, rtol=1e-6)


def test_a_users_numpy_update_works_as_in_mxnet():
    class AdaGradByHand(optimizer.Optimizer):
        def create_state(self, index, weight):
            return np.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            lr, wd = self._get_lr(index), self._get_wd(index)
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


def careful(weight, grad, state, h):
    assert grad > 0
    return weight, ()


def short(weight, grad, state):
    return weight, ()


def doubling(weight, grad, state, h):
    h.lr = 2 * h.lr
    return weight - h.lr * grad, ()


OF = {"hyper": ("lr",), "state": ("a", "b")}
DECLARED = [
    ({"hyper": ("clip",)}, halve, "'clip' is an attribute of NumPy records"),
    ({"hyper": ("lr", "lr")}, halve, "repeats"),
    ({"hyper": ("l r",)}, halve, "identifiers"),
    ({"hyper": ("for",)}, halve, "identifiers"),
    ({"hyper": "lr"}, halve, "sequence of names"),
    ({"hyper": (), "state": ("a", "a")}, halve, "repeats"),
    ({"hyper": (), "state": (1,)}, halve, "identifiers"),
    ({"hyper": ("lr",)}, careful, "careful may not raise or assert"),
    ({"hyper": ("lr",)}, short, r"short must take \d arguments .*, not \(weight, grad"),
    ({"hyper": ("lr",), "noise": True}, short, r"short must take \d arguments .*, not \("),
    ({"hyper": ("lr",)}, doubling, r"doubling must not assign to h\.lr"),
    ({"hyper": ("lr",), "kept": ("var",)}, halve, "kept needs passes"),
    ({"hyper": ("lr",), "kept": ("a b",)}, halve, "identifiers"),
    ({**OF, "extra": "none"}, halve, "extra must be a state slot"),
    ({**OF, "extra": "a", "signed": ["a"]}, halve, "extra must be a state slot"),
    ({**OF, "extra": "a", "row": abs}, halve, "extra must be a state slot"),
    ({**OF, "row_state": ("b",)}, halve, "row_state needs row"),
    ({**OF, "row_state": ("a",), "row": abs}, halve, r"be the last names of state \('a', 'b'\)"),
    ({**OF, "row_state": ("c",), "row": abs}, halve, "must be the last names of state"),
    ({**OF, "row_state": "b", "row": abs}, halve, "must be a sequence of names, got 'b'"),
    ({**OF, "signed": ("other",)}, halve, "'other' must be in state"),
    ({**OF, "signed": ("a",), "nonnegative": ("a",)}, halve, "in one of signed and nonnegative"),
    ({**OF, "signed": "a"}, halve, "signed must be a sequence of names"),
    ({**OF, "signed": ("a",), "row": abs}, halve, "rows have one number"),
]


@pytest.mark.parametrize(("declared", "function", "words"), DECLARED)
def test_bad_declarations_are_refused(declared, function, words):
    with pytest.raises(TypeError, match=words):
        rule(**declared)(function)


@rule(state=("total",), hyper=("lr",), row=lambda grad, h: grad)
def by_rows(weight, grad, state, h, mean):
    return weight - h.lr * mean, (state[0] + mean,)


class ByRows(optimizer.Optimizer):
    rule = by_rows


def no_return_in_one_branch(weight, grad, state, h):  # noqa: RET503
    if grad < 5:
        return weight - h.lr, (grad,)


def no_tuple(weight, grad, state, h):
    return weight, (grad)


def weight_alone(weight, grad, state, h):
    return weight


def too_many_slots(weight, grad, state, h):
    return weight, (grad, grad)


def undeclared_field(weight, grad, state, h):
    return weight - h.momentum, (grad,)


def undefined_name(weight, grad, state, h):
    return weight - no_such_number, (grad,)  # noqa: F821


def with_hyper(returned):
    """An optimizer whose hyper() returns this."""

    class Wrong(optimizer.Optimizer):
        rule = halving

        def hyper(self, t, lr, wd):
            return returned

    return Wrong


def with_rule(function):
    """An optimizer with this rule."""

    class Faulty(optimizer.Optimizer):
        rule = rule(state=("mom",), hyper=("lr",))(
            types.FunctionType(function.__code__, globals(), function.__name__)
        )

    return Faulty


REFUSED = [
    *(
        (ValueError, ByRows, shape, "index 0: rule by_rows .* two dim")
        for shape in [(), (3,), (2, 3, 2)]
    ),
    (TypeError, with_hyper(None), (2,), r"Wrong.hyper\(\) must return a dict of numbers, got None"),
    (TypeError, with_hyper({}), (2,), r"Wrong.hyper\(\) does not return 'half'"),
    (TypeError, with_hyper({"half": "much"}), (2,), "rule halving .*'half'.*, got .*'much'"),
    (TypeError, with_hyper({"half": None}), (2,), "rule halving needs numbers"),
    (
        TypeError,
        with_hyper({"half": 1.0, "lr": "0.5"}),
        (2,),
        r"Wrong.hyper\(\): lr .* number, got '0.5'",
    ),
    (
        TypeError,
        with_hyper({"half": 1.0, "hal": 1.0}),
        (2,),
        r"Wrong.hyper\(\) returns 'hal', which its rule .*; did you mean 'half'\? The names",
    ),
    *(
        (TypeError, with_rule(function), (size,), f"index 0: rule {function.__name__} .*{words}")
        for function, words in (
            (no_return_in_one_branch, "it must return .* in every branch, with 1 numbers"),
            (no_tuple, "it must return"),
            (weight_alone, "it must return"),
            (too_many_slots, "it must return"),
            (undeclared_field, "reads h.momentum, which its hyper"),
            (undefined_name, "no_such_number"),
        )
        for size in (3, 50_000)
    ),
]


@pytest.mark.parametrize(("error", "make", "shape", "words"), REFUSED)
def test_what_a_rule_cannot_do_is_reported_in_plain_english(error, make, shape, words):
    updater, weight, grad = optimizer.Updater(make()), np.ones(shape), np.ones(shape)
    for call in ((0, grad, weight), ([0, 1], [grad, grad], [weight, np.ones(shape)])):
        with pytest.raises(error, match=words):
            updater(*call)
        assert updater.states == {}
        assert updater.optimizer._index_update_count == {}
        assert updater.optimizer.num_update == 0
    np.testing.assert_array_equal(weight, 1)


def test_a_class_without_a_real_rule_is_refused():
    with pytest.raises(TypeError, match=r"Forgotten.rule must be a function decorated"):

        class Forgotten(optimizer.Optimizer):
            def rule(weight, grad, state, h):
                return weight, ()


DIGESTS = {
    "a number": ((1.0, 2.0), "offset"),
    "a tuple": (((1.0, 2.0), (1.0, 3.0)), "offset[1]"),
    "a nested tuple": ((((1.0,), 2.0), ((3.0,), 2.0)), "offset[0][0]"),
    "an array": ((np.zeros(2000), np.eye(1, 2000, 1000)[0]), "offset[1000]"),
    "a type": ((np.float32, np.float64), "offset(1.1)"),
}


@pytest.mark.parametrize("kind", DIGESTS)
def test_the_digest_covers_the_source_and_what_it_refers_to(kind):
    def make(offset, sign="+"):
        namespace = {"offset": offset}
        exec(f"def added(weight, grad, state, h):\n return weight {sign} {used}, ()", namespace)
        return rule(hyper=("lr",))(namespace["added"]).digest

    (first, second), used = DIGESTS[kind]
    assert make(first) == make(first) != make(second)
    assert len({make(first, sign) for sign in ("+", "-", "+ 2 *", "+ 3 *")}) == 4
    assert halving.digest != optimizer.SGD().rule.digest
