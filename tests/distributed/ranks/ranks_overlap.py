"""Checks of gradients that are sent while others are computed, and of memory that is not packed."""

import weakref
from functools import partial

import numpy as np
from ranks_common import LAST, Pair, comm, exact, raised, told

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater, flat_like
from helpers.tensor_lists import everything, frozen, normal

SHAPES = [(70,), (900, 40), (0, 3), (2000, 300), (301,), (1200, 900), (7,)]
"""Three lines or more, one of them of a single tensor."""


def check_the_bits_are_those_of_one_updater():
    """With gradients that become ready in any order, on some ranks only, for any buckets."""
    backward, shuffled = [*range(7)][::-1], np.random.default_rng(comm.rank).permutation(7)
    for order, missing, size in (
        (backward, (), None),
        (shuffled, (), 100_000),
        (backward, backward if comm.rank == 1 else (), 1 << 26),
        (shuffled, (5 - comm.rank % 2,), None),
    ):
        for options in ({}, {"clip_global_norm": 1e9}):
            weights = [normal(k, s, "float32") for k, s in enumerate(SHAPES)]
            more = {"overlap": True, "bucket_bytes": size, **options}
            pair = Pair(partial(optimizer.Adam, wd=0.1), weights, **more)
            pair.begins = [k for k in order if k not in missing]
            for step in range(3):
                slopes = lambda k, r, s=step: exact(9 * s + r + k, SHAPES[k], np.float32)  # noqa: E731
                pair.step([*range(len(SHAPES))], slopes)
            if options:
                pair.close(rtol=1e-5, atol=1e-6)
            else:
                assert pair.same()
            assert pair.begun or comm.size == 1 or order is shuffled or missing


def check_memory_in_one_piece_is_not_packed():
    """Bits are the same whether gradients, weights, both or none are."""
    found = []
    for place in range(4):
        weights = [normal(k, s, "float32") for k, s in enumerate(SHAPES)]
        grads = [normal(9 * comm.rank + k, s, "float32") for k, s in enumerate(SHAPES)]
        for arrays, one in ((weights, place & 1), (grads, place & 2)):
            if one:
                for flat, array in zip(pieces := flat_like(arrays), arrays, strict=True):
                    flat[...] = array
                arrays[:] = pieces
        updater = ShardedUpdater(optimizer.SGD(momentum=0.9), comm, bucket_bytes=1 << 20)
        for _ in range(3):
            updater([*range(len(SHAPES))], grads, weights)
        found.append(frozen(weights))
        if comm.size > 1:
            together = [group.weights is not None for group in updater._plan.groups]
            assert all(together) == bool(place & 1)
    assert all(each == found[0] for each in found)


def check_calls_that_fail_after_begin_change_nothing():
    """All ranks raise, what was sent is forgotten, and the next step works."""
    weights = [normal(k, s, "float32") for k, s in enumerate(SHAPES)]
    indices = [*range(len(SHAPES))]
    grads = [np.ones_like(w) for w in weights]
    wrong = [*grads[:-1], np.ones(3, np.float32)]
    for options in ({}, {"clip_global_norm": 1.0}, {"loss_scaler": LossScaler(2.0)}):
        updater = ShardedUpdater(optimizer.Adam(), comm, overlap=True, **options)
        updater([0, 1], grads[:2], weights[:2])
        updater(indices, grads, weights)
        before = everything(updater.shard, weights)

        def begin(updater=updater, ranks=range(comm.size)):
            for place in indices[::-1] if comm.rank in ranks else ():
                updater.begin(place, grads[place])

        for ranks in (range(comm.size), [0], [comm.size - 1]):
            begin(ranks=ranks)
            with raised(ValueError, "gradient must have shape (7,), got (3,)"):
                updater(indices, wrong if LAST else grads, weights)
            if comm.size > 1:
                begin(ranks=ranks)
                updater.optimizer.lr = 0.5 if LAST else 0.001
                with told("for lr"):
                    updater(indices, grads, weights)
                updater.optimizer.lr = 0.001
                begin(ranks=ranks)
                with raised(ValueError, "begin() was called for the parameters"):
                    updater([1], grads[1:2], weights[1:2])
                begin(ranks=ranks)
                with raised(ValueError, "index 1: the gradient is not the one passed to begin()"):
                    updater(indices, [grads[0], grads[1].copy(), *grads[2:]], weights)
        assert everything(updater.shard, weights) == before
        begin()
        updater(indices, grads, weights)
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
        with raised(ValueError, "index 3: begin() accepts only parameters of the previous call"):
            updater.begin(3, grads[0])
        with raised(ValueError, "gradient must have shape (3, 2), got (5,)"):
            updater.begin("b", grads[0])
        updater.begin("b", grads[1])
        with raised(ValueError, "begin() was called twice in a step"):
            updater.begin("b", grads[1])
    updater([0, "b"], grads, weights)
    assert (weights[1] == -2 * comm.size).all()


def check_released_gradients_are_freed_once_they_are_sent():
    """The call has None for them; those that were not sent are kept."""
    for shapes in ([(70,), (0, 3), (30, 40)], SHAPES):
        indices = [*range(len(shapes))]
        weights = [normal(k, shape, "float32") for k, shape in enumerate(shapes)]
        straight = [w.copy() for w in weights]
        updater = ShardedUpdater(optimizer.Adam(), comm, overlap=True)
        other = ShardedUpdater(optimizer.Adam(), comm)
        for step in range(3):
            grads = [normal(9 * step + comm.rank, shape, "float32") for shape in shapes]
            other(indices, grads, straight)
            left = [weakref.ref(grad) for grad in grads]
            for place in indices[::-1]:
                updater.begin(place, grads.pop(), release=True)
            packed = shapes is not SHAPES and step and comm.size > 1  # in a single bucket
            assert not packed or all(each() is None for each in left)
            updater(indices, [None] * len(shapes), weights)
            assert frozen(weights) == frozen(straight)
            assert comm.size == 1 or all(each() is None for each in left)
    before = everything(updater.shard, weights)
    grads = [normal(k, s, "float32") for k, s in enumerate(SHAPES)]
    for place in indices[1:]:
        updater.begin(place, grads[place].copy(), release=True)
    with raised(TypeError, "index 0: gradient must be a NumPy array, got None"):
        updater(indices, [None] * len(SHAPES), weights)
    assert everything(updater.shard, weights) == before
    if comm.size > 1:
        updater.begin(1, grads[1], release=True)
        with raised(ValueError, "not the one passed to begin(), which was released: pass None"):
            updater(indices, grads, weights)
    updater(indices, grads, weights)
    assert everything(updater.shard, weights) != before
    updater(6, grads[6], weights[6])
    updater.begin(6, grads[6])
    updater(6, None, weights[6])
