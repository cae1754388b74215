"""The moment of a call up to which nothing has changed, and at which all ranks agree."""

from collections.abc import Callable, Sequence

from fastopt.kernels.table import Table
from fastopt.mpi.agreement import Fact, agree, attempt
from fastopt.mpi.fingerprint import hyper_of
from fastopt.mpi.ranks import Ranks
from fastopt.optimizer.optimizer import Optimizer

__all__ = ["Gate", "Stopped"]


class Stopped(Exception):
    """Ends an update that has changed nothing; passes all that handles errors of kernels.

    Parameters
    ----------
    error : Exception or None
        What the call raises; None if no rank has work.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__(error)
        self.error = error


class Gate:
    """Agreement about one call: once before the first operation of all ranks, whichever it is.

    Where that is the launch of kernels, hyper-parameters are compared as kernels read them. Where
    something comes before, such as sums of norms, these are compared by a second agreement. So an
    error of one rank before a launch meets an agreement of the others, and all ranks raise it.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    optimizer : Optimizer
        Of the updater.
    facts : callable
        Returns what the ranks must have in common.
    active : bool
        Whether this rank has work of its own.
    """

    def __init__(
        self,
        ranks: Ranks,
        optimizer: Optimizer,
        facts: Callable[[], Sequence[Fact]],
        active: bool = True,
    ) -> None:
        self.ranks, self.optimizer, self.facts, self.active = ranks, optimizer, facts, active
        self.passed = self.added = self.launched = False

    def enter(self, error: Exception | None = None) -> None:
        """Agree, if that has not been done; an error of this rank is one of all."""
        if not self.passed or error is not None:
            self._agree((), error)

    def add(self) -> None:
        """Agree before sums over all ranks, even if it has been done: a rank may have failed."""
        self.added = True
        self._agree((), None)

    def launch(self, tables: Sequence[Table]) -> None:
        """Agree about a launch."""
        self.launched = True
        if self.ranks.size > 1:
            self._agree([hyper_of(tables, self.optimizer)], None)

    def _agree(self, more: Sequence[Fact], error: Exception | None) -> None:
        facts: Sequence[Fact] = ()
        if not self.passed and self.ranks.size > 1 and error is None:
            found, error = attempt(self.facts)
            facts = found or ()
        goes_on, problem = attempt(agree, self.ranks, [*facts, *more], error, self.active)
        if problem is not None or not goes_on:
            raise Stopped(problem)
        self.passed = True
