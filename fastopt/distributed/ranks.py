"""Ranks of a private communicator, with waits that detect missing ranks.

Reason: a rank that ended, failed or is late is an error of the others in time, which names it.
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fastopt._interrupts import uninterrupted
from fastopt.arguments import number
from fastopt.distributed.communicator import Communicator, Request, rest

LIMIT = 1800.0
"""Default time limit of waits, in seconds."""

VARIABLE = "FASTOPT_MPI_TIMEOUT"
"""Environment variable that overrides the default time limit, in seconds."""

LOOK = 0.05
"""Seconds between checks for messages of other ranks while an operation is pending."""

GRACE = 2.0
"""Seconds within which waiting ranks must answer a query."""

SILENT = "does not answer: it is", "do not answer: they are"
"""Words for one rank that does not answer a query, and for several."""

PROCESS = os.getpid()
"""The process that takes part as a rank; the processes that it forks do not."""


def time_limit(timeout: float | None) -> float:
    """Time limit in seconds: the argument, else the environment variable, else the default."""
    if timeout is not None:
        return number("timeout", timeout, least=0)
    text = os.environ.get(VARIABLE)
    if not text:
        return LIMIT
    try:
        return number(VARIABLE, float(text), least=0)
    except ValueError:
        raise ValueError(f"{VARIABLE} must be a number of seconds, got {text!r}") from None


def is_forked() -> bool:
    """Whether this process was forked from the one of a rank."""
    return os.getpid() != PROCESS


def refuse_forked(call: str) -> None:
    """Raise RuntimeError in a process that was forked from the one of a rank."""
    if is_forked():
        raise RuntimeError(
            f"{call}: this process was forked from a rank, and only the rank can make the call; "
            "return its arguments to the rank"
        )


def listing(ranks: Iterable[int]) -> str:
    """Format rank numbers, with ranges for consecutive ones.

    Examples
    --------
    >>> from fastopt.distributed.ranks import listing
    >>> listing([3]), listing([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    intervals = [f"{first}-{last}" if first < last else str(first) for first, last in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if single else 's'} {', '.join(intervals)}"


class Ranks:
    """Ranks of a private communicator, which wait for each other for a limited time.

    While it waits, a rank reads messages of other ranks: a rank has left, or asks which call this
    one is in. After the time limit the rank queries all others, and names those that are missing.

    Parameters
    ----------
    comm : Communicator
        The communicator; nothing else may use it.

    Attributes
    ----------
    timeout : float
        Seconds to wait for an operation.
    call : str
        Current call, for messages.
    waits : int
        Number of operations waited for, equal on all ranks that are in the same operation.
    broken : str
        Reason why the communicator can no longer be used, else empty.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.timeout = time_limit(None)
        self.call = "the first call"
        self.waits = 0
        self.broken = ""
        self._left: dict[int, tuple[int, str]] = {}
        self._here: dict[int, tuple[int, str]] = {}
        self._sent: list[Any] = []
        self._unfinished: list[Any] = []

    def begin(self, call: str, timeout: float) -> None:
        """Record the start of a call, for messages.

        Raises
        ------
        RuntimeError
            An earlier call failed on some ranks while others were waiting, or this process was
            forked from the one of the rank.
        """
        refuse_forked(call)
        if self.broken:
            raise RuntimeError(
                f"{call}: the ranks are no longer in step, since {self.broken}; make a new updater "
                "on all ranks and load a checkpoint"
            )
        self.call, self.timeout = call, timeout

    def wait(self, request: Request, sleep: float = 0.0) -> None:
        """Wait until an operation completes, yielding the CPU to other processes.

        MPI libraries wait in a busy loop, which takes CPU time from the very ranks that they wait
        for if there are more ranks than CPUs. `sleep` is the number of seconds to sleep between
        tests, for waits while other ranks compile.

        Raises
        ------
        TimeoutError
            The operation did not complete within the time limit; the message names the missing
            ranks.
        RuntimeError
            A rank left or failed without taking part.
        """
        self.waits += 1
        if self._is_complete(request):
            return
        start = time.monotonic()
        look = start + LOOK
        while not self._is_complete(request):
            time.sleep(sleep) if sleep else rest(request, LOOK)
            now = time.monotonic()
            if now >= look:
                self._look(request, now - start)
                look = time.monotonic() + LOOK

    def _is_complete(self, request: Request) -> bool:
        """Whether an operation is complete; raise RuntimeError if it has failed."""
        try:
            return request.Test()
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RuntimeError:
        """Fail, as a connection was closed by another rank; return the error to raise."""
        text = f"the connection to another rank failed: {error}"
        try:
            end = self._query()
            while time.monotonic() < end and not self._left:
                self.read()
                time.sleep(0.01)
            if silent := [rank for rank in self._others() if rank not in self._here]:
                text += f"; no answer from {listing(silent)}"
        except Exception as problem:  # what carries messages has ended
            text = str(problem)
        gone = [f"rank {rank} {self._left[rank][1]}" for rank in sorted(self._left)[:1]]
        reason = gone or [text]
        failure = RuntimeError(f"{self.call}: {reason[0]}")
        self.fail(f"gave up: {failure}")
        return failure

    def out_of_step(self) -> bool:
        """Whether a rank is known to have left."""
        with suppress(Exception):
            self.read()
            return bool(self.broken or self._left)
        return True  # what carries messages has ended

    def leave(self, reason: str) -> None:
        """Notify all other ranks that this one takes part in no further operation."""
        self._tell(self._others(), kind="left", text=reason)

    def fail(self, reason: str) -> None:
        """Leave, and make all later calls raise an error."""
        if self.size > 1 and not self.broken:
            self.broken = f"rank {self.rank} {reason}"
            with suppress(Exception):  # the connection itself may have failed
                self.leave(reason)

    def read(self) -> None:
        """Read messages of other ranks, and answer queries."""
        while (mail := self.comm.receive()) is not None:
            source, message = mail[0], json.loads(mail[1])
            entry = message["waits"], message["text"]
            if message["kind"] == "where":
                self._tell([source], kind="here", text=self.call)
            elif message["kind"] == "left":
                self._left.setdefault(source, entry)  # the first reason is the cause
            else:
                self._here[source] = entry
        self._sent = [request for request in self._sent if not request.Test()]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._left]

    def _tell(self, ranks: Iterable[int], **message: object) -> None:
        data = json.dumps({**message, "waits": self.waits}).encode()
        self._sent += [self.comm.send(rank, data) for rank in ranks]

    def _look(self, request: Request, waited: float) -> None:
        """Raise if the operation cannot complete, or has not completed in time."""
        try:
            self.read()
        except Exception as error:
            self._unfinished.append(request)  # see _give_up()
            raise self._lost(error) from error
        gone = {rank: text for rank, (waits, text) in self._left.items() if waits < self.waits}
        if gone and not request.Test():
            rank = min(gone)
            self._give_up(request, RuntimeError(f"{self.call}: rank {rank} {gone[rank]}"))
        if uninterrupted.pending:
            self._give_up(request, KeyboardInterrupt())
        if waited > self.timeout:
            self._ask(request)

    def _query(self) -> float:
        """Query the current call of all ranks; return the time until which they may answer."""
        self._here.clear()
        self._tell(self._others(), kind="where", text=self.call)
        return time.monotonic() + GRACE

    def _ask(self, request: Request) -> None:
        """Query all ranks; raise unless the operation completes meanwhile."""
        end = self._query()
        while time.monotonic() < end:
            self.read()
            if request.Test():
                return
            time.sleep(0.001)
        silent, elsewhere = list[int](), dict[str, list[int]]()
        for rank in self._others():
            waits, call = self._here.get(rank, (-1, ""))
            if waits < 0:
                silent.append(rank)
            elif waits < self.waits:
                elsewhere.setdefault(call, []).append(rank)
        missing = [f"{listing(ranks)}, which waits in {call}" for call, ranks in elsewhere.items()]
        if silent:
            words = f"{SILENT[len(silent) > 1]} stopped, or busy outside of fastopt"
            missing.append(f"{listing(silent)}, which {words}")
        reason = "; ".join(missing) or "no rank: all of them wait for the same operation"
        message = f"{self.call}: waited {self.timeout:g} s for {reason}"
        self._give_up(request, TimeoutError(message))

    def _give_up(self, request: Request, error: BaseException) -> None:
        self._unfinished.append(request)  # keeps its arrays alive, which MPI may still use
        self.fail(f"gave up: {error}" if str(error) else "was interrupted")
        raise error
