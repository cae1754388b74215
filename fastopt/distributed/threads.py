"""Ranks that are threads of one process, to try out and test programs without a launcher.

Reason: the checks of all modules run without an MPI library.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastopt.arguments import brief, count
from fastopt.distributed.communicator import Communicator, Parts, Request
from fastopt.optimizer.optimizer import Array

BREAK = 0.00002
"""Seconds in which a rank that waits leaves the interpreter to others."""


@dataclass
class Board:
    """What the ranks of a communicator have posted."""

    size: int
    ended: set[int] = field(default_factory=set)
    """Ranks whose programs are over, of all communicators together."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    posted: dict[int, list[Any]] = field(default_factory=dict)
    """Data of each rank, by the number of the operation; removed once all have read them."""
    readers: dict[int, int] = field(default_factory=dict)
    mail: list[deque[tuple[int, bytes]]] = field(init=False)

    def __post_init__(self) -> None:
        self.mail = [deque() for _ in range(self.size)]


class ThreadRequest:
    """An operation, which reads the data of all ranks once they have been posted."""

    def __init__(self, board: Board, number: int, rank: int, data: object, read: Any) -> None:
        self.board, self.number, self.read = board, number, read
        with board.lock:
            board.posted.setdefault(number, [None] * board.size)[rank] = (data,)

    def Test(self) -> bool:
        """See :class:`Request`."""
        if self.read is None:
            return True
        board, number = self.board, self.number
        with board.lock:
            every = board.posted[number]
            if None not in every:
                self.read([data for (data,) in every])
                self.read = None
                board.readers[number] = board.readers.get(number, 0) + 1
                if board.readers[number] == board.size:
                    del board.posted[number], board.readers[number]
                return True
            missing = {rank for rank, posted in enumerate(every) if posted is None} & board.ended
        if missing:
            raise RuntimeError(
                f"rank {min(missing)} has ended; ranks with unequal numbers of steps use join()"
            )
        time.sleep(BREAK)
        return False


class ThreadRank:
    """Communicator of one of several threads, see :func:`run_threads`."""

    sends_in_memory = True

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.size = rank, board.size
        self._board, self._number = board, 0

    def _post(self, data: object, read: Callable[[list[Any]], None]) -> Request:
        self._number += 1
        return ThreadRequest(self._board, self._number, self.rank, data, read)

    def all_reduce_max(self, values: Array) -> Request:
        """See :class:`Communicator`."""

        def read(every: list[Array]) -> None:
            values[...] = np.max(every, axis=0)

        return self._post(values.copy(), read)

    def all_gather(self, data: Array, parts: Parts) -> Request:
        """See :class:`Communicator`."""
        slices = _slices(data, parts)

        def read(every: list[Array]) -> None:
            for part, came in zip(slices, every, strict=True):
                part[...] = came

        return self._post(slices[self.rank].copy(), read)

    def all_to_all(self, source: Array, sent: Parts, target: Array, received: Parts) -> Request:
        """See :class:`Communicator`."""
        slices = _slices(target, received)

        def read(every: list[list[Array]]) -> None:
            for part, came in zip(slices, every, strict=True):
                part[...] = came[self.rank]

        return self._post([part.copy() for part in _slices(source, sent)], read)

    def barrier(self) -> Request:
        """See :class:`Communicator`."""
        return self._post(None, lambda every: None)

    def send(self, rank: int, message: bytes) -> Request:
        """See :class:`Communicator`."""
        self._board.mail[rank].append((self.rank, message))
        return _Done()

    def receive(self) -> tuple[int, bytes] | None:
        """See :class:`Communicator`."""
        mail = self._board.mail[self.rank]
        return mail.popleft() if mail else None

    def duplicate(self) -> tuple[Communicator, Request]:
        """See :class:`Communicator`."""
        other = type(self)(Board(self.size, self._board.ended), self.rank)

        def read(every: list[Board]) -> None:
            other._board = every[0]

        request = self._post(other._board, read)
        return other, request

    def on_node(self) -> Communicator:
        """See :class:`Communicator`."""
        other, request = self.duplicate()
        while not request.Test():
            pass
        return other

    def free(self) -> None:
        """See :class:`Communicator`."""


class _Done:
    """An operation that is complete."""

    def Test(self) -> bool:
        """See :class:`Request`."""
        return True


def _slices(data: Array, parts: Parts) -> list[Array]:
    return [data[start : start + count] for count, start in zip(*parts, strict=True)]


def run_threads(
    size: int, program: Callable[[Any], Any], kind: type[ThreadRank] = ThreadRank
) -> list[Any]:
    """Call a program in `size` threads, each with its own communicator, and return its results.

    The threads share one Python interpreter, so this is for tests and trials, not for speed.

    Parameters
    ----------
    size : int
        Number of ranks.
    program : callable
        Function of a communicator.
    kind : type
        Class of the communicators, derived from :class:`ThreadRank`.

    Raises
    ------
    TypeError, ValueError
        `size` is not an integer of at least 1, or `program` is not callable.
    BaseException
        The first error of a rank.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> from fastopt.distributed import ShardedUpdater, run_threads
    >>> def program(comm):
    ...     updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1), comm)
    ...     weight = np.ones(3)
    ...     updater(0, np.full(3, float(comm.rank)), weight)
    ...     return weight
    >>> run_threads(2, program)
    [array([0.9, 0.9, 0.9]), array([0.9, 0.9, 0.9])]
    """
    size = count("size", size)
    if not callable(program):
        raise TypeError(f"program must be a function of a communicator, got {brief(program)}")
    board = Board(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        comm = kind(board, rank)
        try:
            results[rank] = program(comm)
        except BaseException as error:
            errors.append(error)
        finally:
            if (job := vars(comm).get("_attached")) is not None:
                job.end()
            board.ended.add(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
