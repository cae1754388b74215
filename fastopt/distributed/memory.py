"""Arrays that are consecutive in memory and can be sent without packing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def flat_like(arrays: Sequence[Array], dtype: Any = None) -> list[Array]:
    """Return zeros in the shapes of some arrays, consecutive in memory for each dtype.

    :class:`ShardedUpdater` sends gradients from such arrays, and receives weights into them,
    without intermediate copies. Allocate the arrays of a list call with one call of this function,
    in the order of the list.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        The arrays, such as the weights of a list call.
    dtype : dtype, optional
        Dtype of all results. Default: the dtype of each array.

    Returns
    -------
    list of numpy.ndarray
        Views in C order. Each of them keeps the memory of all alive.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.mpi import flat_like
    >>> first, second = flat_like([np.ones((2, 2)), np.ones(3)])
    >>> first.shape, second
    ((2, 2), array([0., 0., 0.]))
    >>> first.base is second.base
    True
    """
    kinds = [np.dtype(array.dtype if dtype is None else dtype) for array in arrays]
    sizes: dict[np.dtype[Any], int] = {}
    starts = []
    for array, kind in zip(arrays, kinds, strict=True):
        starts.append(sizes.get(kind, 0))
        sizes[kind] = starts[-1] + array.size
    memory = {kind: np.zeros(size, kind) for kind, size in sizes.items()}
    return [
        memory[kind][start : start + array.size].reshape(array.shape)
        for array, kind, start in zip(arrays, kinds, starts, strict=True)
    ]
