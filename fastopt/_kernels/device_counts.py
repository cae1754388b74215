"""CPU kernel that counts a step on a device, and computes its hyper-parameters.

Tests: ``tests/kernels/test_advance.py``, ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from fastopt._kernels.advance import advance
from fastopt._kernels.compiling import compiled


@cache
def begin(rescale: int, keyed: bool, correct: Any, dtype: Any, carries: bool) -> Callable:
    """Kernel ``(table, fields, slots, counts, groups, carried)``.

    See :func:`~fastopt._kernels.advance.advance` for the arrays and the other arguments.
    """

    def begin(table, fields, slots, counts, groups, carried):
        arrays = fields, slots, counts, groups, carried
        advance(table, arrays, correct, dtype, carries, keyed, rescale)

    return compiled(begin, None, parallel=False, nogil=False, also=(correct,))
