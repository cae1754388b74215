"""ThincOptimizer has the results of thinc's optimizers, in place and by their interface."""

import copy
import pickle

import numpy as np
import pytest
from thinc.api import SGD, Adam, Relu, Softmax, chain, fix_random_seed

import fastopt
from fastopt.adapters import ThincOptimizer


def model():
    fix_random_seed(0)
    return chain(Relu(8), Softmax()).initialize(np.ones((2, 5), "f"), np.ones((2, 3), "f"))


def trained(optimizer, net=None, steps=30):
    """Parameters of a network after some steps; the gradients are larger than the clip."""
    rng, net = np.random.default_rng(0), net or model()
    for _ in range(steps):
        x, y = rng.normal(size=(16, 5)).astype("f"), rng.integers(3, size=16)
        scores, backprop = net.begin_update(x)
        backprop(4 * (scores - np.eye(3, dtype="f")[y]))
        net.finish_update(optimizer)
        optimizer.step_schedules()
    return np.concatenate(
        [node.get_param(name).ravel() for node in net.layers for name in node.param_names]
    )


L2 = {"L2": 0.5, "L2_is_weight_decay": False, "use_averages": False}
PLAIN = {"use_averages": False}
PAIRS = {
    "adam": (Adam(0.01, **PLAIN), {"learn_rate": 0.01}),
    "no clip": (Adam(0.01, grad_clip=0, **PLAIN), {"learn_rate": 0.01, "grad_clip": 0}),
    "sgd": (SGD(0.1, **PLAIN), {"optimizer": fastopt.SGD(lr=0.1)}),
    "schedule": (Adam([0.1, 0.05, 0.01], **PLAIN), {"learn_rate": [0.1, 0.05, 0.01]}),
    "adam, L2": (Adam(0.01, **L2), {"learn_rate": 0.01, "wd": 0.5}),
    "sgd, L2": (SGD(0.1, **L2), {"optimizer": "sgd", "learn_rate": 0.1, "wd": 0.5}),
    "sgd, L2, no clip": (SGD(0.1, grad_clip=0, **L2),
        {"optimizer": "sgd", "learn_rate": 0.1, "grad_clip": 0, "wd": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_parameters_are_those_of_thincs_optimizer(pair):
    theirs, arguments = PAIRS[pair]
    theirs, ours = trained(theirs), trained(ThincOptimizer(**arguments))
    assert np.abs(theirs - trained(SGD(0.0))).max() > 0.05
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "before_clip"), [("sgd", True), ("adamw", False)])
def test_the_coefficient_of_l2_can_be_set_and_multiplied(name, before_clip):
    optimizer = ThincOptimizer(name, learn_rate=0.1, wd=0.25)
    made = optimizer.updater.optimizer
    assert (optimizer.L2, made.wd) == (0.25, 0.0 if before_clip else 0.25)
    optimizer.L2 = 0.5
    assert optimizer.L2 == 0.5
    made.set_wd_mult({"0/b": 0.0})
    weight, bias = np.ones(1, "f"), np.ones(1, "f")
    for name, array in (("W", weight), ("b", bias)):
        optimizer((0, name), array, np.zeros(1, "f"))
    assert weight < 1
    assert bias == 1
    with pytest.raises(ValueError, match="at least 0, got -1"):
        optimizer.L2 = -1


@pytest.mark.parametrize("name", ["schedulefreesgd", "asgd"])
def test_averages_of_the_optimizers_own_are_used_without_an_argument(name):
    options = {} if name == "schedulefreesgd" else {"t0": 0.0}
    net, optimizer = model(), ThincOptimizer(name, learn_rate=0.5, **options)
    assert not optimizer.averages
    before = trained(optimizer, net, steps=5)
    with optimizer.updater.averaged():
        expected = trained(optimizer, net, steps=0)
    with net.use_params(optimizer.averages):
        np.testing.assert_array_equal(trained(optimizer, net, steps=0), expected)
    np.testing.assert_array_equal(trained(optimizer, net, steps=0), before)
    assert not np.array_equal(before, expected)


def test_averages_are_the_moving_averages_of_the_parameters():
    net, optimizer = model(), ThincOptimizer(learn_rate=0.01, use_averages=True)
    assert ThincOptimizer().averages is None
    expected = trained(optimizer, net, steps=0)
    for t in range(1, 6):
        decay = (1 + t) / (10 + t)
        expected = decay * expected + (1 - decay) * trained(optimizer, net, steps=1)
    with net.use_params(optimizer.averages):
        np.testing.assert_allclose(trained(optimizer, net, steps=0), expected, rtol=1e-4, atol=1e-7)


def test_copies_and_pickles_continue():
    optimizer = ThincOptimizer(learn_rate=0.01)
    net = model()
    trained(optimizer, net, steps=3)
    others = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    expected = trained(optimizer, net, steps=3)
    for one, other in others:
        np.testing.assert_array_equal(trained(other, one, steps=3), expected)


def test_rates_of_shims_scale_the_step():
    optimizer = ThincOptimizer("sgd", learn_rate=0.5)
    assert optimizer.grad_clip == 1
    optimizer.grad_clip = 0
    weight, gradient = np.ones(2, "f"), np.full(2, 2, "f")
    returned = optimizer((3, "W"), weight, gradient, lr_scale=0.1)
    np.testing.assert_allclose(weight, 0.9)
    assert not gradient.any()
    assert returned[0] is weight
    assert returned[1] is gradient
