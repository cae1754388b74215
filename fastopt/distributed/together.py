"""One checkpoint of several updaters and tables, which is complete or does not count."""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastopt.arguments import brief
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike, write_atomically
from fastopt.checkpoint.restore.shards import RUN
from fastopt.distributed.agreement import Facts, agree, attempt, is_agreed
from fastopt.distributed.collectives import share_texts
from fastopt.distributed.job import private
from fastopt.distributed.ranks import Ranks, time_limit

LATEST = "latest.json"
CALL = "save_checkpoint"

Save = Callable[[Path], Any]


def save_checkpoint(
    folder: PathLike, parts: Mapping[str, Save], comm: Any, timeout: float | None = None
) -> None:
    """Save several updaters and tables as one checkpoint; all ranks must call it.

    The parts are saved in a new directory in `folder`. Then the file ``latest.json``, which names
    it, is replaced, and older checkpoints are removed. A crash at any moment leaves either all
    parts of the old checkpoint or all of the new one. The parts can be loaded on any number of
    ranks, see :func:`latest_checkpoint`.

    Parameters
    ----------
    folder : str or os.PathLike
        Directory that all ranks share, created if necessary, the same on all ranks.
    parts : mapping of str to callable
        Functions that save a part to a path, by file name, such as ``table.save``. They are called
        in order, on all ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator.
    timeout : float, optional
        See :class:`ShardedUpdater`.

    Raises
    ------
    TypeError, ValueError
        `parts` are no functions by file name, or ranks disagree.
    OSError
        A file cannot be written on some rank.
    Exception
        Any error of a part. All ranks raise the error; the old checkpoint is unchanged.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from fastopt import Adam, EmbeddingTable
    >>> from mpi4py import MPI
    >>> from fastopt.distributed import ShardedEmbeddingTable, ShardedUpdater
    >>> from fastopt.distributed import latest_checkpoint, save_checkpoint
    >>> comm, weights = MPI.COMM_WORLD, {"w": np.zeros(3)}
    >>> updater = ShardedUpdater(Adam(), comm)
    >>> updater("w", np.ones(3), weights["w"])
    >>> table = ShardedEmbeddingTable(EmbeddingTable(4, "adam"), comm)
    >>> def save_model(path):
    ...     updater.save(path, weights)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     folder = comm.bcast(folder)
    ...     save_checkpoint(folder, {"model": save_model, "words": table.save}, comm)
    ...     found = latest_checkpoint(folder)
    ...     updater.load(found["model"], weights=weights)
    ...     table = ShardedEmbeddingTable.load(found["words"], comm)
    Skipped(missing=[], extra=[])
    """
    limit = time_limit(timeout)
    ranks = private(comm, limit).ranks
    ranks.begin(CALL, limit)
    run = share_texts(ranks, secrets.token_hex(8))[0]
    target, latest = Path(folder, run), Path(folder, LATEST)

    def check() -> Facts:
        for name, save in parts.items():
            if not (_is_file_name(name) and callable(save)):
                raise TypeError(f"parts must be functions by file name, got {brief(name)}")
        return Facts(folder=str(folder), parts=", ".join(parts))

    def finish() -> None:
        if ranks.rank == 0:
            write_atomically(latest, [json.dumps({"run": run, "parts": [*parts]}).encode()])

    facts, error = attempt(check)
    agree(ranks, [facts or Facts()], error)
    try:
        _agreed(ranks, lambda: target.mkdir(parents=True, exist_ok=True))
        for name, save in parts.items():
            _agreed(ranks, partial(save, target / name))
            ranks.begin(CALL, limit)
        _agreed(ranks, finish)
    except Exception:
        if ranks.rank == 0 and not (latest.exists() and run in latest.read_text("utf-8")):
            shutil.rmtree(target, ignore_errors=True)
        raise
    if ranks.rank == 0:
        for other in Path(folder).iterdir():
            if re.fullmatch(RUN, other.name) and other.name != run:
                shutil.rmtree(other, ignore_errors=True)
    agree(ranks)


def latest_checkpoint(folder: PathLike) -> dict[str, Path]:
    """Return the paths of the parts of the latest complete checkpoint, by name.

    Parameters
    ----------
    folder : str or os.PathLike
        Directory of :func:`save_checkpoint`.

    Returns
    -------
    dict of str to pathlib.Path
        Arguments of the ``load`` methods; empty if there is no checkpoint yet.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        ``latest.json`` is damaged.
    """
    path = Path(folder, LATEST)
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    match found:
        case {"run": str(run), "parts": [*names]} if re.fullmatch(RUN, run):
            if all(map(_is_file_name, names)):
                return {name: Path(folder, run, name) for name in names}
    raise CheckpointError(f"{path}: not a file of save_checkpoint()")


def _is_file_name(name: Any) -> bool:
    """Whether a name is that of a file in the folder."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _agreed(ranks: Ranks, work: Callable[[], Any]) -> None:
    """Do the work of this rank; an error is raised on all ranks."""
    _, error = attempt(work)
    if error is not None and is_agreed(error):
        raise error
    agree(ranks, (), error)
