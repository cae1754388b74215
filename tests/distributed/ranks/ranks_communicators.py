"""Checks of private communicators, of which MPICH has about 2,000 at a time."""

import numpy as np
from ranks_common import comm, raised

from fastopt import optimizer
from fastopt.distributed import ShardedUpdater
from fastopt.mpi.communicator import _everything


def check_private_communicators_end_with_those_of_the_user(number):
    before = len(_everything)
    for _ in range(int(number)):
        other = comm.Dup()
        ShardedUpdater(optimizer.SGD(), other)
        other.Free()
    assert len(_everything) == before


def check_updaters_of_one_communicator_share_them(number):
    other, weight, grad = comm.Dup(), np.zeros(4, np.float32), np.ones(4, np.float32)
    before = len(_everything)
    for overlap in (False, True):
        for _ in range(int(number)):
            updater = ShardedUpdater(optimizer.SGD(), other, overlap=overlap)
        for _ in range(2):
            updater(0, grad, weight)
    assert (weight == np.float32(-0.04) * comm.size).all()
    assert len(_everything) == before + 1
    other.Free()
    assert len(_everything) == before
    with raised(RuntimeError, "no longer in step, since their communicator was freed"):
        updater(0, grad, weight)


def check_updaters_that_exist_have_communicators_of_their_own(number):
    """Also one that has begun and no longer exists."""
    other, one = comm.Dup(), np.ones(4, np.float32)
    updaters = [ShardedUpdater(optimizer.SGD(), other, overlap=True) for _ in range(3)]
    weights = [np.zeros(4, np.float32) for _ in updaters]
    for updater, weight in zip(updaters, weights, strict=True):
        updater(0, one, weight)
    for updater in updaters if comm.rank else updaters[::-1]:
        updater.begin(0, one)
    del updater, updaters[0]
    updaters.append(ShardedUpdater(optimizer.SGD(), other, overlap=True))
    for updater, weight in zip(updaters, weights[1:] + weights[:1], strict=True):
        updater(0, one, weight)
    assert all((weight == np.float32(-0.02) * comm.size).all() for weight in weights)
    assert len({id(each._lease) for each in updaters}) == 3
    other.Free()
