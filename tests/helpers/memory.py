"""Memory that Python's allocators give out."""

import tracemalloc
from contextlib import contextmanager


@contextmanager
def at_most(size):
    """Check that what runs inside takes at most `size` bytes at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
