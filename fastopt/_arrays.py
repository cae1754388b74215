"""Type hints for the weights and gradients that updates accept."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastopt.sparse import RowSparse


class OnDevice(Protocol):
    """Array on a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape and dtype."""


class Exchanged(Protocol):
    """Array of another library, such as a torch tensor."""

    def __dlpack__(self) -> Any:
        """Return the DLPack capsule."""


class Compressed(Protocol):
    """Array or matrix of scipy.sparse."""

    def tocsr(self) -> Any:
        """Return the array in CSR format."""


Weight = NDArray[Any] | OnDevice | Exchanged
"""A dense array that is updated in place."""

Rows = tuple[NDArray[Any], NDArray[np.integer[Any]] | list[int] | int]
"""Values of some rows, and their indices."""

Gradient = Weight | RowSparse | Compressed | Rows
"""A dense or row-sparse gradient."""
