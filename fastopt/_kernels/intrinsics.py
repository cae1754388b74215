"""Functions of compiled code that are written in LLVM's intermediate representation.

Tests: ``tests/kernels/test_compiling.py``.
"""

from collections.abc import Callable
from typing import Any

from numba.core.extending import _Intrinsic


class _Named(_Intrinsic):  # type: ignore[misc] # final for numba's own checks
    """Intrinsic that is pickled by its name.

    Kernels that refer to it have the pickle in their key in the disk cache. That of numba has the
    function's code and a random number, so that no other process would find the kernel.
    """

    def __reduce__(self) -> str:
        return self.__qualname__


def intrinsic(function: Callable[..., Any] | None = None, **options: bool) -> Any:
    """Decorate a function like :func:`numba.extending.intrinsic`."""
    if function is None:
        return lambda function: intrinsic(function, **options)
    kind = _Intrinsic if "<locals>" in function.__qualname__ else _Named
    made = kind(function.__name__, function, **options)
    made._register()
    return made
