"""Memory that the ranks on a node share."""

import json
import mmap
import os
from typing import cast

import numpy as np

from fastopt.distributed.agreement import attempt
from fastopt.distributed.collectives import share_texts
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array


def shared_zeros(node: Ranks, nbytes: int) -> Array:
    """Bytes that all ranks of a node read and write; all of them must make this call.

    The memory has no name that a crash could leave behind: it is freed with the last process that
    has an array of it.

    Parameters
    ----------
    node : Ranks
        The ranks on this node.
    nbytes : int
        Number of bytes, the same on all ranks.

    Raises
    ------
    OSError
        Some rank cannot share memory: the system has too little or is not Linux, or the ranks run
        in separate containers. All ranks raise the error.
    """
    file, error = attempt(_created, nbytes) if node.rank == 0 else (None, None)
    try:
        own = None if file is None else [os.getpid(), file, _identity(file)]
        found = json.loads(share_texts(node, json.dumps(own))[0])
        memory, problem = attempt(_attached, *found, nbytes) if found else (None, None)
        error = error or problem
        reasons = share_texts(node, str(error or ""))  # then all have opened the file
    finally:
        if file is not None:
            os.close(file)
    for reason in filter(None, reasons):
        raise OSError(reason) from error
    return np.frombuffer(cast(mmap.mmap, memory), np.uint8)


def _created(nbytes: int) -> int:
    """Descriptor of new memory."""
    if not hasattr(os, "memfd_create"):
        raise OSError("ranks share memory on Linux only")
    file = os.memfd_create("fastopt")
    try:
        os.posix_fallocate(file, 0, nbytes)  # otherwise a write could end the process
    except OSError as error:
        os.close(file)
        raise OSError(f"{nbytes} bytes for the ranks of a node: {error.strerror}") from error
    return file


def _attached(process: int, number: int, identity: list[int], nbytes: int) -> mmap.mmap:
    """Memory of a descriptor of another process."""
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        if _identity(file) != identity:  # the process of that number in another container
            raise OSError(f"process {process} is not the one of the first rank of the node")
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _identity(file: int) -> list[int]:
    found = os.fstat(file)
    return [found.st_dev, found.st_ino]
