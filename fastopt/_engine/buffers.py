"""Reusable scratch memory for matrix arithmetic.

Tests: ``tests/engine/test_newton_schulz.py``.
"""

import math
from typing import Any

import numpy as np

from fastopt._engine.validate import Array


class Buffers:
    """Scratch arrays by name and dtype; their memory grows when needed.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt._engine.buffers import Buffers
    >>> buffers = Buffers()
    >>> large, small = (buffers("x", shape, np.dtype("f4")) for shape in ((3, 4), (2, 5)))
    >>> small.shape, np.shares_memory(large, small)
    ((2, 5), True)
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, Any], Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: type | np.dtype[Any]) -> Array:
        """Return a contiguous array of this shape; its contents are unspecified."""
        size = math.prod(shape)
        flat = self._memory.get((name, dtype))
        if flat is None or flat.size < size:
            flat = self._memory[name, dtype] = np.empty(size, dtype)
        return flat[:size].reshape(shape)
