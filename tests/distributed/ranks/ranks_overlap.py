"""Checks of gradients that are sent while others are computed; ``ranks_plans`` has their bits."""

import weakref

import numpy as np
from ranks_common import LAST, comm, raised, told

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import everything, frozen, normal

SHAPES = [(70,), (900, 40), (0, 3), (2000, 300), (301,), (1200, 900), (7,)]
"""Three lines or more, one of them of a single tensor."""


INDICES = [*range(len(SHAPES))]


def arrays(seed, shapes=SHAPES):
    return [normal(9 * seed + k, shape, "float32") for k, shape in enumerate(shapes)]


def check_calls_that_fail_after_begin_change_nothing():
    """All ranks raise, what was sent is forgotten, and the next step works."""
    weights = arrays(0)
    grads = [np.ones_like(w) for w in weights]
    copied = [grads[0], grads[1].copy(), *grads[2:]]
    for options in ({}, {"clip_global_norm": 1.0}, {"loss_scaler": LossScaler(2.0)}):
        updater = ShardedUpdater(optimizer.Adam(), comm, overlap=True, **options)
        updater([0, 1], grads[:2], weights[:2])
        updater(INDICES, grads, weights)
        before, last = everything(updater.shard, weights), comm.size - 1
        of_last = [*grads[:-1], np.ones(3, np.float32)] if LAST else grads
        wrong = (
            ("gradient must have shape (7,), got (3,)", INDICES, of_last),
            ("begin() was called for the parameters", [1], grads[1:2]),
            ("index 1: the gradient is not the one passed to begin()", INDICES, copied),
        )
        for ranks in ({*range(comm.size)}, {0}, {last}):
            for words, indices, given in wrong[: 3 if last else 1]:
                for place in INDICES[::-1] if comm.rank in ranks else ():
                    updater.begin(place, grads[place])
                with raised(ValueError, words):
                    updater(indices, given, [weights[k] for k in indices])
        assert everything(updater.shard, weights) == before
        for place in INDICES[::-1]:
            updater.begin(place, grads[place])
        if last:
            updater.optimizer.lr = 0.5 if LAST else 0.001
            with told("for lr"):
                updater(INDICES, grads, weights)
            updater.optimizer.lr = 0.001
        assert everything(updater.shard, weights) == before
        updater(INDICES, grads, weights)
        assert everything(updater.shard, weights) != before


def check_errors_of_begin_are_of_one_rank():
    weights = [np.zeros(5, np.float32), np.zeros((3, 2), np.float32)]
    grads = [np.ones_like(w) for w in weights]
    with raised(ValueError, "begin() needs an updater with overlap=True"):
        ShardedUpdater(optimizer.SGD(), comm).begin(0, grads[0])
    updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm, overlap=True)
    updater.begin(0, grads[0])  # nothing is known yet
    updater([0, "b"], grads, weights)
    if LAST:
        updater.begin(0, grads[0])
        for words, index, grad in (
            ("index 3: begin() accepts only parameters of the previous call", 3, grads[0]),
            ("gradient must have shape (3, 2), got (5,)", "b", grads[0]),
            ("begin() was called twice in a step", 0, grads[0]),
        ):
            with raised(ValueError, words):
                updater.begin(index, grad)
    updater([0, "b"], grads, weights)
    assert (weights[1] == -2 * comm.size).all()


def check_released_gradients_are_freed_once_they_are_sent():
    """The call has None for them; those that were not sent are kept."""
    for shapes in ([(70,), (0, 3), (30, 40)], SHAPES):
        indices, weights, straight = [*range(len(shapes))], arrays(0, shapes), arrays(0, shapes)
        updater = ShardedUpdater(optimizer.Adam(), comm, overlap=True)
        other = ShardedUpdater(optimizer.Adam(), comm)
        for step in range(3):
            grads = arrays(step + comm.rank, shapes)
            other(indices, grads, straight)
            left = [weakref.ref(grad) for grad in grads]
            for place in indices[::-1]:
                updater.begin(place, grads.pop(), release=True)
            packed = shapes is not SHAPES and step and comm.size > 1  # in a single bucket
            assert not packed or all(each() is None for each in left)
            updater(indices, [None] * len(shapes), weights)
            assert frozen(weights) == frozen(straight)
            assert comm.size == 1 or all(each() is None for each in left)
    before, grads = everything(updater.shard, weights), arrays(0)
    for place in INDICES[1:]:
        updater.begin(place, grads[place].copy(), release=True)
    with raised(TypeError, "index 0: gradient must be a NumPy array, got None"):
        updater(INDICES, [None] * len(SHAPES), weights)
    if comm.size > 1:
        updater.begin(1, grads[1], release=True)
        with raised(ValueError, "not the one passed to begin(), which was released: pass None"):
            updater(INDICES, grads, weights)
    assert everything(updater.shard, weights) == before
    updater(INDICES, grads, weights)
    assert everything(updater.shard, weights) != before
