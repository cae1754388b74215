"""Import time, and the difference to the import time of numba."""

from .common import import_overhead


def timeraw_import():
    return "import fastopt"


def timeraw_import_numba():
    return "import numba"


def track_overhead():
    return import_overhead()


track_overhead.unit = "s"
