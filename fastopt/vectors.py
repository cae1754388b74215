"""One vector for the memory of many arrays."""

from typing import Any

import numpy as np

from fastopt._foreign import Array
from fastopt._structure import copied, mapped, named
from fastopt.arguments import brief

__all__ = ["flat"]


def flat(params: object) -> tuple[Array, Any]:
    """Copy nested arrays to one vector, and return it with the structure of views of it.

    The views are consecutive parts of the vector in C order: what is written to the vector, by an
    optimizer of SciPy, a mutation or a reduction over processes, is in the views, and what
    :meth:`fastopt.Updater.step` writes to the views is in the vector.

    Parameters
    ----------
    params : dict, list, tuple, named tuple, dataclass instance or array
        Arrays and numbers, nested to any depth; they do not change. Other leaves, such as strings,
        are kept as they are.

    Returns
    -------
    vector : numpy.ndarray
        The values, in the order of the structure. Its dtype is the one that NumPy gives to a
        concatenation; float64 for integers.
    views : dict, list, tuple, named tuple, dataclass instance or array
        Views of the vector in the shapes of the arrays, in new containers of the same types. A
        number becomes an array of shape ``()``. An array that occurs twice, such as a tied weight,
        is in the vector once, with one view in both places.

    Raises
    ------
    TypeError
        An array is not real.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> vector, views = fastopt.flat({"weight": np.ones((2, 2)), "bias": 0.0})
    >>> vector
    array([1., 1., 1., 1., 0.])
    >>> views["bias"][...] = 5
    >>> vector[:2] = -1
    >>> vector, views["weight"]
    (array([-1., -1.,  1.,  1.,  5.]), array([[-1., -1.],
           [ 1.,  1.]]))
    """
    numbers = [(path, leaf) for path, leaf in named("", params) if _is_number(leaf)]
    keys = [id(leaf) if isinstance(leaf, np.ndarray) else ~k for k, (_, leaf) in enumerate(numbers)]
    arrays: dict[int, Array] = {}
    for key, leaf in zip(keys, numbers, strict=True):
        if key not in arrays:
            arrays[key] = _values(*leaf)
    dtype = np.result_type(*{array.dtype for array in arrays.values()} or {np.dtype(float)})
    if dtype.kind in "biu":
        dtype = np.dtype(float)
    vector, start = np.empty(sum(array.size for array in arrays.values()), dtype), 0
    views = {}
    for key, array in arrays.items():
        view = vector[start : start + array.size].reshape(array.shape)
        view[...] = array
        views[key] = view
        start += array.size
    rest = map(views.__getitem__, keys)
    return vector, mapped(lambda leaf: next(rest) if _is_number(leaf) else leaf, params)


def _is_number(leaf: object) -> bool:
    """Whether a leaf is an array or a number."""
    numeric = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
    return numeric or hasattr(leaf, "__array__")


def _values(path: str, leaf: object) -> Array:
    array = np.asarray(copied(leaf))
    if array.dtype.kind not in "biufV" or array.dtype.names is not None:
        at = f" at {path!r}" if path else ""
        raise TypeError(f"params{at} must be an array of real numbers, got {brief(leaf)}")
    return array
