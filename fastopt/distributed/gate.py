"""The point in a call at which all ranks agree, before anything changes."""

from collections.abc import Callable, Sequence

from fastopt.distributed.agreement import Fact, agree, attempt
from fastopt.distributed.ranks import Ranks


class Stopped(Exception):
    """Raised to end an update that has changed nothing; bypasses the handling of kernel errors.

    Parameters
    ----------
    error : Exception or None
        Error that the call raises; None if no rank has work.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__(error)
        self.error = error


class Gate:
    """Agreement on one call, made once, before its first collective operation or kernel launch.

    At an update, the hyper-parameters are compared as the kernels read them. If another operation
    comes first, such as sums of norms, a second agreement at the launch compares them. So an error
    on one rank before the launch always meets an agreement on the others, and all ranks raise it.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    facts : callable
        Function that returns the facts to compare.
    active : bool
        Whether this rank has work of its own.
    apart : bool
        Whether arrays of this rank are apart in memory; once agreed, whether those of any rank are.
    """

    def __init__(
        self,
        ranks: Ranks,
        facts: Callable[[], Sequence[Fact]],
        active: bool = True,
        apart: bool = False,
    ) -> None:
        self.ranks, self.facts, self.active, self.apart = ranks, facts, active, apart
        self.passed = self.added = self.launched = False

    def enter(self, error: Exception | None = None) -> None:
        """Agree, unless already done; an error on this rank is raised on all ranks."""
        if not self.passed or error is not None:
            self._agree((), error)

    def add(self) -> None:
        """Agree before sums over all ranks, even if already done: a rank may have failed since."""
        self.added = True
        self.again()

    def again(self, error: Exception | None = None) -> None:
        """Agree, even if already done, on whether a rank has failed since."""
        self._agree((), error)

    def launch(self, hyper: Callable[[], Fact]) -> None:
        """Agree on the hyper-parameters of an update."""
        self.launched = True
        self._agree([hyper()], None)

    def _agree(self, more: Sequence[Fact], error: Exception | None) -> None:
        facts: Sequence[Fact] = ()
        if not self.passed and self.ranks.size > 1 and error is None:
            found, error = attempt(self.facts)
            facts = found or ()
        own = self.active, self.apart
        agreed, problem = attempt(agree, self.ranks, [*facts, *more], error, *own)
        if problem is not None or not agreed.active:
            raise Stopped(problem)
        self.apart = agreed.apart
        self.passed = True
