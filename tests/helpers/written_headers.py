"""Updaters whose arrays Python reads, as where compiled code must not read their headers."""

import sys

import pytest

from fastopt._engine.reader import Reader
from fastopt._kernels.numpy_abi import readable

in_compiled_code = pytest.mark.skipif(not readable(), reason="Python reads headers in this build")
"""For tests of calls that Python does not enter."""

threads_start_anew = pytest.mark.skipif(
    getattr(sys.flags, "thread_inherit_context", False),
    reason="threads of this build inherit the context of the thread that starts them",
)
"""For tests of context variables in new threads."""


def read_in_python(updater):
    """Let Python write what compiled code reads of the arrays of an updater; return it."""
    records = updater.records
    vars(updater)["_entry"], records.enter = Reader, None
    records.forget()
    return updater
