"""Ranks that find out, before anything changes, whether all of them are about to do the same."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from fastopt.checkpoint.errors import CheckpointError
from fastopt.optimizer.base import Optimizer

__all__ = ["Facts", "agree", "attempt", "digest", "facts_of", "share_texts"]

Facts = Mapping[str, str]
"""What all ranks must have in common, in words."""

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, OSError, TypeError, ValueError)
}
"""Errors that all ranks raise as the one did that met them; others become RuntimeErrors."""


def share_texts(comm: Any, text: str) -> list[str]:
    """Return the texts of all ranks."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([data.size]), sizes)
    received = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(data, [received, sizes])
    return [part.tobytes().decode() for part in np.split(received, np.cumsum(sizes)[:-1])]


def digest(facts: Facts) -> int:
    """Number of 62 bits that tells different facts apart."""
    text = json.dumps(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def facts_of(optimizer: Optimizer) -> dict[str, str]:
    """Class and numbers of an optimizer, the present rate among them."""
    plain = {
        name: str(value)
        for name, value in vars(optimizer).items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
    tables = {name: str(getattr(optimizer, name)) for name in ("lr_mult", "wd_mult")}
    rate = {"learning rate": str(optimizer.learning_rate)}
    return {"optimizer": type(optimizer).__name__, **plain, **tables, **rate}


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """Result of a function, or the error that it raises."""
    try:
        return work(*arguments), None
    except Exception as error:
        return None, error


def agree(
    comm: Any, facts: Callable[[], Facts], number: int = 0, error: Exception | None = None
) -> None:
    """Return if no rank has an error and all have equal facts; else raise on every rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks; all of them must call.
    facts : callable
        Returns what the ranks must have in common; asked only where they do not agree.
    number : int
        The :func:`digest` of the facts.
    error : Exception, optional
        What went wrong on this rank.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    seen = np.array([error is not None, number, -number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, seen, MPI.MAX)
    if seen[0]:
        told = None if error is None else [type(error).__name__, str(error)]
        _raise_first(share_texts(comm, json.dumps(told)), error)
    if seen[1] != -seen[2]:
        every = [json.loads(text) for text in share_texts(comm, json.dumps(dict(facts())))]
        raise ValueError(f"ranks disagree: {_difference(every)}")


def _raise_first(texts: list[str], error: Exception | None) -> None:
    rank, told = next((r, json.loads(text)) for r, text in enumerate(texts) if text != "null")
    raise KINDS.get(told[0], RuntimeError)(f"rank {rank}: {told[1]}") from error


def _difference(every: list[Facts]) -> str:
    """The first fact in which a rank differs from rank 0."""
    for rank, facts in enumerate(every):
        for name in dict.fromkeys([*every[0], *facts]):
            first, other = every[0].get(name, "nothing"), facts.get(name, "nothing")
            if first != other:
                return f"for {name} rank 0 has {first}, rank {rank} has {other}"
    return "their facts differ only in a digest"
