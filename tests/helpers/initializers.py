"""What the tests of the initializers have in common."""

import numpy as np

from fastopt import initializer
from fastopt.initializer import InitDesc, initializer_registry

LIBRARY = sorted(initializer_registry)
ENOUGH = {
    "fusedrnn": {"init": "ones", "num_hidden": 2, "num_layers": 1, "mode": "gru"},
    "constant": {"value": 7},
}
"""Arguments that have no default."""


def made(name, **kwargs):
    """Initializer of this name."""
    return initializer.create(name, **{**ENOUGH.get(name, {}), **kwargs})


def filled(init, desc, shape=(3, 2), dtype=np.float32):
    """New array, filled by `init`."""
    arr = np.full(shape, 9, dtype)
    init(desc, arr)
    return arr


def named(init, name, shape=(3, 2), dtype=np.float64, own=None):
    """New array, filled by `init` or by the parameter's own initializer."""
    return filled(init, InitDesc(name, {"__init__": own}), shape, dtype)
