"""Updaters with groups, beside an updater of its own for each weight."""

from operator import attrgetter

import numpy as np

from fastopt import optimizer
from helpers.tensor_lists import as_list, frozen, one_by_one

NAMES = ["embed.weight", "body.weight", "body.bias", "norm.scale", "head.weight", "frozen.weight"]


def nested(updater, indices, grads, weights):
    updater.step(dict(zip(indices, grads, strict=True)), dict(zip(indices, weights, strict=True)))


WAYS = as_list, one_by_one, nested


def groups():
    """A group of each kind."""
    return {
        r"bias$|norm": {"wd_mult": 0.0},
        r"^embed": {"lr_mult": 0.1, "clip_gradient": 0.3},
        r"^frozen": {"frozen": True},
        r"^head": {"optimizer": optimizer.SGD(learning_rate=1.0, momentum=0.9)},
    }


def arrays(seed, names=NAMES, dtype=np.float32, shape=(3, 2)):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name in names}


def call(updater, grads, weights, way=as_list):
    """Update weights by name; None is a gradient too."""
    way(updater, [*weights], [grads.get(name) for name in weights], [*weights.values()])


def train(updater, each, weights, expected, gradients, steps, way=as_list):
    """Steps of an updater, and of those of single weights."""
    for step in steps:
        grads = gradients(step)
        call(updater, grads, weights, way)
        for name, own in each.items():
            if name in weights:
                own(name, grads[name], expected[name])


kept_by = attrgetter("states", "averages", "optimizer._index_update_count")


def check_same(updater, each, weights, expected):
    """Weights, states, averages and counts are those of the updaters of single weights."""
    assert frozen(weights) == frozen(expected)
    for name, own in each.items():
        for ours, theirs in zip(kept_by(updater), kept_by(own), strict=True):
            assert frozen(ours.get(name)) == frozen(theirs.get(name))
    assert updater.states.keys() <= each.keys()
