"""Do something at a line of the package that a call passes."""

import linecache
import os
import sys

import fastopt
from fastopt._interrupts import uninterrupted

PACKAGE = os.path.dirname(fastopt.__file__)
COMPILING = [os.path.join(PACKAGE, "_kernels", name) for name in ("compiling.py", "signals.py")]


def at_line(moment, act, call, files=PACKAGE):
    """Call, and act at the `moment`-th line of these files; return the number of lines passed.

    Of the package, lines of compilation do not count, as only the first call of a process passes
    them; neither do those with ``with`` or ``try``: Python runs no handler of a signal before a
    block begins, nor between its last line and the release of what it holds.
    """
    passed, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal passed
        name = frame.f_code.co_filename
        if not name.startswith(files) or (files == PACKAGE and name in COMPILING):
            return None
        line = linecache.getline(name, frame.f_lineno or 0)
        if event == "line" and not line.lstrip().startswith(("with ", "try:")):
            passed += 1
            if passed == moment:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        uninterrupted.reset()  # an exception inside its methods leaves the count of its contexts
    return passed
