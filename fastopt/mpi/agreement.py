"""Ranks that find out, before anything changes, whether all of them are about to do the same."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from mpi4py import MPI

from fastopt.checkpoint.errors import CheckpointError
from fastopt.mpi.collectives import gathered, wait
from fastopt.optimizer.optimizer import TRANSIENT, Optimizer

__all__ = ["Facts", "agree", "attempt", "facts_of", "share_texts"]


class Facts(dict[str, str]):
    """What all ranks must have in common, in words."""

    @cached_property
    def digest(self) -> int:
        """Number of 62 bits that tells different facts apart."""
        text = json.dumps(self).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2

    def plus(self, **more: str) -> "Facts":
        """These facts and more."""
        return Facts({**self, **more})


KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, OSError, TypeError, ValueError)
}
"""Errors that all ranks raise as the one did that met them; others become RuntimeErrors."""


def share_texts(comm: Any, text: str) -> list[str]:
    """Return the texts of all ranks."""
    data, sizes = gathered(comm, np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in np.split(data, np.cumsum(sizes)[:-1])]


def facts_of(optimizer: Optimizer) -> Facts:
    """Class and numbers of an optimizer and of its schedule."""
    schedule = optimizer.lr_scheduler
    described = f"{type(schedule).__name__} {_numbers(getattr(schedule, '__dict__', {}))}"
    tables = {name: str(getattr(optimizer, name)) for name in ("lr_mult", "wd_mult")}
    kind = {"optimizer": type(optimizer).__name__, "lr_scheduler": described}
    kept = {name: value for name, value in vars(optimizer).items() if name not in TRANSIENT}
    kept |= {name: getattr(optimizer, name) for name in optimizer.in_arrays}
    return Facts({**kind, **_numbers(kept), **tables})


def _numbers(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Attributes that are numbers or words."""
    return {
        name: str(value)
        for name, value in attributes.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """Result of a function, or the error that it raises."""
    try:
        return work(*arguments), None
    except Exception as error:
        return None, error


def agree(comm: Any, facts: Sequence[Facts] = (), error: Exception | None = None) -> None:
    """Return if no rank has an error and all have equal facts; else raise on every rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks; all of them must call.
    facts : sequence of Facts
        What the ranks must have in common. Only digests are compared as long as they do.
    error : Exception, optional
        What went wrong on this rank.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    number = hash(tuple(part.digest for part in facts)) >> 2  # of integers, so the same everywhere
    seen = np.array([error is not None, number, -number], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, seen, MPI.MAX))
    if seen[0]:
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS]
        told = None if error is None else [(names or ["RuntimeError"])[0], str(error)]
        _raise_first(share_texts(comm, json.dumps(told)), error)
    if seen[1] != -seen[2]:
        own = {name: fact for part in facts for name, fact in part.items()}
        every = [json.loads(text) for text in share_texts(comm, json.dumps(own))]
        raise ValueError(f"ranks disagree: {_difference(every)}")


def _raise_first(texts: list[str], error: Exception | None) -> None:
    rank, told = next((r, json.loads(text)) for r, text in enumerate(texts) if text != "null")
    raise KINDS.get(told[0], RuntimeError)(f"rank {rank}: {told[1]}") from error


def _difference(every: list[dict[str, str]]) -> str:
    """The first fact in which a rank differs from rank 0."""
    for rank, facts in enumerate(every):
        for name in dict.fromkeys([*every[0], *facts]):
            first, other = every[0].get(name, "nothing"), facts.get(name, "nothing")
            if first != other:
                return f"for {name} rank 0 has {first}, rank {rank} has {other}"
    raise AssertionError("digests of equal facts differ")
