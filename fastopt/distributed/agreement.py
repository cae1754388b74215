"""Agreement between ranks that all of them make the same call, before anything changes."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.distributed.collectives import share_texts
from fastopt.distributed.ranks import Ranks, listing
from fastopt.optimizer.optimizer import Array


class Fact(Protocol):
    """Values that must be equal on all ranks."""

    @property
    def digest(self) -> int:
        """62-bit hash of the values."""

    def in_words(self) -> Mapping[str, str]:
        """Names and values, for an error message."""


def _digest(parts: Iterable[Any]) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little") >> 2


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


KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        MemoryError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
    )
}
"""Exceptions that all ranks raise with the original type; others become RuntimeErrors."""


class Agreed(NamedTuple):
    """What :func:`agree` has found on any rank."""

    active: bool
    apart: bool


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
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
        own = {name: fact for part in facts for name, fact in part.in_words().items()}
        every = [json.loads(text) for text in share_texts(ranks, json.dumps(own))]
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
            found = [
                f"{listing(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
                for value, ranks in owners.items()
            ]
            return f"for {name} {', '.join(found)}"
    raise AssertionError("digests of equal facts differ")
