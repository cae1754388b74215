"""Rules that take a second array in each call: ``updater(index, grad, weight, extra=...)``."""

from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.kernels.scalars import rescaled
from fastopt.sparse import RowSparse
from helpers.tensor_lists import everything


@fastopt.rule(
    state=("mom", "old"),
    hyper=("lr", "beta", "rescale_grad", "clip_gradient"),
    extra="old",
)
def reduced(weight, grad, state, h):
    mom = h.beta * state[0] + rescaled(grad, h) - h.beta * rescaled(state[1], h)
    return weight - h.lr * mom, (mom, state[1])


class Reduced(optimizer.Optimizer):
    """Momentum of gradients with reduced variance."""

    rule = reduced

    def hyper(self, t, lr, wd):
        return {"beta": 0.5}


def formula(weight, pairs, lr=0.1):
    mom = np.zeros_like(weight)
    for grad, old in pairs:
        mom = 0.5 * mom + grad - 0.5 * old
        weight = weight - lr * mom
    return weight


slow = partial(pytest.param, marks=pytest.mark.slow)
RNG = np.random.default_rng(0)
PAIRS = RNG.normal(size=(3, 2, 4, 3))
START = RNG.normal(size=(4, 3))


WAYS = {
    "single": lambda u, grad, weight, old: u("w", grad, weight, extra=old),
    "listed": lambda u, grad, weight, old: u(["w"], [grad], [weight], extra=[old]),
    "stepped": lambda u, grad, weight, old: u.step({"w": grad}, {"w": weight}, extra={"w": old}),
    "views": lambda u, *arrays: WAYS["single"](u, *map(memoryview, arrays)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "made", "settings", "tolerance"),
    [
        ("float64", {}, {}, 1e-14),
        ("float32", {}, {"clip_global_norm": 1e9}, 1e-6),
        ("float32", {}, {"groups": {"w": {"lr_mult": 1.0}}}, 1e-6),
        slow("float32", {}, {"average": fastopt.EMA()}, 1e-6),
        slow("float32", {"state_dtype": "bfloat16"}, {}, 2e-2),
        slow("float16", {"multi_precision": True}, {}, 2e-2),
    ],
)
def test_a_rule_sees_the_extra_of_each_call(way, dtype, made, settings, tolerance):
    updater = fastopt.Updater(Reduced(learning_rate=0.1, **made), **settings)
    weight = START.astype(dtype)
    for grad, old in PAIRS:
        WAYS[way](updater, grad.astype(dtype), weight, old.astype(dtype))
    np.testing.assert_allclose(weight, formula(START, PAIRS), atol=tolerance)
    assert updater.info.slow.calls == 0


def test_a_list_has_extras_for_the_rules_that_take_one():
    groups = {"plain": {"optimizer": optimizer.SGD(learning_rate=1.0)}, "still": {"frozen": True}}
    updater = fastopt.Updater(Reduced(learning_rate=0.1), groups=groups)
    weights = {"w": START.copy(), "plain": np.ones(2), "still": np.ones(2)}
    for grad, old in PAIRS:
        grads = {"w": grad, "plain": np.ones(2), "still": None}
        updater.step(grads, weights, extra={"w": old, "plain": None})
    np.testing.assert_allclose(weights["w"], formula(START, PAIRS), rtol=1e-14)
    assert weights["plain"].tolist() == [-2, -2]
    assert weights["still"].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_row_sparse_extras(lazy, dense):
    updater = fastopt.Updater(Reduced(learning_rate=0.1, lazy_update=lazy))
    weight, own, moms = START.copy(), START.copy(), np.zeros((4, 3))
    for grad, old in PAIRS:
        given = RowSparse(grad[:3], [2, 0, 2], (4, 3))
        extra = old if dense else RowSparse(old[:3], [3, 0, 0], (4, 3))
        updater("w", given, weight, extra=extra)
        rows = [0, 2] if lazy else slice(None)
        olds = old if dense else extra.to_dense()
        moms[rows] = (0.5 * moms + given.to_dense() - 0.5 * olds)[rows]
        own[rows] -= 0.1 * moms[rows]
    np.testing.assert_allclose(weight, own, rtol=1e-13)


def called(updater, weights, grad=PAIRS[0, 0], extra=PAIRS[0, 1]):
    updater("w", grad, weights[0], extra=extra)


def listed_with(updater, weights, extras, indices=("w", "v")):
    updater(list(indices), [PAIRS[0, 0]] * 2, weights, extra=extras)


REFUSED = {
    "takes an array 'old' in each call": lambda u, w: u("w", PAIRS[0, 0], w[0]),
    "rule reduced takes an array 'old'": lambda u, w: listed_with(u, w, [PAIRS[0, 1], None]),
    "extra must have shape .4, 3., got .2,.": lambda u, w: called(u, w, extra=np.ones(2)),
    "extra must be a NumPy array": lambda u, w: called(u, w, extra="x"),
    "extra must have the weight's dtype": lambda u, w: called(u, w, extra=np.ones((4, 3), int)),
    "gradient must have shape": lambda u, w: called(u, w, grad=np.ones(2)),
    "needs a list of as many extras": lambda u, w: listed_with(u, w, [PAIRS[0, 1]]),
    "takes an index once": lambda u, w: listed_with(u, w, [PAIRS[0, 1]] * 2, ("w", "w")),
    "have no gradient": lambda u, w: u.step({}, {"w": w[0]}, "skip", {"w": PAIRS[0, 1]}),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("first", [True, False])
def test_refused_calls_change_nothing(message, first):
    updater, weights = fastopt.Updater(Reduced(learning_rate=0.1)), [START.copy(), START.copy()]
    if not first:
        called(updater, weights)
    before = everything(updater, weights)
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message](updater, weights)
    assert everything(updater, weights) == before


class OnDevice:
    """An array on a device, as far as a call without a device sees it."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (4, 3), "typestr": "<f8", "data": (8, False), "version": 3}


@pytest.mark.parametrize(
    ("made", "settings", "weight", "message"),
    [
        (optimizer.SGD, {}, START, "rule sgd takes no extra"),
        (optimizer.Muon, {}, START, r"update\(\) in Python .Muon. takes no"),
        (Reduced, {"accumulate": 2}, START, "use accumulate=1"),
        (Reduced, {}, OnDevice(), "'w': an extra is for weights on the host"),
    ],
)
def test_updaters_that_take_no_extra_say_so(made, settings, weight, message):
    updater = fastopt.Updater(made(), **settings)
    with pytest.raises((TypeError, ValueError), match=message):
        called(updater, [weight])
    assert not updater.states


def test_ranks_refuse_rules_with_an_extra():
    with pytest.raises(TypeError, match="takes an array 'old' in each call, which ShardedUpdater"):
        run_threads(2, lambda comm: ShardedUpdater(Reduced(), comm))
