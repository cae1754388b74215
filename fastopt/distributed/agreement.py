"""Collective operations on arrays, and the agreement of all ranks on each call.

Reason: errors are agreed before anything changes, and all ranks raise the same one; sums of whole
tensors have the order of the ranks, whatever the library.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._kernels import checksum as kernels
from fastopt._kernels import copying
from fastopt._kernels.compiling import bind
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.distributed.communicator import Parts
from fastopt.distributed.ranks import Ranks, listing
from fastopt.optimizer.optimizer import Array

Counts = NDArray[np.int64]
"""Numbers of items: a row for each array, a column for each rank."""

MOST = 2**31 - 1
"""Limit on the units in one operation; some MPI libraries have 32-bit counts."""

UNIT = 64
"""Bytes of a unit of several arrays, to whose multiple the data for each rank is padded: with
:data:`MOST` units, a rank can send and receive 128 GiB."""

APART_FROM = 1 << 20
"""Bytes of the arrays of all ranks from which no rank receives all of them to sum them."""


@cache
def copier(parallel: bool = True) -> Any:
    """Compiled :func:`fastopt._kernels.copying.copy`."""
    return bind(copying.copy(parallel), np.empty((0, 3), np.int64), 0)


def gathered_together(ranks: Ranks, arrays: Sequence[Array]) -> tuple[list[Array], Counts]:
    """Concatenate the items of all ranks, in rank order, for each of several arrays.

    Also return their number for each rank. This takes two operations, or more beyond :data:`MOST`
    units.
    """
    counts = of_all(ranks, np.array([len(array) for array in arrays], np.int64)).T
    rounds = -(-_units(arrays, counts, _size(arrays)).sum() // MOST)
    if rounds <= 1:
        return _gather(ranks, arrays, counts), counts
    results = _allocated(arrays, counts)
    starts = np.cumsum(counts, axis=1) - counts
    for k in range(rounds):
        first, last = counts * k // rounds, counts * (k + 1) // rounds
        slices = zip(arrays, first[:, ranks.rank], last[:, ranks.rank], strict=True)
        came = _gather(ranks, [array[begin:end] for array, begin, end in slices], last - first)
        for t, part in enumerate(came):
            ends = np.cumsum(last[t] - first[t])
            for piece, begin in zip(np.split(part, ends[:-1]), starts[t] + first[t], strict=True):
                results[t][begin : begin + len(piece)] = piece
    return results, counts


def _gather(ranks: Ranks, arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Gather several arrays from all ranks in one operation."""
    results, size = _allocated(arrays, counts), _size(arrays)
    if size:
        parts = _parts(_units(arrays, counts, size) * size)
        target = _buffer(results, sum(parts[0]))
        count, start = parts[0][ranks.rank], parts[1][ranks.rank]
        target[start : start + count] = _packed(arrays, counts[:, [ranks.rank]], size)
        ranks.wait(ranks.comm.all_gather(target, parts))
        _unpack(target, results, counts, size)
    return results


def exchanged(ranks: Ranks, arrays: Sequence[Array], sent: Counts, received: Counts) -> list[Array]:
    """Send items of several arrays to other ranks, and receive theirs, in one operation.

    The items of an array are ordered by the target rank; received items by the source rank.
    """
    results, size = _allocated(arrays, received), _size(arrays)
    if size:
        there, here = (_parts(_units(arrays, numbers, size) * size) for numbers in (sent, received))
        source, target = _packed(arrays, sent, size), _buffer(results, sum(here[0]))
        ranks.wait(ranks.comm.all_to_all(source, there, target, here))
        _unpack(target, results, received, size)
    return results


def of_all(ranks: Ranks, array: Array) -> Array:
    """The arrays of all ranks, which have one shape and dtype, stacked in rank order."""
    every = np.empty((ranks.size, *array.shape), array.dtype)
    every[ranks.rank] = array
    ranks.wait(ranks.comm.all_gather(_bytes(every), _parts([array.nbytes] * ranks.size)))
    return every


def added(ranks: Ranks, array: Array) -> Array:
    """The sum of the float64 arrays of all ranks, in rank order, so that all have the same bits.

    Each rank sums an equal part of the arrays and sends it to all, if :data:`APART_FROM` says so.
    """
    if ranks.size * array.nbytes < APART_FROM:
        return reduce(add, of_all(ranks, array), np.zeros(array.shape))
    numbers = np.arange(ranks.size + 1) * array.size // ranks.size
    first, last = numbers[ranks.rank : ranks.rank + 2]
    counts = np.diff(numbers)
    parts = np.full((1, ranks.size), last - first)
    (every,) = exchanged(ranks, [array.reshape(-1)], counts[None], parts)
    total = np.empty(array.shape)
    total.reshape(-1)[first:last] = reduce(add, every.reshape(ranks.size, -1), 0.0)
    ranks.wait(ranks.comm.all_gather(_bytes(total), _parts(counts * array.itemsize)))
    return total


def transposed(ranks: Ranks, sent: Array) -> Array:
    """Item `k` of each rank, for this rank's number `k`, stacked in rank order."""
    sent = np.ascontiguousarray(sent)
    came, parts = np.empty_like(sent), _parts([sent[0].nbytes] * ranks.size)
    ranks.wait(ranks.comm.all_to_all(_bytes(sent), parts, _bytes(came), parts))
    return came


def share_texts(ranks: Ranks, text: str) -> list[str]:
    """Gather a string from each rank."""
    (data,), (sizes,) = gathered_together(ranks, [np.frombuffer(text.encode(), np.uint8)])
    return [part.tobytes().decode() for part in np.split(data, np.cumsum(sizes)[:-1])]


def _item(array: Array) -> int:
    """Bytes of an item."""
    size: int = array.itemsize * math.prod(array.shape[1:])
    return size


def _size(arrays: Sequence[Array]) -> int:
    """Bytes of a unit: an item of a single array, else UNIT; 0 if no item has bytes."""
    items = [_item(array) for array in arrays]
    return items[0] if len(items) == 1 else UNIT * any(items)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _units(arrays: Sequence[Array], counts: Counts, size: int) -> NDArray[np.int64]:
    """Number of units of `size` bytes sent to, or received from, each rank."""
    items: NDArray[np.int64] = np.array([_item(array) for array in arrays])
    return -(-(items @ counts) // max(size, 1))


def _allocated(arrays: Sequence[Array], counts: Counts) -> list[Array]:
    """Empty arrays for the items from all ranks, with the item shapes and dtypes of `arrays`."""
    totals = counts.sum(axis=1).tolist()
    return [np.empty((n, *a.shape[1:]), a.dtype) for a, n in zip(arrays, totals, strict=True)]


def _parts(counts: Sequence[int] | Counts) -> Parts:
    """Consecutive parts with these numbers of bytes."""
    ends = np.cumsum(counts)
    return [*map(int, counts)], (ends - counts).tolist()


def _segments(arrays: Sequence[Array], counts: Counts, data: Array, size: int) -> Counts:
    """Address of each segment in the arrays and in the data that is sent, and its bytes."""
    items = np.array([[_item(array)] for array in arrays], np.int64)
    nbytes, units = counts * items, _units(arrays, counts, size)
    inside = np.array([[array.ctypes.data] for array in arrays]) + np.cumsum(nbytes, 1) - nbytes
    outside = data.ctypes.data + size * (np.cumsum(units) - units) + np.cumsum(nbytes, 0) - nbytes
    return np.stack([inside, outside, nbytes], axis=2)[nbytes > 0]


def _packed(arrays: Sequence[Array], counts: Counts, size: int) -> Array:
    """Bytes of all arrays, in rank order."""
    if len(arrays) == 1:
        return _bytes(arrays[0])
    data = np.zeros(int(_units(arrays, counts, size).sum()) * size, np.uint8)
    arrays = [*map(np.ascontiguousarray, arrays)]
    copier(False)(_segments(arrays, counts, data, size), 0)
    return data


def _buffer(results: Sequence[Array], nbytes: int) -> Array:
    """Receive buffer; the memory of the result itself if there is only one."""
    return _bytes(results[0]) if len(results) == 1 else np.empty(nbytes, np.uint8)


def _unpack(data: Array, results: Sequence[Array], counts: Counts, size: int) -> None:
    """Copy the received bytes to the results."""
    if len(results) > 1:
        segments = _segments(results, counts, data, size)
        copier(False)(segments[:, [1, 0, 2]].copy(), 0)


def _digest(parts: Iterable[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 2


class Facts(dict[str, str]):
    """Facts given as strings by name."""

    @cached_property
    def digest(self) -> int:
        """See :class:`Fact`."""
        return _digest([json.dumps(self, sort_keys=True).encode()])

    def in_words(self) -> Mapping[str, str]:
        """See :class:`Fact`."""
        return self


class Numbers:
    """Facts given as arrays, which are formatted only if ranks differ.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        The values.
    describe : callable
        Function that returns names and values as strings.
    """

    def __init__(self, arrays: Sequence[Array], describe: Callable[[], Mapping[str, str]]) -> None:
        self.digest = _digest(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays
        )
        self.in_words = describe


Fact = Facts | Numbers
"""Values that must be equal on all ranks: their hash of 62 bits, and in words for an error."""

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointError, MemoryError, NotImplementedError, OSError, TypeError, ValueError)
}
"""Exceptions that all ranks raise with the original type; others become RuntimeErrors."""


class Agreed(NamedTuple):
    """What :func:`agree` has found on any rank."""

    active: bool
    apart: bool


def attempt(work: Callable[..., Any], *arguments: object) -> tuple[Any, Exception | None]:
    """Call a function; return its result and None, or None and the exception that it raised."""
    try:
        return work(*arguments), None
    except Exception as error:
        return None, error


def agree(
    ranks: Ranks,
    facts: Sequence[Fact] = (),
    error: Exception | None = None,
    active: bool = True,
    apart: bool = False,
) -> Agreed:
    """Raise on every rank if some rank has an error or the facts of the ranks differ.

    Parameters
    ----------
    ranks : Ranks
        The ranks; all of them must make this call.
    facts : sequence of Fact
        Values that must be equal on all ranks. Only digests are compared unless they differ.
    error : Exception, optional
        Error on this rank.
    active : bool
        Whether this rank has work of its own, see :meth:`fastopt.distributed.ShardedUpdater.join`.
    apart : bool
        Whether arrays of this rank are apart in memory.

    Returns
    -------
    Agreed
        Whether any rank is active, and whether arrays are apart on any. If no rank is active,
        nothing is compared.
    """
    try:
        return _compared(ranks, facts, error, active, apart)
    except Exception as agreed:
        vars(agreed)["_is_agreed"] = True
        raise


def is_agreed(error: BaseException) -> bool:
    """Whether all ranks raise an error, after an agreement."""
    return "_is_agreed" in vars(error)


def _compared(
    ranks: Ranks, facts: Sequence[Fact], error: Exception | None, active: bool, apart: bool
) -> Agreed:
    """See :func:`agree`."""
    if ranks.size == 1:
        if error is not None and active:
            raise error
        return Agreed(active, apart)
    number = hash(tuple(part.digest for part in facts)) >> 2  # hash of ints is not randomized
    seen = np.array([active, error is not None, number, -number, apart], np.int64)
    ranks.wait(ranks.comm.all_reduce_max(seen))
    agreed = Agreed(bool(seen[0]), bool(seen[4]))
    if not agreed.active:
        return agreed
    if seen[1]:
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS]
        report = None if error is None else [(names or ["RuntimeError"])[0], str(error)]
        _raise_first(share_texts(ranks, json.dumps(report)), error)
    if seen[2] != -seen[3]:
        facts_here = {name: fact for part in facts for name, fact in part.in_words().items()}
        every = [json.loads(text) for text in share_texts(ranks, json.dumps(facts_here))]
        raise ValueError(f"ranks disagree: {_difference(every)}")
    return agreed


def _raise_first(texts: list[str], error: Exception | None) -> None:
    rank, report = next((r, json.loads(text)) for r, text in enumerate(texts) if text != "null")
    raise KINDS.get(report[0], RuntimeError)(f"rank {rank}: {report[1]}") from error


def _difference(every: list[dict[str, str]]) -> str:
    """Describe the first fact that differs, with the ranks that have each value."""
    for name in dict.fromkeys(name for facts in every for name in facts):
        owners: dict[str, list[int]] = {}
        for rank, facts in enumerate(every):
            owners.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(owners) > 1:
            values = [
                f"{listing(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
                for value, ranks in owners.items()
            ]
            return f"for {name} {', '.join(values)}"
    raise AssertionError("digests of equal facts differ")


class Idle(Exception):
    """Raised at the agreement on a call in which no rank has work of its own."""


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
            every, error = attempt(self.facts)
            facts = every or ()
        agreed = agree(self.ranks, [*facts, *more], error, self.active, self.apart)
        if not agreed.active:
            raise Idle
        self.apart = agreed.apart
        self.passed = True
        self.facts = tuple  # the object that they are read from is in no cycle


Segments = NDArray[np.int64]
"""Segments of memory, a row for each: address and number of bytes."""


@cache
def summer() -> Any:
    """Compiled :func:`fastopt._kernels.checksum.checksums`."""
    return bind(kernels.checksums(), np.empty((0, 2), np.int64), np.empty(0, np.uint64))


def checksum(elements: ArrayLike) -> int:
    """64-bit checksum of the bytes of an array.

    It changes with any element, with the order of elements and with signs.

    Parameters
    ----------
    elements : numpy.ndarray
        Any array; other layouts than C are copied.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.agreement import checksum
    >>> one, other = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
    >>> checksum(one) == checksum(one.copy()), checksum(one) == checksum(other)
    (True, False)
    """
    data = np.ascontiguousarray(elements)
    return int(checksums(np.array([[data.ctypes.data, data.nbytes]]))[0])


def checksums(segments: Segments) -> NDArray[np.uint64]:
    """Checksum of each segment, see :func:`checksum`."""
    sums = np.empty(len(segments), np.uint64)
    with np.errstate(over="ignore"):  # without a compiler
        summer()(segments, sums)
    return sums
