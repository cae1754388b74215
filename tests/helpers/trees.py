"""Trees of states."""

import numpy as np

from helpers.tensor_lists import frozen


def parts(tree, path=()):
    """All parts of a nested value by path."""
    yield path, tree
    items = tree.items() if isinstance(tree, dict) else ()
    for key, part in enumerate(tree) if isinstance(tree, (list, tuple)) else items:
        yield from parts(part, (*path, key))


def assert_same(got, expected):
    """Trees are equal, also in types and in order, and arrays of the first may be written to."""
    assert frozen(got) == frozen(expected)
    one, other = ([(path, type(part)) for path, part in parts(each)] for each in (got, expected))
    assert one == other
    assert all(part.flags.writeable for _, part in parts(got) if isinstance(part, np.ndarray))
