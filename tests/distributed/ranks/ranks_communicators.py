"""Checks of private communicators, of which MPICH has about 2,000 at a time."""

import numpy as np
from ranks_common import comm

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
    other = comm.Dup()
    before = len(_everything)
    for _ in range(int(number)):
        updater, weight = ShardedUpdater(optimizer.SGD(), other), np.zeros(4, np.float32)
    updater(0, np.ones(4, np.float32), weight)
    assert (weight != 0).all()
    assert len(_everything) == before + 1
    other.Free()
    assert len(_everything) == before
