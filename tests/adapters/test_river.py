"""RiverOptimizer has the results of river's optimizers, also for features that come and go."""

import copy
import pickle
import random

import numpy as np
import pytest
from river import linear_model, optim
from river.utils import VectorDict

import fastopt
from fastopt.adapters import RiverOptimizer


def examples(seed=0, same=False):
    """Examples of three features each, of 40 in all or always the same ones."""
    rng = random.Random(seed)
    for _ in range(60):
        names = "abc" if same else rng.sample(range(40), 3)
        yield {name: rng.uniform(-1, 1) for name in names}, rng.random() < 0.5


def trained(optimizer, data):
    model = linear_model.LogisticRegression(optimizer, l2=0.1)
    for x, y in data:
        model.learn_one(x, y)
    return model.weights


RATE = optim.schedulers.InverseScaling(0.1, 0.5)
PAIRS = {
    "Adam": (lambda: optim.Adam(0.1), lambda: RiverOptimizer("adam", 0.1)),
    "SGD": (lambda: optim.SGD(0.1), lambda: RiverOptimizer(fastopt.SGD(lr=0.1))),
    "AdaGrad": (lambda: optim.AdaGrad(0.1), lambda: RiverOptimizer("adagrad", 0.1, eps=1e-8)),
    "RMSProp": (lambda: optim.RMSProp(0.1), lambda: RiverOptimizer("rmsprop", 0.1, eps=1e-8)),
    "scheduler": (lambda: optim.Adam(RATE), lambda: RiverOptimizer("adam", RATE)),
}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_weights_are_those_of_rivers_optimizer(pair, same):
    """With a penalty of the model."""
    theirs, ours = (trained(make(), examples(same=same)) for make in PAIRS[pair])
    assert max(map(abs, theirs.values())) > 0.05
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_new_features_start_with_the_state_of_their_weights():
    """That of DCASGD is a copy of the weight, of which its first step is that of SGD."""
    optimizer, w = RiverOptimizer("dcasgd", 0.1), {}
    for names in ("a", "ab", "abc"):
        w[names[-1]] = 5.0
        optimizer.step(w, dict.fromkeys(names, 1.0))
        assert w[names[-1]] == pytest.approx(4.9)


def test_gradients_of_minibatches_are_plain_dictionaries():
    found = []
    for optimizer in (optim.Adam(0.1), RiverOptimizer("adam", 0.1)):
        weights = VectorDict({"a": 1.0, "b": 2.0})
        for g in ({"a": np.float64(1), "b": np.float64(2)}, {}, {"b": np.float64(1)}):
            optimizer.step(weights, g)
        found.append(weights.to_dict())
        assert optimizer.n_iterations == 3
    assert found[1] == pytest.approx(found[0])


def test_clones_start_again_and_copies_continue():
    optimizer = RiverOptimizer("adam", 0.1, beta1=0.5)
    first = trained(optimizer, examples())
    clone = optimizer.clone()
    assert clone.updater.optimizer.beta1 == 0.5
    assert trained(clone, examples()) == first
    w, g = {0: 1.0, "new": 2.0}, {0: 0.5, "new": 1.0}
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = optimizer.step(dict(w), g)
    assert [other.step(dict(w), g) for other in others] == [expected, expected]


@pytest.mark.parametrize("same", [True, False])
def test_averages_are_those_of_an_updater_of_all_features(same):
    optimizer, weights = RiverOptimizer("schedulefreesgd", 0.5), {"later": 3.0}
    updater = fastopt.Updater(fastopt.ScheduleFreeSGD(lr=0.5, lazy_update=True))
    data = [x for x, _ in examples(same=same)]
    names = [*dict.fromkeys(name for x in data for name in x)]
    whole = np.zeros(len(names))
    for x in data:
        weights = dict.fromkeys(x, 0.0) | weights
        optimizer.step(weights, x)
        updater(0, (np.array([*x.values()]), np.array(list(map(names.index, x)))), whole)
    before = dict(weights)
    found = optimizer.averaged(weights)
    with updater.averaged():
        expected = {**dict(zip(names, whole.tolist(), strict=True)), "later": 3.0}
    assert found == pytest.approx(expected)
    assert weights == before != found
