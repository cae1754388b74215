"""Validation of arrays to be initialized, and assignment of fixed values."""

from typing import Any

import numpy as np

from fastopt.arguments import is_array

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether this is a dtype of integers or floats."""
    return dtype.kind in "iuf" or dtype.name == "bfloat16"


def target(name: str, arr: object) -> Array:
    """Validate `arr` and return it as a base-class array that shares its memory.

    Raises
    ------
    TypeError
        `arr` is not a NumPy array of real numbers.
    ValueError
        `arr` is read-only.
    """
    if not is_array(arr):
        raise TypeError(f"{name}: arr must be a NumPy array, got {type(arr).__name__}")
    if not is_real(arr.dtype):
        raise TypeError(f"{name}: arr must hold real numbers, got dtype {arr.dtype}")
    if not arr.flags.writeable:
        raise ValueError(f"{name}: arr is read-only, an initializer writes to it")
    return np.asarray(arr)


def drawable(name: str, arr: Array) -> type[np.float32] | type[np.float64]:
    """Return the dtype to draw random numbers in; TypeError if `arr` is not a float array."""
    if arr.dtype.name not in FLOATS:
        raise TypeError(
            f"{name}: arr must have one of the dtypes {', '.join(FLOATS)} for random numbers, "
            f"got {arr.dtype}"
        )
    return np.float64 if arr.dtype.name == "float64" else np.float32


def assign(name: str, arr: Array, values: Array, what: str) -> None:
    """Copy `values` into `arr` with broadcasting; only precision may be lost.

    Raises
    ------
    TypeError
        `arr` has an integer dtype, and `values` are floats or integers out of its range.
    ValueError
        `values` does not broadcast to the shape of `arr`.
    """
    if arr.dtype.kind in "iu" and not _within(values, np.iinfo(arr.dtype)):
        raise TypeError(f"{name}: {what} ({values.dtype}) does not fit into {arr.dtype}")
    try:
        values = np.broadcast_to(values, arr.shape)
    except ValueError:
        raise ValueError(
            f"{name}: {what} has shape {values.shape}, which does not fit {arr.shape}"
        ) from None
    arr[...] = values


def _within(values: Array, limits: "np.iinfo[Any]") -> bool:
    """Whether `values` are integers within the limits of a dtype."""
    if values.dtype.kind not in "iu":
        return False
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)
