"""Checks of private communicators, of which MPICH has about 2,000 at a time."""

import numpy as np
from mpi4py import MPI
from mpi_common import comm

from fastopt import optimizer
from fastopt.mpi import ShardedUpdater
from fastopt.mpi.job import _nodes


def check_private_communicators_end_with_those_of_the_user(number):
    before = len(_nodes)
    for _ in range(int(number)):
        other = comm.Dup()
        ShardedUpdater(optimizer.SGD(), other)
        other.Free()
    assert len(_nodes) == before


def check_updaters_of_one_communicator_share_them(number):
    other = MPI.COMM_WORLD.Dup()
    before = len(_nodes)
    for _ in range(int(number)):
        updater, weight = ShardedUpdater(optimizer.SGD(), other), np.zeros(4, np.float32)
    updater(0, np.ones(4, np.float32), weight)
    assert (weight != 0).all()
    assert len(_nodes) == before + 1
    other.Free()
    assert len(_nodes) == before
