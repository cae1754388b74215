"""The threading layer that numba runs parallel kernels on."""

import ctypes
from functools import cache
from importlib import metadata

__all__ = ["prefer_tbb"]


@cache
def prefer_tbb() -> bool:
    """Load the TBB library that pip installed, so that numba chooses TBB where it is free to.

    pip puts the library where the dynamic loader does not look. Of numba's layers TBB alone
    survives forks and calls from several threads. Must run before the first parallel kernel does.

    Returns
    -------
    bool
        Whether a library was loaded.
    """
    try:
        files = metadata.files("tbb") or []
    except metadata.PackageNotFoundError:
        return False
    for file in files:
        if file.name.startswith(("libtbb.so.12", "libtbb.12.dylib")):
            try:
                ctypes.CDLL(str(file.locate()), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False
