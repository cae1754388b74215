"""Checks of ranks that do not agree: one clear error on every rank, and no rank that waits."""

import io
import os
import sys
import warnings

import numpy as np
import pytest
from ranks_common import LAST, comm, raised

from fastopt import EmbeddingTable, optimizer
from fastopt.distributed import (
    ShardedEmbeddingTable,
    ShardedTable,
    ShardedUpdater,
    embedding,
    tables,
)
from fastopt.mpi.communicator import _say_farewell


def updater(**arguments):
    return ShardedUpdater(optimizer.SGD(**arguments), comm)


def check_a_forked_process_takes_no_part_as_its_rank():
    """Its calls are errors, its errors do not end the job, and its end is no end of the rank."""
    made, weight = updater(learning_rate=1.0), np.zeros(4, np.float32)
    made(0, np.ones(4, np.float32), weight)
    comm.Barrier()
    if LAST:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other threads
            child = os.fork()
        if not child:
            status = 1
            try:
                for call in (lambda: made(0, 9 * weight, weight), updater):
                    with raised(RuntimeError, "this process was forked from a rank"):
                        call()
                sys.stderr = io.StringIO()
                sys.excepthook(LookupError, LookupError("of the child"), None)
                _say_farewell()
                status = 0 if "of the child" in sys.stderr.getvalue() else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    made(0, np.ones(4, np.float32), weight)
    assert (weight == -2 * comm.size).all()


def check_an_error_of_one_rank_in_a_lookup_or_pull_is_reported_to_the_others():
    class Failing:
        def __init__(self, *arguments):
            raise MemoryError("no memory for the routes")

    for module in (tables, embedding):
        other = comm.Dup()
        if module is tables:
            call = ShardedTable((9, 2), optimizer.SGD(), other, timeout=30).pull
        else:
            own = EmbeddingTable(2, optimizer.SGD(lazy_update=True), init="ones")
            call = ShardedEmbeddingTable(own, other, timeout=30).lookup
        call([1, 2])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "RowExchange", Failing if LAST else module.RowExchange)
            with raised((MemoryError, RuntimeError), "MemoryError: " * (not LAST), "no memory for"):
                call([1, 2])
        comm.Barrier()
