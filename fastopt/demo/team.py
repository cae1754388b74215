"""MPI ranks that train a demo together, or a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Self

import numpy as np

from fastopt.demo import common


class Team:
    """Ranks that each process a part of every batch.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Communicator of the ranks. Default: a single process.

    Examples
    --------
    >>> from fastopt.demo.team import Team
    >>> list(range(5))[Team().part], Team().mean(0.5, 5, 5)
    ([0, 1, 2, 3, 4], 0.5)
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    @classmethod
    def of(cls, mpi: bool) -> Self:
        """Return the team of all ranks of the job if `mpi` is True, else of this process.

        Raises
        ------
        Refused
            mpi4py or an MPI library is missing.
        """
        return cls(common.need("fastopt.mpi", extra="mpi")[0].MPI.COMM_WORLD if mpi else None)

    @property
    def part(self) -> slice:
        """Slice of the examples of a batch that this rank processes."""
        return slice(self.rank, None, self.size)

    def mean(self, loss: float, own: int, every: int) -> float:
        """Return the mean loss of a batch from each rank's mean over its own examples."""
        if self.comm is None:
            return loss
        total = np.empty(self.size)
        self.comm.Allgather(np.array([loss * own]), total)
        return float(total.sum()) / every

    @contextmanager
    def first_speaks(self) -> Iterator[None]:
        """Let only the first rank print."""
        if self.rank == 0:
            yield
            return
        with open(os.devnull, "w", encoding="utf-8") as none, redirect_stdout(none):  # noqa: SIM117
            with redirect_stderr(none):
                yield
