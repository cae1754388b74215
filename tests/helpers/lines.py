"""Do something at a line of the package that a call passes."""

import os
import sys

import fastopt

PACKAGE = os.path.dirname(fastopt.__file__)
COMPILING = os.path.join(PACKAGE, "_kernels", "compiling.py")


def at_line(moment, act, call):
    """Call, and act at the `moment`-th line of the package; return the number of lines passed.

    Lines of compilation do not count, as only the first call of a process passes them.
    """
    passed = 0

    def trace(frame, event, _):
        nonlocal passed
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name == COMPILING:
            return None
        if event == "line":
            passed += 1
            if passed == moment:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return passed
