"""Ranks on which the checks of ``tests/distributed/ranks`` run, and their loading for each rank."""

import importlib
import itertools
import pickle
import re
import sys
import threading
import time
import warnings
from functools import partial

import numpy as np

from fastopt.distributed.threads import Board, ThreadRank, run_threads
from helpers.paths import TESTS

CHECKS = TESTS / "distributed" / "ranks"
LIMIT = 120.0
THREADS_CANNOT = {
    "check_a_path_that_is_another_directory_on_each_rank",
    "check_an_error_after_the_index_was_replaced_leaves_the_new_checkpoint",
    "check_python_of_a_step_does_not_grow_with_tensors",
    "check_state_is_shared_out",
}
"""Checks that change or measure their process, or whose plain updater must be alone in it."""
OF_FORMULAS = {"check_settings"}
"""Checks that send the same over every communicator; threads or MPI run them, torch does not."""


class World:
    """What checks ask of a communicator of mpi4py besides its use by updaters.

    Adds these methods to a :class:`fastopt.distributed.Communicator`.
    """

    def allgather(self, value):
        """Objects of all ranks."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = len(data)
        eights = [8] * self.size, [*range(0, 8 * self.size, 8)]
        self._await(self.all_gather(sizes.view(np.uint8), eights))
        ends = np.cumsum(sizes)
        every = np.empty(ends[-1], np.uint8)
        every[ends[self.rank] - len(data) : ends[self.rank]] = data
        self._await(self.all_gather(every, (sizes.tolist(), (ends - sizes).tolist())))
        return [pickle.loads(part) for part in np.split(every, ends[:-1])]

    def bcast(self, value):
        """Object of the first rank."""
        return self.allgather(value)[0]

    def Barrier(self):
        """Wait for all ranks."""
        self.allgather(None)

    def Dup(self):
        """Another communicator with the same ranks."""
        copy, request = self.duplicate()
        self._await(request)
        copy.__class__ = type(self)
        return copy

    def Free(self):
        """Free a communicator and what is attached to it."""
        if "_attached" in vars(self):
            self._attached.free()
        self.free()

    def _await(self, request):
        end = time.monotonic() + LIMIT
        while not request.Test():
            assert time.monotonic() < end, "another rank does not come"
            time.sleep(0.0002)


class ThreadWorld(World, ThreadRank):
    """Threads as ranks."""


class NodeWorld(ThreadWorld):
    """Threads as ranks of several nodes."""

    sizes = (2,)
    """Number of ranks of each node; the last one is that of all others, or what is left."""

    @classmethod
    def nodes(cls, ranks):
        """First and last + 1 of the ranks of each node, which are consecutive."""
        ends = [0]
        while ends[-1] < ranks:
            size = cls.sizes[min(len(ends), len(cls.sizes)) - 1]
            ends.append(min(ends[-1] + size, ranks))
        return [*itertools.pairwise(ends)]

    def on_node(self):
        """Communicator of the ranks on this node."""
        first, last = next(node for node in self.nodes(self.size) if self.rank < node[1])
        size = last - first
        other = ThreadRank(Board(size), self.rank - first)
        self._await(self._post(other._board, lambda every: setattr(other, "_board", every[first])))
        return other


class Loading:
    """The communicator of the rank for which modules are being loaded."""

    comm = None
    lock = threading.Lock()


def load(name, comm):
    """Module of checks for one rank; threads have one each, since constants depend on the rank."""
    with Loading.lock:
        Loading.comm = comm
        for own in ("ranks_common", name):
            sys.modules.pop(own, None)
        if str(CHECKS) not in sys.path:
            sys.path.append(str(CHECKS))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* replaces .* in the registry")
                return importlib.import_module(name)
        finally:
            for own in ("ranks_common", name):
                sys.modules.pop(own, None)


def names_of(name):
    """Names of the checks of a module that need not be loaded."""
    return re.findall(r"^def (check_\w+)", (CHECKS / f"{name}.py").read_text("utf-8"), re.MULTILINE)


def call_checks(comm, name, *arguments, skipped=(), prints=True):
    """Call the checks of a module on a rank, in order, but those `skipped`; return their names."""
    module = load(name, comm)
    comm.Barrier()  # until all are loaded, as this sets filters of warnings
    found = [check for check in names_of(name) if check not in skipped]
    for check in found:
        getattr(module, check)(*arguments)
        comm.Barrier()
        if prints and comm.rank == 0:
            print("passed", check, flush=True)
    return found


def run_checks(size, name, *arguments, skipped=(), kind=ThreadWorld):
    """Run the checks of a module in threads; return their names."""
    call = partial(call_checks, skipped=skipped, prints=False)
    return run_threads(size, lambda comm: call(comm, name, *arguments), kind)[0]
