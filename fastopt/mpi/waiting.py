"""Waiting for other ranks without keeping them from their work."""

import os
from typing import Any

__all__ = ["wait"]

_let_others: Any = getattr(os, "sched_yield", lambda: None)


def wait(request: Any) -> None:
    """Wait until an operation has ended; a CPU that another process waits for is given to it.

    MPI libraries wait in a loop that never lets go, which takes the time of the very ranks that
    are waited for wherever there are more of them than CPUs.
    """
    while not request.Test():
        _let_others()
